"""Calls as rules see them, and the table in which rules are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.analysed import ids
from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Kind, Labels
from zipfx.analysis.rules.call import (
    ELSEWHERE,
    RULES,
    Call,
    aten,
    carried,
    functional,
    made_of_others,
    pinned_along,
    rule,
    rule_of,
    without_padding,
)


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(op, args, kwargs, None, Constraints(), lambda t: Labels(tuple(t.shape)), print)


def test_arguments_are_bound_by_name() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    made = call(aten.add.Tensor, x, y)
    assert made.arg("other") is y
    assert made.arg("alpha") == 1  # the default of the operation
    assert call(aten.add.Tensor, x, y, alpha=3).arg("alpha") == 3
    assert made.arg("nothing", "else") == "else"
    assert made.labels("other").shape == (2,)
    assert [t is x or t is y for t in call(aten.cat.default, [x, y]).tensors()] == [True, True]


def test_rules_are_found_by_overload_and_those_of_others_by_name() -> None:
    def mine(of: Call) -> Labels:
        return Labels(())

    before = dict(RULES)
    rule("sin", "sin.out", "no_such_operation", "nobody::at_home")(mine)
    try:
        assert RULES[aten.sin.default] is RULES[aten.sin.out] is rule_of(aten.sin.default) is mine
        assert len(RULES) <= len(before) + 2
        assert ELSEWHERE.pop("nobody::at_home") is mine
    finally:
        RULES.clear()
        RULES.update(before)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mul_.Tensor, aten.mul.Tensor),
        (aten.relu_.default, aten.relu.default),
        (aten.mul.Tensor, aten.mul.Tensor),
        (aten.__and__.Tensor, aten.__and__.Tensor),  # a name, not a way
    ],
    ids=str,
)
def test_what_writes_is_what_gives(op: Any, expected: Any) -> None:
    assert functional(op) is expected


def test_operations_that_are_others_are_known() -> None:
    assert made_of_others(aten.einsum.default)
    assert not made_of_others(aten.mm.default)


# ------------------------------------------------------------------ slots
def test_slots_move_with_their_dimensions() -> None:
    rows, both = ids(1, 2)[:, None], torch.arange(1, 7).view(2, 3)
    (found,) = carried([rows, both], {0: 2}, 3)
    assert found.shape == (1, 1, 2)  # the other one would lose its columns
    assert found.flatten().tolist() == [1, 2]


def test_padding_is_left_out_where_it_is_all_that_varies() -> None:
    def left(*rows: list[int], alike: bool = False) -> list[int] | None:
        found = without_padding(constraints, torch.tensor(rows), [1], alike=alike)
        return None if found is None else found.flatten().tolist()

    constraints = Constraints()
    assert left([1, 1, 0], [2, 2, 0]) == [1, 2]
    assert not constraints.colours
    assert left([1, 2, 0], [3, 3, 0]) is None  # features vary
    assert left([1, 1, 0], [2, 0, 0], alike=True) is None
    assert left([1, 1, 0], [2, 0, 0]) == [1, 2]  # missing in other places: told apart
    assert len({*constraints.colours[0].value.tolist()}) == 2


def test_only_what_lies_along_a_dimension_is_pinned() -> None:
    constraints = Constraints()
    x = Labels(
        (2, 3), (ids(1, 2)[:, None], ids(3, 4, 5)[None]), (ids(-1, -2, -3)[None],), Kind.DATA
    )
    found = pinned_along(constraints, x, [1], "sorted")
    assert [c.a.tolist() for c in constraints.colours if c.reason == "sorted"] == [[3, 4, 5]]
    assert [s.flatten().tolist() for s in found.features] == [[1, 2]]
    assert found.fixed == ()


def test_what_is_not_understood_is_named_with_its_line() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.special.bessel_j0(self.a(x)).histc().view(-1, 4)[:4])  # type: ignore[no-any-return]

    spaces = zipfx.analyze(Odd(), torch.randn(4, 3), verify=False)
    assert not len(spaces)
    (why,) = {p.reason for p in spaces.pinned if "not understood" in p.reason}
    assert why.startswith("aten::histc is not understood (node 'histc'")
    assert "zipfx.register_rule" in why
