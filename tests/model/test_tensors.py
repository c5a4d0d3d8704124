"""What is done with the tensors in a value."""

from __future__ import annotations

import torch

from zipfx.model.tensors import as_real


def test_as_real_is_no_copy_of_real_numbers() -> None:
    t = torch.ones(3)
    assert as_real(t) is t
    assert as_real(torch.ones(3, dtype=torch.cfloat).conj()).shape == (3, 2)
