"""Layers wait for all that they read; batches do not pass a layer that is yet to change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers.laws import merge
from zipfx.repair.layerwise import Refit
from zipfx.repair.order import in_order


def graph_of(calls: list[tuple[str, list[int]]]) -> tuple[list[fx.Node], dict[fx.Node, int]]:
    """Nodes that call modules, each on some of those before it (none: on the input)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes: list[fx.Node] = []
    for target, read in calls:
        nodes.append(graph.call_module(target, tuple(nodes[i] for i in read) or (x,)))
    return nodes, {node: i for i, node in enumerate(graph.nodes)}


def test_layers_that_are_applied_once_keep_the_order_of_the_graph() -> None:
    nodes, at = graph_of([("a", []), ("b", [0]), ("c", [])])
    assert in_order([[n] for n in nodes], at) == [(0, False), (1, False), (2, False)]


def test_what_a_repeated_layer_feeds_waits_for_it() -> None:
    """h(a), norm(h), h(b): b comes before h, h before norm."""
    nodes, at = graph_of([("a", []), ("h", [0]), ("norm", [1]), ("b", [0]), ("h", [3])])
    groups = [[nodes[0]], [nodes[1], nodes[4]], [nodes[2]], [nodes[3]]]
    assert in_order(groups, at) == [(0, False), (3, True), (1, True), (2, False)]


def test_two_layers_that_wait_for_one_another_keep_the_order_of_the_graph() -> None:
    nodes, at = graph_of([("a", []), ("b", [0]), ("b", []), ("a", [2])])
    assert in_order([[nodes[0], nodes[3]], [nodes[1], nodes[2]]], at) == [(0, True), (1, True)]


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_passes_a_layer_that_changes_later(seed: int) -> None:
    """In random graphs: every layer once, after what feeds it; apart, if one lies in the way."""
    draw = random.Random(seed)
    calls = [(f"m{draw.randrange(8)}", draw.sample(range(i), min(i, draw.randrange(3))))
             for i in range(14)]  # fmt: skip
    nodes, at = graph_of(calls)
    groups = [[n for n in nodes if n.target == t] for t in dict.fromkeys(t for t, _ in calls)]
    found = in_order(groups, at)
    assert sorted(g for g, _ in found) == list(range(len(groups)))
    for i, (g, apart) in enumerate(found):
        later = [at[n] for other, _ in found[i + 1 :] for n in groups[other]]
        in_the_way = len(groups[g]) > 1 or any(n < max(map(at.get, groups[g])) for n in later)  # type: ignore[type-var, arg-type]
        assert apart == in_the_way


class Crossed(nn.Module):
    """One layer for two inputs, another between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        first = self.out(torch.tanh(self.h(y)))
        return first + self.out(torch.tanh(self.h(torch.tanh(self.b(y)))))


@torch.no_grad()
def test_the_last_layer_is_the_optimum_of_what_it_reads_in_the_end() -> None:
    torch.manual_seed(0)
    models, (x,) = [Crossed().double() for _ in range(2)], (torch.randn(300, 6).double(),)
    settings = Refit(ridges=(0.0,), rounds=0)
    merged = merge(models, [(x,)], matcher="identity", repair=settings)
    read: list[Tensor] = []
    wanted: list[Tensor] = []
    merged.out.register_forward_hook(lambda _, i, o: read.append(i[0]))
    merged(x)
    for model in models:
        model.out.register_forward_hook(lambda _, i, o: wanted.append(o))
        model(x)
    targets = torch.cat([(a + b) / 2 for a, b in zip(wanted[:2], wanted[2:], strict=True)])
    inputs = torch.cat(read)
    missed = inputs @ merged.out.weight.T + merged.out.bias - targets
    gradient = torch.cat([inputs.T @ missed, missed.sum(0, keepdim=True)])
    assert float(gradient.abs().max()) < 1e-9 * float((inputs.T @ targets).abs().max())
