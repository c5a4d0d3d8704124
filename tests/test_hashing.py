"""Hashes: the same for the same values, another for any other, and spread over 64 bits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zipfx.hashing import as_fixed, as_they_come, hash64

integers = arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-9, 9))


def splitmix64(x: int) -> int:
    """The published finaliser, in Python's own integers."""
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(arrays.arrays(np.int64, st.integers(0, 20)))
def test_it_is_splitmix64(x: np.ndarray) -> None:
    assert [int(h) for h in hash64(x)] == [splitmix64(int(v) % 2**64) for v in x]


def test_hashes_of_many_are_distinct_and_their_bits_even() -> None:
    found = hash64(np.arange(100_000))
    assert len(np.unique(found)) == 100_000
    bits = (found[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.01


def test_a_single_number_and_other_integers_are_taken() -> None:
    assert hash64(3) == hash64(np.array(3, np.int32)) == hash64([3])[0]


@settings(max_examples=50)
@given(integers)
def test_values_are_numbered_as_they_come(x: np.ndarray) -> None:
    first, which = as_they_come(x)
    assert [int(x[i]) for i in first] == list(dict.fromkeys(x.tolist()))
    assert (x[first][which] == x).all()


@given(integers)
def test_fixed_coordinates_are_negative_and_tell_apart(x: np.ndarray) -> None:
    fixed = as_fixed(hash64(x))
    assert fixed.dtype == torch.int64
    assert bool((fixed < 0).all())
    assert len(fixed.unique()) == len(np.unique(x))
