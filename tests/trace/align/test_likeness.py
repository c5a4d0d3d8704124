"""Weights of which the first uses look alike correspond by what becomes of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, run
from zipfx import ZipError


# ------------------------------------------------------------------ weights of like first use
class Glu(nn.Module):
    def __init__(self, order: str = "value gate") -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(8, 16), nn.Linear(8, 16)
        self.order = order.split()

    def forward(self, x: Tensor) -> Tensor:
        y = {name: getattr(self, name)(x) for name in self.order}
        return y["value"] * torch.sigmoid(y["gate"])


class Attention(nn.Module):
    """order: in which the projections are evaluated; names: theirs, for query, key and value."""

    def __init__(self, order: str = "q k v", names: str = "q k v") -> None:
        super().__init__()
        self.names = dict(zip("qkv", names.split(), strict=True))
        for name in sorted(self.names.values()):
            self.add_module(name, nn.Linear(8, 8))
        self.order = order.split()

    def forward(self, x: Tensor) -> Tensor:
        y = {name: getattr(self, self.names[name])(x) for name in self.order}
        return torch.softmax(y["q"] @ y["k"].transpose(-1, -2), -1) @ y["v"]


def followed(block: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for t in block.parameters():
        nn.init.normal_(t, 0, 0.3)
    width = 16 if isinstance(block, Glu) else 8
    return nn.Sequential(block, nn.ReLU(), nn.Linear(width, 3)).double().eval()


@pytest.mark.sweep
@pytest.mark.parametrize("partial", [None, "0", "1", "first of block", "last of block"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Glu(), Glu("gate value")),
        (Attention(), Attention("v k q")),
        (Attention(), Attention("k v q")),
        (Attention("v q k"), Attention("q v k")),
    ],
)
def test_branches_may_be_evaluated_in_any_order(
    one: nn.Module, other: nn.Module, partial: str | None
) -> None:
    """Law 3: the same weights correspond, though their first uses look alike."""
    if partial and "block" in partial:
        partial = f"0.{one.order[0 if 'first' in partial else -1]}"
    model, twin = followed(copy.deepcopy(one)), followed(copy.deepcopy(other))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(6, 5, 8).double()
    expected = run(model, (x,))
    assert error(expected, run(twin, (x,))) < EXACT
    spaces = zipfx.analyze(twin, x)
    twin = spaces.permuted(twin, spaces.random_permutations(1))
    merged = merge([model, twin], [(x,)] * 2, partial=partial, matcher="permute")
    for output in run(merged, (x,)) if partial else [run(merged, (x,))]:
        assert error(expected, output) < EXACT
    assert partial != "1" or not [
        n for n, _ in merged.task_heads[1].named_parameters() if "0." in n
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "names"), [("v k q", "a b c"), ("k v q", "v q k")])
def test_what_is_computed_counts_more_than_names(order: str, names: str) -> None:
    """Two layers of attention, the projections of which have other names, or misleading ones."""

    def make(*given: str) -> nn.Module:
        torch.manual_seed(0)
        blocks = [Attention(*given), Attention(*given)]
        return nn.Sequential(*blocks, nn.Linear(8, 3)).double().eval()

    model, twin = make(), make(order, names)
    for i in range(2):
        for ours, theirs in zip("qkv", names.split(), strict=True):
            getattr(twin[i], theirs).load_state_dict(getattr(model[i], ours).state_dict())
    twin[2].load_state_dict(model[2].state_dict())
    x = torch.randn(6, 5, 8).double()
    expected = run(model, (x,))
    assert error(expected, run(twin, (x,))) < EXACT
    for partial in (None, "0", "1"):
        merged = merge([model, twin], [(x,)] * 2, partial=partial, matcher="identity")
        for output in run(merged, (x,)) if partial else [run(merged, (x,))]:
            assert error(expected, output) < EXACT


def test_what_the_trunk_hands_over_must_be_computed_in_each_model() -> None:
    """Else its head would do without the trunk, which would be the average of strangers."""

    class Gated(Glu):
        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.value(x), self.gate(x)
            return torch.tanh(value) * torch.sigmoid(gate)

    models = [followed(Glu(), 0), followed(Gated(), 1)]
    x = torch.randn(6, 8).double()
    for partial in (None, "0", "1"):
        with pytest.raises(ZipError, match=r"the last cut that works is partial='0\.gate'"):
            merge(models, [(x,)], partial=partial)
