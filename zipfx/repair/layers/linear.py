"""Linear: layers along the last dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.repair.layers.layer import Layer


@dataclass(frozen=True)
class LinearLayer(Layer):
    """`nn.Linear`: (B, P1, .., n) -> (B, P1, .., o)."""

    channel = -1
    groups = 1

    def takes(self, shape: torch.Size) -> bool:
        return len(shape) > 1

    def patches(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2)

    def results(self, y: Tensor) -> Tensor:
        return y.unsqueeze(-2)

    def weight(self) -> Tensor:
        found: Tensor = self.module.weight.detach().double()
        return found.unsqueeze(0)

    def write_weight(self, weight: Tensor) -> None:
        self.module.weight.data.copy_(weight[0])
