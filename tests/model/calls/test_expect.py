"""What a graph takes for granted of its inputs is checked, and said in terms of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zipfx import ZipError
from zipfx.model.calls.expect import (
    EXPECTATIONS,
    Expectation,
    expect_absent,
    expect_equal,
    expect_form,
    expect_given,
    expect_off,
    expect_parts,
    form,
)
from zipfx.model.calls.sizes import expect_sizes


@pytest.mark.parametrize(
    ("check", "value", "wanted", "says"),
    [
        (expect_absent, 1, (), "'m' was None when the models were traced, and would be ignored"),
        (expect_given, None, (), "'m' was given when the models were traced, and is needed"),
        (expect_equal, torch.ones(2), (2,), "'m' was 2 when .* and is tensor"),
        (
            expect_form,
            torch.ones(2, 3),
            ("a bool tensor of 2 dimensions",),
            "and is a float tensor",
        ),
        (
            expect_form,
            (1, [2]),
            ("(1, [3])",),
            r"'m' was \(1, \[3\]\) when .* is \(1, \[2\]\): merge",
        ),
        (expect_parts, {"a": None}, ("{'a': a value}",), r"and is {'a': None}: merge with"),
        (expect_equal, 3, (2,), "'m' was 2 when .* the way that forward takes, and is 3"),
        (expect_off, True, (), "'m' was off when the models were traced, and is True: a graph"),
    ],
)
def test_what_is_not_as_it_was_is_refused(check: Any, value: Any, wanted: Any, says: str) -> None:
    arguments = Expectation("m", check, wanted).arguments({"m": value, "other": 0})
    assert arguments == (value, "m", *wanted)
    with pytest.raises(ZipError, match=says):
        check(*arguments)


@pytest.mark.parametrize(
    ("check", "values", "wanted"),
    [
        (expect_absent, [None], ()),
        (expect_given, [0, False, torch.zeros(1)], ()),
        (expect_equal, [2, 2.0], (2,)),
        (expect_off, [None, False], ()),
        (expect_form, [(1, torch.ones(2))], (form((1, torch.zeros(9)), exact=True),)),
        (expect_parts, [[1, None], (torch.ones(2), None)], (form([2.0, None], exact=False),)),
    ],
)
def test_what_is_passes(check: Any, values: list[Any], wanted: Any) -> None:
    for value in values:
        assert check(*Expectation("m", check, wanted).arguments({"m": value})) is None


def test_sizes_are_of_several_inputs() -> None:
    same = "L['a'].size()[0] == L['b'].size()[0]"
    expected = Expectation("a, b", expect_sizes, ("a: (2,); b: (2,)", same))
    good = expected.arguments({"a": torch.zeros(3), "b": torch.ones(3), "c": None})
    assert [t.shape for t in good[0]] == [(3,), (3,)]
    assert expected.check(*good) is None  # type: ignore[func-returns-value]
    with pytest.raises(ZipError, match=r"does not hold for a: \(3,\), b: \(4,\)"):
        expected.check(*expected.arguments({"a": torch.zeros(3), "b": torch.ones(4)}))


def test_files_know_them_by_name() -> None:
    names = [check.__name__ for check in EXPECTATIONS]
    assert len(set(names)) == len(names)
