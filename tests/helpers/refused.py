"""A small model, and what is refused of it by a message."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import unharmed
from zipfx import ZipError


def mlp(hidden: int = 6, outputs: int = 3, seed: int = 0, **layers: nn.Module) -> nn.Sequential:
    """fc1 (5 -> hidden), act, fc2 (hidden -> 4), out (4 -> outputs); `layers` replace some."""
    torch.manual_seed(seed)
    made: OrderedDict[str, nn.Module] = OrderedDict(
        fc1=nn.Linear(5, hidden), act=nn.ReLU(), fc2=nn.Linear(hidden, 4), out=nn.Linear(4, outputs)
    )
    return nn.Sequential(OrderedDict({**made, **layers})).double()


def batch(seed: int = 0, n: int = 16) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)).double()


def refuse(models: Any, data: Any, match: str, **options: Any) -> None:
    """`zipfx.zip` raises ZipError with this message and leaves models and random states alone."""
    modules = [m for m in models if isinstance(m, nn.Module)]
    options = {"repair": "none", "progress": False, **options}
    raised = unharmed(modules, lambda: zipfx.zip(models, data, **options))
    assert isinstance(raised, ZipError), raised
    with pytest.raises(ZipError, match=match):
        raise raised
