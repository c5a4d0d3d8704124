"""Two networks of unrelated weights, their images, and moments of samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zipfx.observe.moments import Moments


class Images(nn.Module):
    """A residual stream with BatchNorm, a grouped and a depthwise convolution, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn1 = nn.Conv2d(8, 12, 3, 2, padding=1), nn.BatchNorm2d(12)
        self.c, self.bn2 = nn.Conv2d(12, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.short = nn.Conv2d(8, 8, 1, 2)
        self.d = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.drop, self.h = nn.Dropout(0.5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.a(x)))
        z = self.bn2(self.c(F.relu6(self.bn1(self.b(y)))))
        y = F.relu(self.short(y) + z)
        y = y + self.drop(self.d(y))
        return self.h(torch.relu(self.up(y)).mean((2, 3)))


def strangers(count: int = 2, cls: Any = Images) -> list[nn.Module]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = cls().double()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2)
        made.append(model.eval())
    return made


def images(count: int, seed: int = 0, batch: int = 20) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [(part,) for part in every.split(batch)]


def moments(x: Tensor, y: Tensor, few: int) -> Moments:
    found = Moments(few, x.shape[-1])
    for a, b in zip(x.split(7, 1), y.split(7, 1), strict=True):
        found.add(torch.cat([a, b], -1))
    return found
