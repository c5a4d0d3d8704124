"""Slots of labels: how they are laid out, found and told by value."""

from __future__ import annotations

import torch

from zipfx.analysis.labels.labels import by_value


def test_complex_constants_are_told_by_value() -> None:
    values = torch.tensor([1 + 2j, 2 + 1j, 1 + 2j, 0, 1 - 2j])
    (slot,) = by_value(values).fixed
    assert slot[0] == slot[2]
    assert slot[3] == 0
    assert len(slot.unique()) == 4
    assert by_value(torch.full((3,), 1j)).fixed == ()
