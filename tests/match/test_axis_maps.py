"""M and U along one axis of a parameter."""

from __future__ import annotations

import torch

from zipfx.match.axis_maps import AxisMap


def test_a_map_by_parts_of_the_rows_adds_up_complex_numbers() -> None:
    t = torch.complex(torch.arange(8.0), -torch.arange(8.0)).to(torch.complex128).reshape(4, 2)
    one = torch.ones(4, dtype=torch.float64)
    found = AxisMap(1, torch.tensor([0, 0, 3, 2]), one, by=0, parts=2).apply(t)
    assert torch.equal(found[:2, 0], t[:2].sum(1))
    assert torch.equal(found[2:], t[2:].flip(1))
