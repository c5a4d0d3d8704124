"""Heads of two unrelated models: each computes exactly what its model would on restored features.

Laws 3 and 4 merge copies, where all unmerges agree. Here the models have nothing in common, so that
every place where U was forgotten, or put twice, shows: head k of the merged model is compared with
the graph of model k, whose values up to the cut are the trunk's, restored for model k.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torchvision.models.resnet import BasicBlock

import zipfx
from tests.helpers.laws import EXACT, error, merge, run, running_modules
from tests.helpers.models import NETS, Net, randomise
from zipfx.analysis.labels.labels import overlapping
from zipfx.analysis.spaces.reorder import select
from zipfx.merge.assemble import Assembly

ZIP = importlib.import_module("zipfx.merge.fused")
# their trunks write into values that were handed on before: nothing to compare node by node
IN_PLACE = {"Inplace", "InplaceInput", "AliasAcrossCut"}


class Values(fx.Interpreter):
    """Runs a graph and keeps every value; `given` values are used instead of computed ones."""

    def __init__(self, module: fx.GraphModule, given: dict[str, Any] | None = None) -> None:
        super().__init__(module)
        self.given = given or {}
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.given[n.name] if n.name in self.given else super().run_node(n)
        self.values[n.name] = copy.deepcopy(value)
        return value


def expected_heads(job: Assembly, merged: fx.GraphModule, x: Sequence[Any]) -> list[Any]:
    """For each model: its own graph, run on the trunk's values with its features restored."""
    trunk = Values(merged)
    trunk.run(*copy.deepcopy(tuple(x)))
    analysis, last = job.analysis, job.analysis.grouping.last
    names = [n.name for n in job.modules[0].graph.nodes]
    matchings = [job.matched[s.name][0] for s in analysis.spaces]
    found = []
    for k, module in enumerate(job.modules):
        given = {}
        for i, node in enumerate(list(module.graph.nodes)[: last + 1]):
            fact = analysis.facts.nodes[i]
            if names[i] not in trunk.values or not fact.is_tensor or node.op == "get_attr":
                continue
            value = trunk.values[names[i]]
            for dims, slots in overlapping(fact.values[0].features):
                source = torch.arange(len(slots[0]))
                for s, index in analysis.grouping.tables(*slots):  # blocks, then what is inside
                    move = torch.arange(len(source))
                    move[index] = index[matchings[s].of(k)]
                    source = move[source]
                value = select(value, dims, source)
            given[node.name] = value
        found.append(Values(module, given).run(*copy.deepcopy(tuple(x))))
    return found


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Assembly]:
    seen: list[Assembly] = []

    class Spy(Assembly):
        def partial(self) -> Any:
            seen.append(self)
            return super().partial()

    monkeypatch.setattr(ZIP, "Assembly", Spy)
    return seen


@torch.no_grad()
def check(net: Net, matcher: str | zipfx.Matcher, jobs: list[Assembly]) -> int:
    models = [randomise(net.make().double(), seed) for seed in (0, 7)]
    x, cuts = net.inputs(8), 0
    for cut in running_modules(models[0]):
        merged = merge(models, net.batches(), partial=cut, matcher=matcher)
        expected = expected_heads(jobs[-1], merged, x)
        for head, wanted in zip(run(merged, x), expected, strict=True):
            assert error(tree_leaves(wanted), tree_leaves(head)) < EXACT, cut
        cuts += 1
    return cuts


@pytest.mark.sweep
@pytest.mark.parametrize("matcher", ["permute", "zip"])
@pytest.mark.parametrize("name", sorted(set(NETS) - IN_PLACE))
def test_heads_of_strangers(name: str, matcher: str, jobs: list[Assembly]) -> None:
    assert check(NETS[name], matcher, jobs) >= 1


class Residual(nn.Module):
    """Two spaces of the trunk that only the head adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.h = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        z: Tensor = self.h((y + self.p(y)).relu())
        return z


class Flip(nn.Module):
    """Features that the head adds to themselves in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.h(y + y.flip(1))
        return z


class Blocks(nn.Module):
    """Residual blocks of torchvision, to be cut inside."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.l, self.h = nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(F.relu(self.n(self.c(x)))).mean((2, 3))
        z: Tensor = self.h(y)
        return z


class Gated(nn.Module):
    """An inverted bottleneck with a gate, and a pyramid sum across scales."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.g = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.Sigmoid())
        self.p, self.q, self.h = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 3, 2, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.d(F.silu(self.e(x))))
        y = y * self.g(y.mean((2, 3), keepdim=True))
        fine, coarse = self.p(y), self.q(y)
        z: Tensor = self.h(fine + F.interpolate(coarse, scale_factor=2.0))
        return z


@pytest.mark.slow
@pytest.mark.parametrize("matcher", ["permute", "zip"])
@pytest.mark.parametrize("make", [Residual, Flip, Blocks, Gated])
def test_heads_that_bring_branches_together(
    make: type[nn.Module], matcher: str, jobs: list[Assembly]
) -> None:
    shape = (5,) if make is Residual else (3, 8, 8)
    assert check(Net(make.__name__, make, (shape,), ()), matcher, jobs) >= 1
