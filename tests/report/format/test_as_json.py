"""Dataclasses as strict JSON, and what comes back of it."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zipfx
from zipfx.report.format import as_json as plain
from zipfx.values import same


@dataclasses.dataclass(frozen=True)
class Inner:
    numbers: tuple[float, ...]
    both: tuple[int, str] | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    parts: dict[str, Inner]
    more: Any


@given(
    st.builds(
        Outer,
        st.dictionaries(
            st.text(),
            st.builds(
                Inner,
                st.lists(st.floats()).map(tuple),
                st.none() | st.tuples(st.integers(), st.text()),
            ),
        ),
        st.none() | st.lists(st.integers()),
    )
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_dataclasses_come_back(value: Outer) -> None:
    text = plain.written(value)
    assert same(dataclasses.astuple(plain.read(Outer, text)), dataclasses.astuple(value))
    assert plain.written(plain.read(Outer, text)) == text


def test_json_is_strict_but_what_was_not_is_read() -> None:
    text = plain.written(Inner((math.nan, math.inf, -math.inf, 1e308, -0.0)))
    assert text == '{"numbers": ["nan", "inf", "-inf", 1e+308, -0.0], "both": null}'
    old = '{"numbers": [NaN, Infinity, -Infinity, 1e400]}'
    assert same(plain.read(Inner, old).numbers, (math.nan, math.inf, -math.inf, math.inf))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Inner((), (1, object())), "a object is no plain value"),  # type: ignore[arg-type]
        (Outer({}, {1, 2}), "a set is no plain value"),
        (Outer({}, torch.ones(2)), "no plain value|only one element|Tensor with 2 elements"),
    ],
)
def test_what_is_not_plain_is_not_written(value: Any, says: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says):
        plain.written(value)


def test_what_lies_deep_is_neither_written_nor_read() -> None:
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    assert plain.read(Outer, plain.written(Outer({}, deep))).more == deep
    for value in ([deep], {"a": deep}):
        with pytest.raises(ValueError, match="more than 100 deep"):
            plain.written(Outer({}, value))
    for text in ("[" * 10**6, '{"a":' * 10**5, r'"\\"' + "[" * 101):
        with pytest.raises(ValueError, match="more than 100 deep"):
            plain.parsed(text)
    for text in ('"' + "[" * 200 + '"', r'"\"[' + "[" * 200 + '"', "[]" * 200):
        with pytest.raises(ValueError, match="Extra data") if text[0] == "[" else nullcontext():
            plain.parsed(text)


@pytest.mark.parametrize("text", ["[", "[]", "null", "{}"])
def test_what_is_no_dataclass(text: str) -> None:
    with pytest.raises(ValueError, match=r"Pinned|Expecting"):
        plain.read(zipfx.Pinned, text)
