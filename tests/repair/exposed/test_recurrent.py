"""Recurrent layers give the same with their input layers apart, and are refitted by these."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tests.helpers.laws import EXACT, error, merge, permuted
from zipfx.repair.exposed.splice import title
from zipfx.repair.exposed.unfold import unfold

KINDS = (nn.LSTM, nn.GRU, nn.RNN)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "num_layers": 2},
    {"bidirectional": True, "num_layers": 2},
    {"bias": False},
]
CASES = list(itertools.product(KINDS, SETTINGS))


class Around(nn.Module):
    """(T, B, 6) -> (T, B, 3); the last state, too; begin: of the states."""

    def __init__(self, kind: Any, *, begins: bool = False, **settings: Any) -> None:
        super().__init__()
        self.first, self.memory = nn.Linear(6, 6), kind(6, 8, **settings)
        self.last = nn.Linear(16 if settings.get("bidirectional") else 8, 3)
        self.begins = begins

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = torch.tanh(self.first(x))
        y, state = self.memory(x, self._begin(x)) if self.begins else self.memory(x)
        return self.last(y), state

    def _begin(self, x: Tensor) -> Any:
        layers = self.memory.num_layers * (2 if self.memory.bidirectional else 1)
        batch = x.shape[0 if self.memory.batch_first else 1]
        state = x.new_zeros(layers, batch, 8) + torch.arange(float(layers)).view(-1, 1, 1).to(x)
        return (state, state - 1) if isinstance(self.memory, nn.LSTM) else state


def around(*args: Any, **settings: Any) -> nn.Module:
    return Around(*args, **settings).double().eval()


def batches(count: int = 4) -> list[tuple[Tensor]]:
    return [(torch.randn(6, 8, 6, dtype=torch.float64),) for _ in range(count)]


@torch.no_grad()
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_it_gives_what_it_gave(kind: Any, settings: dict[str, Any], begins: bool) -> None:
    """And so after what it makes of its inputs has been changed."""
    model, ((x,),) = around(kind, begins=begins, **settings), batches(1)
    module = fx.symbolic_trace(model)
    wide = unfold(module, [x])
    layers = [n for n in wide.graph.nodes if "weight_ih" in title(n)]
    ways = 2 if settings.get("bidirectional") else 1
    assert len(layers) == ways * settings.get("num_layers", 1)
    for change in (False, True):
        if change:
            wide.get_submodule(str(layers[-1].target)).weight.data.mul_(2)  # type: ignore[union-attr, operator]
        for a, b in zip(tree_leaves(model(x)), tree_leaves(wide(x)), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings"), CASES[1::4])
def test_a_merge_with_a_permuted_copy_is_exact(kind: Any, settings: dict[str, Any]) -> None:
    model, data = around(kind, **settings), batches()
    twin = permuted(model, data[0])
    merged = merge([model, twin], data, matcher="permute", repair="refit")
    assert error(merged(*data[0])[0], model(*data[0])[0]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("front", ["symbolic", "export"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_above_the_first_come_nearer(kind: Any, front: str) -> None:
    """The first reads what it always has; what is left alone is named."""
    torch.manual_seed(0)
    models = [around(kind, num_layers=2, batch_first=True) for _ in range(2)]
    data = batches(8)
    report = merge(models, data, repair="refit", front=front).meta["zipfx"]
    names = {r.name: r for r in report.refits}
    assert list(names) == ["first", "memory.weight_ih_l0", "memory.weight_ih_l1", "last"]
    upper = names["memory.weight_ih_l1"]
    assert upper.after < upper.before / 2
    assert "not refitted: memory.weight_hh_l0, memory.weight_hh_l1" in report.notes


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_is_no_plain_batch_is_left_alone() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(6, 8, proj_size=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(x)[0]  # type: ignore[no-any-return]

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.GRU(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(x)[0]  # type: ignore[no-any-return]

    for model, x in ((Projected(), torch.randn(5, 2, 6)), (Single(), torch.randn(5, 6))):
        wide = unfold(fx.symbolic_trace(model), [x])
        assert not [n for n in wide.graph.nodes if "weight_ih" in title(n)]
