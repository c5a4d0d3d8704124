"""What a saved merge says of its example inputs and of itself, as plain values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

import zipfx
from zipfx.report.files.stand_ins import described, drawn
from zipfx.values import same

plain_values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
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


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(trees)
def test_stand_ins_are_like_what_they_stand_for(value: Any) -> None:
    text = json.dumps(described(value), allow_nan=False)
    found = drawn(json.loads(text), torch.device("cpu"))
    (ours, structure), (theirs, other) = tree_flatten(value), tree_flatten(found)
    assert structure == other
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor):
            assert type(a) is type(b)
            assert same(a, b)
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
        ({"size": 3}, "{'size': 3} describes no example inputs"),
        ({"shape": [2, 1e400], "dtype": "int64", "largest": 1}, "describes no example inputs"),
        ({"shape": [2**70], "dtype": "int64", "largest": 1}, "can not be drawn"),
        ({"shape": [1] * 65, "dtype": "int64", "largest": 1}, "can not be drawn"),
        ({"shape": [2], "dtype": "int64", "largest": 10**30}, "can not be drawn"),
        ({"shape": [2], "dtype": "uint8", "largest": 256}, "can not be drawn"),
        ({"shape": [2], "dtype": "quint8", "largest": 1}, "can not be drawn"),
        ({"shape": [2], "dtype": "hub", "largest": 1}, "has no dtype of torch: 'hub'"),
        (
            {"shape": [2**24], "dtype": "int8", "largest": 1},
            "for 8,388,608 entries in all: pass ex",
        ),
        (
            {"list": [{"shape": [2**12, 2**10], "dtype": "int8", "largest": 1}] * 3},
            r"a tensor of shape \[4096, 1024\], and .* 8,388,608 entries in all: pass",
        ),
        ({"tuple": [[1]]}, r"\[1\] describes no example inputs"),
        ({"float": "1"}, "describes no example inputs"),
        ({"list": 3}, "describes no example inputs"),
    ],
)
def test_what_can_not_be_stood_in_for(description: Any, says: str) -> None:
    with pytest.raises(zipfx.ZipError, match=says):
        drawn(description, torch.device("cpu"))
