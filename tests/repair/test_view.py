"""The graph of a merge around a layer: what uses its weights, and what comes behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers.modeling_outputs import CausalLMOutput

from tests.helpers.blocks import Net, data
from zipfx.repair.view import GraphView
from zipfx.trace.tracing import trace

SIZE = 4


def view(forward: Callable[[Any, Tensor], Tensor], x: Tensor | None = None,
         written: tuple[Tensor, ...] = (), **parts: Any) -> GraphView:  # fmt: skip
    x = data(SIZE) if x is None else x
    layers = {name: nn.Linear(SIZE, SIZE) for name in "ab"}
    return GraphView(trace(Net(forward, **{**layers, **parts}), inputs=(x,)), (x,), written)


def named(of: GraphView, name: str) -> fx.Node:
    return next(n for n in of.nodes if n.name == name)


def test_nodes_with_parameters_are_those_that_read_their_values() -> None:
    of = view(lambda s, x: s.b(s.a(x).relu()) * s.w + x.new_zeros(s.v.shape),
              w=nn.Parameter(torch.ones(SIZE)), v=nn.Parameter(torch.ones(SIZE)))  # fmt: skip
    assert [n.name for n in of.weighted] == ["a", "b", "w"]
    assert of.module(named(of, "relu")) is None
    assert of.module(named(of, "a")) is of.merged.a
    assert of.shapes[named(of, "b")] == (2, SIZE)


def test_what_two_nodes_use_or_forward_writes_is_shared() -> None:
    once = view(lambda s, x: s.b(s.a(x)))
    assert not once.shared(once.merged.a.weight)
    twice = view(lambda s, x: s.b(s.a(s.a(x))))
    assert twice.shared(twice.merged.a.weight)
    assert not twice.shared(twice.merged.b.weight)
    base = nn.Linear(SIZE, SIZE)
    tied = nn.Linear(SIZE, SIZE)
    tied.weight = base.weight
    of = view(lambda s, x: s.b(s.a(x)), a=base, b=tied)
    assert of.shared(of.merged.b.weight)
    own = GraphView(once.merged, (data(SIZE),), (once.merged.a.weight[:1],))
    assert own.shared(once.merged.a.weight)


def test_nodes_of_a_layer_are_repeats_unless_one_feeds_another() -> None:
    twice = view(lambda s, x: s.b(x + s.a(x)) + s.a(x.relu()))
    assert [n.name for n in twice.repeats(named(twice, "a"))] == ["a", "a_1"]
    assert [n.name for n in twice.repeats(named(twice, "b"))] == ["b"]
    assert not twice.shared(twice.merged.a.weight, 2)
    fed = view(lambda s, x: s.a(s.b(s.a(x))))
    assert [n.name for n in fed.repeats(named(fed, "a"))] == ["a"]


def test_whether_a_layer_lies_between() -> None:
    of = view(lambda s, x: s.b(s.a(x).relu()).relu())
    assert of.between(named(of, "a"), named(of, "relu_1"))
    assert not of.between(named(of, "a"), named(of, "relu"))
    assert not of.between(named(of, "a"), named(of, "b"))


@pytest.mark.parametrize(
    ("turned", "dim"), [(lambda y: y, 0), (lambda y: y.transpose(0, 1), 1), (lambda y: y.sum(0), 0)]
)
def test_images_lie_along_the_dimension_that_grows(turned: Any, dim: int) -> None:
    of = view(lambda s, x: s.b(turned(s.a(x))), data(3, SIZE))
    assert of.images(named(of, "b")) == dim


def norm(seen: Callable[[Any, Tensor], Tensor], x: Tensor | None = None) -> fx.Node | None:
    x = data(3, 5, 5) if x is None else x
    parts = {"c": nn.Conv2d(3, SIZE, 1), "n": nn.BatchNorm2d(SIZE), "n1": nn.BatchNorm1d(5)}
    of = view(seen, x, **parts)
    return of.norm_after(named(of, "a" if x.ndim == 3 else "c"))


def test_the_norm_behind_a_layer() -> None:
    found = norm(lambda s, x: s.n(s.c(x)).relu())
    assert found is not None
    assert found.name == "n"


@pytest.mark.parametrize(
    ("seen", "x"),
    [
        (lambda s, x: s.n(s.c(x).relu()), None),  # something is in between
        (lambda s, x: s.n(y := s.c(x)) + y, None),  # something else reads it
        (lambda s, x: s.n(s.n(s.c(x))), None),  # it is used once more
        (lambda s, x: s.n1(s.a(x)), data(5, SIZE)),  # it is of positions, not of features
    ],
)
def test_a_norm_that_is_none_of_the_layer(seen: Any, x: Tensor | None) -> None:
    assert norm(seen, x) is None


@pytest.mark.parametrize(
    ("seen", "end", "older"),
    [
        (lambda s, x: s.b(x + s.a(x)), "add", "x"),
        (lambda s, x: s.b(s.a(x) + x), "add", "x"),
        (lambda s, x: s.b(x + F.dropout(s.drop(s.a(x)), training=s.training)), "add", "x"),
        (lambda s, x: s.b(s.a(x).add_(x)), "add_", "x"),
        (lambda s, x: s.b(s.a(x)), "a", None),
        (lambda s, x: s.b(s.a(x) + x.sum(1, keepdim=True)), "a", None),  # of another shape
        (lambda s, x: s.b(torch.add(s.a(x), x, alpha=2)), "a", None),
        (lambda s, x: (y := s.a(x)) + s.b(x) + y, "a", None),  # two read it
        (lambda s, x: s.b(s.a(x) * x), "a", None),
    ],
)
def test_where_a_layer_is_added_to_something_older(seen: Any, end: str, older: str | None) -> None:
    of = view(seen, drop=nn.Dropout())
    found, other = of.sum_after(named(of, "a"))
    assert found.name == end
    assert (None if other is None else other.name) == older


@pytest.mark.parametrize(
    ("act", "bounds"),
    [
        (lambda s, y: y.relu(), (0, math.inf)),
        (lambda s, y: F.relu(y), (0, math.inf)),
        (lambda s, y: s.relu(y), (0, math.inf)),
        (lambda s, y: F.relu6(y), (0, 6)),
        (lambda s, y: torch.relu(y) + torch.relu(y), (0, math.inf)),
        (lambda s, y: torch.relu(y) + y, None),
        (lambda s, y: torch.tanh(y), None),
        (lambda s, y: y, None),
    ],
)
def test_where_the_activation_is_flat(act: Any, bounds: Any) -> None:
    of = view(lambda s, x: s.b(act(s, s.a(x))), relu=nn.ReLU())
    assert of.flat_after(named(of, "a")) == bounds


@pytest.mark.parametrize(
    ("end", "given"),
    [
        (lambda s, y: y, True),
        (lambda s, y: {"logits": y, "again": [y]}, True),
        (lambda s, y: CausalLMOutput(logits=y), True),
        (lambda s, y: (y, y.relu()), False),
        (lambda s, y: y.softmax(-1), False),
        (lambda s, y: s.b(y), False),
    ],
)
def test_whether_a_value_is_given_as_it_is(end: Any, given: bool) -> None:
    of = view(lambda s, x: end(s, s.a(x)))
    assert of.is_given(named(of, "a")) is given
