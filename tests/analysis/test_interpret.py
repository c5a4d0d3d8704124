"""What one run of a graph writes down of its nodes, whichever rule applies to their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.blocks import Net, data, parameter
from zipfx import ZipError
from zipfx.analysis.interpret import interpret
from zipfx.analysis.labels.facts import Facts, NodeFacts
from zipfx.analysis.labels.labels import Kind
from zipfx.model.running import shapes
from zipfx.trace.tracing import trace


def facts_of(model: nn.Module, x: Tensor) -> tuple[dict[str, NodeFacts], Facts]:
    """By the names of nodes."""
    module = trace(model, inputs=(x,))
    found = interpret(module, (x,))
    return {n.name: f for n, f in zip(module.graph.nodes, found.nodes, strict=True)}, found


def net(function: Callable[[Any, Tensor], Tensor]) -> Net:
    return Net(function, a=nn.Linear(3, 4), h=nn.Linear(4, 2), v=parameter(4), c=torch.ones(1))


def test_kinds_go_from_constants_to_weights_to_data() -> None:
    of, _ = facts_of(
        net(lambda s, x: s.h(s.a(x) * s.v.exp() + torch.ones(x.shape[0], 1).cos())), data(3)
    )
    assert (of["cos"].kind, of["exp"].kind, of["mul"].kind) == (
        Kind.CONSTANT, Kind.WEIGHT, Kind.DATA,
    )  # fmt: skip


def test_values_have_the_shapes_that_they_have() -> None:
    model, x = net(lambda s, x: s.h(s.a(x).relu())), data(3)
    module = trace(model, inputs=(x,))
    found = interpret(module, (x,))
    seen = shapes(module, (x,))
    for node, fact in zip(module.graph.nodes, found.nodes, strict=True):
        if fact.is_tensor and node in seen:
            assert [v.shape for v in fact.values] == [tuple(seen[node])]


def test_a_view_has_the_owner_of_what_it_looks_at_and_a_write_names_it() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        y.view(-1, 2, 2)[:, 0].mul_(2)
        return s.h(y)  # type: ignore[no-any-return]

    of, found = facts_of(net(forward), data(3))
    owner = list(of).index("a")
    assert of["view"].owners == of["getitem"].owners == {owner}
    assert of["mul_"].writes == {owner}
    assert not of["h"].writes
    assert owner in [i for _, i, _ in found.rewritten]  # a is read again by its old name


def test_parameters_own_what_is_seen_of_them() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.c.add_(1)
        return s.h(s.a(x) * s.c)  # type: ignore[no-any-return]

    model = net(forward)
    before = model.c.clone()
    of, found = facts_of(model, data(3))
    (owner,) = of["add_"].writes
    assert found.state[-1 - owner] == "c"
    assert torch.equal(model.c, before)  # the run was on copies


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        (lambda s, x: s.h(s.a(x).fill_(0.5) + s.a(x)), []),
        (lambda s, x: s.h(torch.rand_like(s.a(x)) + s.a(x)), []),
        (lambda s, x: s.h(s.a(x).clone() + s.a(x)), ["same"]),
    ],
    ids=["filled", "random", "copied"],
)
def test_what_is_filled_or_drawn_has_no_features(
    function: Callable[[Any, Tensor], Tensor], labels: list[str]
) -> None:
    of, _ = facts_of(net(function), data(3))
    (name,) = [n for n in of if n in ("fill_", "rand_like", "clone")]
    slots = of[name].values[0].features
    same = [s for s in slots if torch.equal(s, of["a"].values[0].features[0])]
    assert ["same"] * len(same) == labels
    assert len(slots) == len(labels)


def test_every_call_has_a_rule_or_is_named() -> None:
    of, found = facts_of(net(lambda s, x: s.h(s.a(x) + s.a(x).histc(4)[:1])), data(3))
    reasons = {c.reason for c in found.constraints.colours if c.reason}
    assert any("aten::histc is not understood" in r for r in reasons)
    assert not of["histc"].values[0].features


def test_memory_that_is_shared_must_not_be_written_to() -> None:
    model = net(lambda s, x: s.h(s.a(x) * s.v.mul_(2)))
    model.h.bias = nn.Parameter(model.v.data[:2])
    with pytest.raises(ZipError, match=r"forward writes to .*, which shares memory with another"):
        facts_of(model, data(3))
