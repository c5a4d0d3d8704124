"""Nodes are copied with their names; of the trunk only what the output or a head needs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers.analysed import analysed
from tests.helpers.blocks import Net, data
from zipfx.merge.graph import copy_head, copy_trunk, needed_nodes
from zipfx.merge.heads import HeadPlan, Unmerge
from zipfx.merge.origin import origin_of
from zipfx.model.calls.expect import Expectation, expect_equal


def kept(forward: Callable[[Any, Tensor], Tensor], cut: str, **parts: Any) -> list[str]:
    """The names of the nodes that a trunk needs."""
    found = analysed(Net(forward, **parts), data(3))
    nodes = list(found.module.graph.nodes)
    last = [n.name for n in nodes].index(cut)
    return [n.name for n in needed_nodes(nodes[: last + 1], found.facts)]


def test_weights_that_only_the_head_reads_are_not_of_the_trunk() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        late, early = m.w * 2, m.w + 1
        y = m.a(x) * early
        return y.relu() * late

    names = kept(forward, "mul_1", a=nn.Linear(3, 4), w=torch.ones(4))
    assert "add" in names
    assert "mul" not in names


def test_what_writes_to_a_needed_value_is_needed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        early, late = m.w.clone(), m.w.clone()
        early.mul_(2)
        late.mul_(3)
        y = m.a(x) * early
        return y * late

    names = kept(forward, "mul", a=nn.Linear(3, 4), w=torch.ones(4))
    assert names == ["x", "w", "clone", "mul_", "a", "mul"]


def test_data_that_nothing_reads_is_kept() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a(x).relu()  # it may count, or raise
        return m.b(x)

    names = kept(forward, "b", a=nn.Linear(3, 4), b=nn.Linear(3, 4))
    assert names == ["x", "a", "relu", "b"]


def traced() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


def test_copies_keep_names_and_targets_and_say_where_they_are_from() -> None:
    source, graph = traced(), fx.Graph()
    nodes = list(source.graph.nodes)[:-1]
    seen = copy_trunk(graph, nodes)
    assert list(seen) == nodes
    for node, twin in seen.items():
        assert (twin.name, twin.op, twin.target) == (node.name, node.op, node.target)
        assert twin.graph is graph
        assert origin_of(twin).source == node.name
        assert origin_of(twin).head is None
    assert not any(origin_of(node).source for node in nodes)  # the source is left as it was


def test_what_is_expected_of_inputs_is_checked_behind_them() -> None:
    graph, source = fx.Graph(), list(traced().graph.nodes)
    name = str(source[0].target)
    copy_trunk(graph, source[:-1], [Expectation(name, expect_equal, (3,))])
    placeholder, first, *_ = graph.nodes
    assert (first.target, first.args) == (expect_equal, (placeholder, name, 3))


@pytest.mark.parametrize(
    ("by", "dims", "target"),
    [
        (torch.tensor([1, 0, 3, 2]), (1,), torch.index_select),
        (torch.arange(4), (1, 2), "select"),
        (torch.eye(4, dtype=torch.float64), (1,), "mix"),
    ],
)
def test_a_head_reads_its_own_features(by: Tensor, dims: tuple[int, ...], target: Any) -> None:
    source = traced()
    nodes = list(source.graph.nodes)  # input, 0, 1, 2, output
    graph, root = fx.Graph(), nn.Module()
    root.add_module("task_heads", nn.ModuleList([nn.Module()]))
    copies = {i: graph.node_copy(nodes[i], lambda n: copies[nodes.index(n)]) for i in range(0)}
    copies[0] = graph.node_copy(nodes[0])
    copies[1] = graph.node_copy(nodes[1], lambda n: copies[nodes.index(n)])
    plan = HeadPlan(nodes=[2, 3, 4], restored={1: [Unmerge(dims, by)]}, edges={(1, 2)})
    output = copy_head(graph, root, nodes, copies, plan, 0)
    home = root.get_submodule("task_heads.0")
    assert torch.equal(home.unmerge_0, by)
    names = [n.name for n in graph.nodes][2:]
    assert names == ["head0_unmerge_0", "head0_features", "head0_1", "head0_2"]
    restored = next(n for n in graph.nodes if n.name == "head0_features")
    assert getattr(restored.target, "__name__", "") == getattr(target, "__name__", target)
    assert restored.args[0] is copies[1]
    assert restored.args[1] == (dims[0] if target is torch.index_select else dims)
    assert output.target == "task_heads.0.2"
    assert [origin_of(n).head for n in graph.nodes][2:] == [0] * 4


def test_a_value_that_the_head_overwrites_is_copied_first() -> None:
    source = traced()
    nodes = list(source.graph.nodes)
    graph, root = fx.Graph(), nn.Module()
    root.add_module("task_heads", nn.ModuleList([nn.Module()]))
    copies = {0: graph.node_copy(nodes[0])}
    plan = HeadPlan(nodes=[1, 2, 3, 4], cloned={0: True})
    copy_head(graph, root, nodes, copies, plan, 0)
    clone = list(graph.nodes)[1]
    assert (clone.target, clone.args) == (torch.clone, (copies[0],))
    assert list(graph.nodes)[2].args == (clone,)


def test_structures_of_outputs_are_kept() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(operator.neg, (x,))
    graph.output({"a": (x, y), "b": [y]})
    nodes, target, root = list(graph.nodes), fx.Graph(), nn.Module()
    root.add_module("task_heads", nn.ModuleList([nn.Module()]))
    copies = {0: target.node_copy(x), 1: target.placeholder("y")}
    found = copy_head(target, root, nodes, copies, HeadPlan(nodes=[2]), 0)
    assert found == {"a": (copies[0], copies[1]), "b": [copies[1]]}
