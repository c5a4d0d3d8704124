"""Precision: numbers that round, real or complex, and the widest of their kind."""

from __future__ import annotations

import torch
from torch import Tensor


def inexact(t: Tensor) -> bool:
    """Whether a tensor holds numbers that can be averaged: real or complex, no integers."""
    return t.is_floating_point() or t.is_complex()


def widened(t: Tensor) -> Tensor:
    """In float64, or in complex128; integers stay as they are.

    >>> widened(torch.ones(2, dtype=torch.complex64)).dtype, widened(torch.ones(2)).dtype
    (torch.complex128, torch.float64)
    """
    if not inexact(t):
        return t
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def as_real(t: Tensor) -> Tensor:
    """Complex numbers as pairs, along a further dimension at the end; real ones as they are."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
