"""Models of one forward function, their spaces in short, and the laws that they must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge

Size = tuple[int, tuple[int, ...]]  # of a space: its features, and the sizes of its blocks


class Net(nn.Module):
    """A forward function over named modules, parameters and buffers; random weights, float64."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = [function]
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)
        randomise(self, 0)
        self.eval().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() > 1:
            p.copy_(noise * 1.2 / math.sqrt(max(1, p[0].numel())))
        else:
            p.copy_(0.5 * noise + (0 if name.endswith("bias") else 0.8))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def data(*shape: int, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed)).double()


def split_heads(x: Tensor, count: int = 3) -> Tensor:
    """(batch, tokens, features) to (batch, heads, tokens, features of a head)."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def law1(model: nn.Module, *shape: int) -> None:
    """Permuting what was found changes nothing, on the example's batch size and on another."""
    example, other = data(*shape), data(*shape, seed=1, batch=5)
    spaces = zipfx.analyze(model, example, verify=False)
    for seed in range(6):
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        for x in (example, other):
            assert error(model(x), twin(x)) < EXACT, (seed, sizes(model, x))


def law3(
    model: nn.Module, *shape: int, seeds: Iterable[int] = range(6), partial: str | None = None
) -> None:
    """Merging a model with its permuted twin gives the model, on another batch size too."""
    spaces = zipfx.analyze(model, data(*shape), verify=False)
    x = data(*shape, seed=9, batch=5)
    batches = [(data(*shape, seed=100 + i, batch=32),) for i in range(6)]
    for seed in seeds:
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        merged = merge([model, twin], batches, matcher="permute", partial=partial)
        whole = error(model(x), merged(x)) if partial is None else 0.0
        heads = heads_error(merged, [model(x)] * 2, (x,)) if partial is not None else 0.0
        assert max(whole, heads) < 1e-11, seed


def sizes(model: nn.Module, x: Tensor) -> list[Size]:
    return sorted((s.size, s.blocks) for s in zipfx.analyze(model, x, verify=False))


def projections() -> dict[str, nn.Module]:
    """Of attention from 8 features with 3 heads of 4 dimensions to 3 features."""
    inner = {name: nn.Linear(8, 12) for name in "qkv"}
    return {**inner, "o": nn.Linear(12, 3)}


ATTENTION: list[Size] = [(3, ()), (12, (4, 4, 4)), (12, (4, 4, 4))]  # heads, q with k, v


def shuffled(x: Tensor, groups: int) -> Tensor:
    return F.channel_shuffle(x, groups)
