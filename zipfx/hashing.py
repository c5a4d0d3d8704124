"""Hashing: 64-bit hashes of arrays; equal hashes are taken for equal values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def hash64(x: npt.ArrayLike) -> Hashes:
    """A 64-bit finaliser (splitmix64), elementwise, so that sums of hashes tell multisets apart."""
    h = np.asarray(x).astype(np.int64, copy=False).view(np.uint64)
    with np.errstate(over="ignore"):
        h = h + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def as_they_come(x: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Where each distinct value comes first, in that order, and which of these each item has.

    >>> as_they_come(np.array([7, 3, 7, 5]))
    (array([0, 1, 3]), array([0, 1, 0, 2]))
    """
    _, first, which = np.unique(x, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[which]


def as_fixed(h: Hashes) -> Tensor:
    """Turn hashes into fixed coordinates (negative integers)."""
    return torch.from_numpy(-1 - (h >> np.uint64(2)).astype(np.int64))
