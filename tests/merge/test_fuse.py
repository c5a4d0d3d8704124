"""Fused weights are W* = sum_k M_k W_k U_k, axis by axis."""

from __future__ import annotations

import torch

from zipfx.match.axis_maps import AxisMap, AxisMatrix
from zipfx.merge.fuse import fuse


# ------------------------------------------------------------------ values
def test_complex_numbers_are_averaged_as_such() -> None:
    a, b = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 - 4j, 5 + 2j])
    swap = AxisMap(0, torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64))
    found = fuse([a, b], [[], [swap]])
    assert found.dtype == a.dtype
    assert torch.equal(found, torch.tensor([3 + 2j, 2 - 2.5j]))
    matrix = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
    turned = AxisMatrix(0, torch.tensor([[0], [1]]), matrix).apply(a.to(torch.complex128))
    assert torch.equal(turned, torch.tensor([6 - 2j, 1 + 2j]).to(torch.complex128))
