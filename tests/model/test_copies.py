"""A module once more, without what is the caller's own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import zipfx
from zipfx.trace.tracing import trace


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> NoCopy:
        raise TypeError("never")


def test_a_model_that_can_not_be_copied() -> None:
    with pytest.raises(zipfx.ZipError, match=r"the NoCopy can not be copied \(never\)"):
        trace(NoCopy(2, 2))
