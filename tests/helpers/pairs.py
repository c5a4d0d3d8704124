"""Two small nets, data for them, and whether two have the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zipfx


def pair() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double() for _ in range(2)]


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def merge(models: list[nn.Module], batches: Any, **options: Any) -> Any:
    return zipfx.zip(models, batches, progress=False, **options)


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
