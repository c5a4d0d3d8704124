"""Scaled: norms, which scale and shift every feature by itself, once it is normalised.

Their layers have as many groups as features, each of one input and one output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zipfx.repair.layers.layer import Layer


@dataclass(frozen=True)
class Scaled(Layer):
    """A scale, and a shift, of every feature: (B, P1, .., C) -> (B, P1, .., C)."""

    channel = -1

    @property
    def groups(self) -> int:
        found: int = self.module.weight.numel()
        return found

    def takes(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and self.module.weight.ndim == 1

    def patches(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def results(self, y: Tensor) -> Tensor:
        return y.unsqueeze(-1)

    def weight(self) -> Tensor:
        return self._grouped(self.module.weight).unsqueeze(-1)

    def write_weight(self, weight: Tensor) -> None:
        self.module.weight.data.copy_(weight[:, 0, 0])


@dataclass(frozen=True)
class LayerNorm(Scaled):
    """`nn.LayerNorm` or `nn.RMSNorm` of the last dimension: the scale and shift of what it has
    normalised."""

    def patches(self, x: Tensor) -> Tensor:
        norm = self.module
        if isinstance(norm, nn.RMSNorm):
            return super().patches(F.rms_norm(x, norm.normalized_shape, eps=norm.eps))
        return super().patches(F.layer_norm(x, norm.normalized_shape, eps=norm.eps))


@dataclass(frozen=True)
class GroupNorm(Scaled):
    """`nn.GroupNorm`, likewise: (B, C, P1, ..)."""

    channel = 1

    def patches(self, x: Tensor) -> Tensor:
        norm = self.module
        return self.results(F.group_norm(x, norm.num_groups, eps=norm.eps))

    def results(self, y: Tensor) -> Tensor:
        return y.movedim(1, -1).unsqueeze(-1)


@dataclass(frozen=True)
class BatchNorm(Layer):
    """A BatchNorm by itself, with running statistics: (B, C, ..) -> (B, C, ..)."""

    channel = 1

    @property
    def groups(self) -> int:
        found: int = self.module.num_features
        return found

    def takes(self, shape: torch.Size) -> bool:
        return True

    def patches(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1).unsqueeze(-1)

    def results(self, y: Tensor) -> Tensor:
        return self.patches(y)

    def weight(self) -> Tensor:
        scale = (self._grouped(self.module.running_var) + self.module.eps).rsqrt()
        found: Tensor = scale * self._grouped(self.module.weight)
        return found.unsqueeze(-1)

    @property
    def bias(self) -> Tensor:
        mean = self._grouped(self.module.running_mean) * self.weight()[..., 0]
        return self._grouped(self.module.bias) - mean

    def measured(self, weight: Tensor) -> Tensor:
        return torch.ones_like(weight)

    def write(
        self,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor,
        mean: Tensor,
        variance: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        scale = weight.squeeze(-1)
        self._store(self.module.weight, scale * (variance + self.module.eps).sqrt(), rows)
        self._store(self.module.bias, bias + scale * mean, rows)
        self._store(self.module.running_mean, mean, rows)
        self._store(self.module.running_var, variance, rows)

    def write_weight(self, weight: Tensor) -> None:
        raise NotImplementedError
