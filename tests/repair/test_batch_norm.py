"""Statistics of a merge are measured again, in every norm and of all samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.convolutional import cut, images, models
from tests.helpers.laws import error, merge
from tests.helpers.models import NETS


def test_bn_measures_all_samples_alike() -> None:
    """Mean and unbiased variance of what each norm reads, once those before it are right."""
    pair, x = models(), images(64)
    merged = merge(pair, cut(x, 60, 4), repair="bn")
    with torch.no_grad():
        y = merged.a(x)
        assert error(y.mean((0, 2, 3)), merged.n1.running_mean) < 1e-12
        assert error(y.var((0, 2, 3)), merged.n1.running_var) < 1e-12
        y = merged.b(F.relu(merged.n1(y)))
        assert error(y.mean((0, 2, 3)), merged.n2.running_mean) < 1e-12
        assert error(y.var((0, 2, 3)), merged.n2.running_var) < 1e-12
    assert merged.n1.momentum == 0.1
    assert not merged.n1.training


def test_bn_reaches_norms_in_leaves_in_functions_and_those_called_twice() -> None:
    class Pair(nn.Sequential):
        """A leaf to a tracer of the caller's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Pair(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))
            self.twice = nn.BatchNorm1d(6)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))
            self.h = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.leaf(x)
            y = torch.relu(self.twice(y)) + self.twice(torch.tanh(y))
            return self.h(F.batch_norm(y, self.mean, self.var))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, Pair) or super().is_leaf_module(m, name)

    torch.manual_seed(0)
    pair = [Net().double().eval() for _ in range(2)]
    x = torch.randn(40, 4).double()
    merged = merge(pair, cut(x, 30, 10), repair="bn", tracer=Tracer())
    with torch.no_grad():
        y = merged.leaf[0](x)
        assert error(y.mean(0), merged.leaf[1].running_mean) < 1e-12
        y = F.relu(merged.leaf[1](y))
        assert error(y.var(0), merged.leaf[3].running_var) < 1e-12
        y = merged.leaf[3](y)
        both = torch.cat([y, torch.tanh(y)])
        assert error(both.mean(0), merged.twice.running_mean) < 1e-12
        y = torch.relu(merged.twice(y)) + merged.twice(torch.tanh(y))
        assert error(y.mean(0), merged.mean) < 1e-12
        assert error(y.var(0), merged.var) < 1e-12


def test_bn_without_any_norm_says_so() -> None:
    torch.manual_seed(0)
    pair = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)]
    notes = merge(pair, [(torch.randn(8, 4),)], repair="bn").meta["zipfx"].notes
    assert any("has no BatchNorm" in note for note in notes)


both = pytest.mark.parametrize("partial", [False, True], ids=["full", "partial"])


# ------------------------------------------------------------------ repair
class Counting:
    """A loader that counts its passes and batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.given = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.given += 1
            yield batch


@both
def test_repair_measures_the_statistics_of_the_merged_features(partial: bool) -> None:
    net = NETS["BatchNorm"]
    models = [net.build(s) for s in (0, 1)]
    for model in models:
        model.get_submodule("bn1").momentum = 0.3
    data = Counting(net.batches(3))
    merged = merge(models, data, partial="bn1" if partial else None, repair="bn")
    report = merged.meta["zipfx"]
    assert report.batches == {"observe": 3, "repair": 3}
    assert data.given >= 6
    norm = merged.get_submodule("bn1")
    assert norm.momentum == 0.3
    assert int(norm.num_batches_tracked) == 0  # as in the model: batches are not what is counted
    with torch.no_grad():
        seen = torch.cat([merged.get_submodule("a")(x) for (x,) in net.batches(3)])
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, seen.var((0, 2, 3)))


def test_without_repair_the_variance_is_that_of_the_merged_features() -> None:
    """Of two copies it is the copy's own; of unrelated features it is less than their mean."""
    net = NETS["BatchNorm"]
    model = net.build(0)
    same = merge([model, copy.deepcopy(model)], net.batches(), matcher="permute")
    mine = model.get_submodule("bn1").running_var
    torch.testing.assert_close(same.get_submodule("bn1").running_var, mine)
    other = net.build(1)
    mixed = merge([model, other], net.batches(), matcher="permute").get_submodule("bn1").running_var
    both_sum = mine.sum() + other.get_submodule("bn1").running_var.sum()
    assert 0.25 * both_sum < mixed.sum() < 0.5 * both_sum
