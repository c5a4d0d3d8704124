"""Small networks with norms, and images in batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.n2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n1(self.a(x)))
        return self.h(F.relu(self.n2(self.b(y))).mean((2, 3)))


def models(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Convolutional().double().eval() for _ in range(2)]


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 6, 6, dtype=torch.float64, generator=generator)


def cut(x: Tensor, *sizes: int) -> list[tuple[Tensor]]:
    return [(part,) for part in x.split(list(sizes))]
