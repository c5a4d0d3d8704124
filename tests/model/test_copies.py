"""A module once more, without what is the caller's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from zipfx.model.copies import hooked, structural_copy
from zipfx.trace.tracing import trace


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> NoCopy:
        raise TypeError("never")


def test_a_model_that_can_not_be_copied() -> None:
    with pytest.raises(zipfx.ZipError, match=r"the NoCopy can not be copied \(never\)"):
        trace(NoCopy(2, 2))


def test_hooks_by_which_a_library_makes_its_models_work_are_part_of_them() -> None:
    """transformers collects hidden states by such, once a model has run."""

    def collect(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def mine(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 3

    collect.__module__ = "transformers.utils.output_capturing"
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_hook(collect)
    model[0].register_forward_hook(mine)
    x = torch.randn(4, 3)
    twin = structural_copy(model)
    assert torch.equal(twin(x) * 3, model(x))
    assert len(model[0]._forward_hooks) == 2
    assert hooked(model) == ["0"]
    model[0]._forward_hooks.popitem()
    assert hooked(model) == []
