"""What a saved merge says of its example inputs and of itself, as plain values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

import zipfx
from zipfx import plain
from zipfx.standins import described, drawn

plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
)
tensors = st.builds(
    lambda shape, dtype, n: torch.full(shape, n).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from((torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8,
                     torch.bool)),
    st.integers(0, 9),
)  # fmt: skip
trees = st.recursive(
    plain_values | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(trees)
def test_stand_ins_are_like_what_they_stand_for(value: Any) -> None:
    found = drawn(json.loads(json.dumps(described(value))), torch.device("cpu"))
    (ours, structure), (theirs, other) = tree_flatten(value), tree_flatten(found)
    assert structure == other
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor):
            assert (type(a), a) == (type(b), b)
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not (a.is_floating_point() or a.is_complex()):
            assert torch.equal(a, b)  # here all numbers are the largest


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (described([object()]), "hold a builtins.object, which is not stored: pass example_inputs"),
        (described(torch.ones(2).to_sparse()), "hold a torch.Tensor, which is not stored"),
        ({"shape": [2], "dtype": "nothing", "largest": None}, "no dtype of torch"),
        ({"shape": [-2], "dtype": "int64", "largest": 1}, "can not be drawn"),
        ({"size": 3}, "can not be drawn from {'size': 3}"),
    ],
)
def test_what_can_not_be_stood_in_for(description: Any, says: str) -> None:
    with pytest.raises(zipfx.ZipError, match=says):
        drawn(description, torch.device("cpu"))


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
                st.lists(st.floats(allow_nan=False)).map(tuple),
                st.none() | st.tuples(st.integers(), st.text()),
            ),
        ),
        st.none() | st.lists(st.integers()),
    )
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_dataclasses_come_back(value: Outer) -> None:
    assert plain.read(Outer, plain.written(value)) == value


@pytest.mark.parametrize("text", ["[", "[]", "null", "{}"])
def test_what_is_no_dataclass(text: str) -> None:
    with pytest.raises(ValueError, match=r"Pinned|Expecting"):
        plain.read(zipfx.Pinned, text)
