"""Conditions on sizes are worked out, never run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipfx import ZipError
from zipfx.model.calls.sizes import expect_sizes, holds, understood

X = {"x": torch.zeros(6, 4), "more": {"y": torch.zeros(3)}, "n": 5}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("L['x'].size()[0] == 6", True),
        ("L['x'].size()[0] != 6", False),
        ("L['more']['y'].size()[0] * 2 == L['x'].size()[0]", True),
        ("(L['x'].size()[0] // 4) + (-1) * L['x'].size()[1] == -3", True),
        ("L['x'].size()[0] % 4 == 2 and L['n'] > 4", True),
        ("not L['x'].size()[1] < 4 or L['n'] == 0", True),
        ("2 <= L['x'].size()[1] <= 4", True),
        ("2 <= L['x'].size()[1] < 4", False),
        ("torch.sym_min(L['x'].size()[0], L['x'].size()[1]) == 4", True),
        ("max(L['x'].size()[0], 9) ** 2 == 81", True),
    ],
)
def test_arithmetic_and_comparisons(condition: str, expected: bool) -> None:
    assert holds(condition, X) == expected
    assert understood([condition], X) == expected


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["+", "-", "*", "//", "%"]),
       st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.integers(-9, 9))  # fmt: skip
def test_it_is_the_arithmetic_of_python(a: int, b: int, op: str, compare: str, c: int) -> None:
    text = f"L['x'].size()[0] {op} L['x'].size()[1] {compare} {c}"
    assert holds(text, {"x": torch.zeros(a, b)}) == eval(f"{a} {op} {b} {compare} {c}")


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('true') == 0",
        "L['x'].sum() == 0",
        "L['x'].__class__",
        "open('file')",
        "(lambda: 1)()",
        "[1 for _ in L]",
        "L['n'].size()[0] == 5",
        "M['x'].size()[0] == 6",
        "L['none'].size()[0] == 6",
        "L['x'].size()[7] == 6",
        "L['x'].size()[0] // 0 == 1",
        "L['x'].size()[0] ==",
        "1.5 == 1.5",
    ],
)
def test_nothing_else_is_understood(condition: str) -> None:
    assert not understood([condition], X)


def test_all_conditions_must_hold() -> None:
    assert understood([], X)
    assert not understood(["L['n'] == 5", "L['n'] == 6"], X)


def test_inputs_of_other_sizes_are_refused_with_both_sizes() -> None:
    values: list[Any] = [torch.zeros(6, 4), 5]
    expect_sizes(values, "x, n", "x: (2, 4)", "L['x'].size()[1] == 4", "L['n'] == 5")
    says = (
        r"traced by torch.export for other sizes: with x: \(2, 4\) forward takes it that "
        r"inputs\['x'\].size\(\)\[0\] <= 4, which does not hold for x: \(6, 4\). Merge with"
    )
    with pytest.raises(ZipError, match=says):
        expect_sizes(values, "x, n", "x: (2, 4)", "L['x'].size()[0] <= 4")
    with pytest.raises(ZipError, match="for other sizes"):
        expect_sizes([None], "x", "x: (2, 4)", "L['x'].size()[0] <= 4")
