"""What is asked about the nodes of a graph: their names in messages, modules, tensors, sources."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zipfx.trace.nodes import (
    ancestors,
    describe,
    inputs_of,
    is_in_place,
    looks,
    module_path,
    module_paths,
    name_of,
    only_looked_at,
    spot,
    tensors_at,
)
from zipfx.trace.tracing import trace


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x)) * self.scale + x.new_zeros(self.scale.shape)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Inner(), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).sigmoid()


@pytest.fixture(scope="module")
def nodes() -> dict[str, fx.Node]:
    return {n.name: n for n in trace(Outer(), inputs=(torch.ones(2, 3),)).graph.nodes}


def test_messages_name_a_node_its_module_and_its_function(nodes: dict[str, fx.Node]) -> None:
    assert describe(nodes["inner_layer"]) == "node 'inner_layer' (call_module inner.layer)"
    assert describe(nodes["relu"]) == "node 'relu' (call_function relu in module 'inner')"
    assert describe(nodes["sigmoid"]) == "node 'sigmoid' (call_method sigmoid)"
    assert describe(nodes["x"]) == "node 'x' (placeholder x)"
    assert spot(nodes["relu"]) == "node 'relu' in module 'inner'"
    assert spot(nodes["sigmoid"]) == "node 'sigmoid'"


def test_a_node_lies_in_modules_outermost_first(nodes: dict[str, fx.Node]) -> None:
    assert module_path(nodes["x"]) == module_path(nodes["sigmoid"]) == ""
    assert module_path(nodes["inner_layer"]) == "inner.layer"
    assert [p for p in module_paths(nodes["inner_layer"]) if p] == ["inner", "inner.layer"]


def test_the_tensors_of_a_node_are_those_of_its_module_or_the_one_it_gets() -> None:
    module = trace(Outer(), inputs=(torch.ones(2, 3),))
    found = {n.name: tensors_at(module, n) for n in module.graph.nodes}
    assert [t.shape for t in found["inner_layer"]] == [(3, 3), (3,)]
    assert len(found["norm"]) == 5  # with its running statistics
    assert [t is module.inner.scale for t in found["inner_scale"]] == [True]
    assert found["relu"] == found["x"] == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (operator.iadd, True),
        (operator.setitem, True),
        (operator.add, False),
        ("add_", True),
        ("__add__", False),
        (torch.relu_, True),
        (torch.relu, False),
        (torch.ops.aten.add.Tensor, False),
    ],
)
def test_what_writes_goes_by_its_name(target: Any, expected: bool) -> None:
    assert is_in_place(target) == expected


def test_functions_and_methods_have_names() -> None:
    assert [name_of(t) for t in ("view", torch.cat, object())] == ["view", "cat", ""]


def test_sources_are_each_found_once_however_many_ways_lead_there() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = x
    for _ in range(60):  # 2**60 ways
        y = graph.call_function(operator.add, (y, y))
    z = graph.call_function(torch.relu, (graph.placeholder("z"),))
    found = ancestors([y])
    assert len(found) == len(set(found)) == 60
    assert x in found
    assert z not in found
    assert ancestors([]) == []
    assert ancestors([y], lambda n: inputs_of(n)[:0]) == []


def test_to_ask_for_a_shape_is_not_to_ask_for_values() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    size = graph.call_method("size", (w,))
    shape = graph.call_function(getattr, (w, "shape"))
    like = graph.call_method("view_as", (x, w))
    assert looks(size, w)
    assert looks(shape, w)
    assert looks(like, w)
    assert not looks(like, x)
    assert not looks(graph.call_function(getattr, (w, "data")), w)
    assert not looks(graph.call_function(torch.relu, (w,)), w)


def test_a_tensor_of_which_only_the_shape_is_asked_brings_no_values_in() -> None:
    graph = fx.Graph()
    w = graph.get_attr("w")
    assert not only_looked_at(w)  # nobody asks at all
    size = graph.call_method("size", (w,))
    assert only_looked_at(w)
    assert not only_looked_at(size)
    graph.call_function(torch.relu, (w,))
    assert not only_looked_at(w)
