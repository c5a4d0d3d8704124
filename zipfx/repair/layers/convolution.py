"""Convolution: layers whose inputs are patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zipfx.repair.layers.layer import Layer


@dataclass(frozen=True)
class Convolution(Layer):
    """`nn.Conv1d`, `2d`, `3d`: (B, C, ..) -> (B, O, P1, ..)."""

    channel = 1

    @property
    def groups(self) -> int:
        found: int = self.module.groups
        return found

    def takes(self, shape: torch.Size) -> bool:
        return len(shape) == 2 + len(self.module.kernel_size)

    def patches(self, x: Tensor) -> Tensor:
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padding = conv._reversed_padding_repeated_twice
        x = F.pad(x, padding, mode=mode) if any(padding) else x
        return self._windows(x, conv.stride)

    def _windows(self, x: Tensor, strides: Sequence[int]) -> Tensor:
        """(B, C, ..) -> (B, P1, .., G, c, k1, ..), the view of all that the kernel meets."""
        conv = self.module
        sizes = zip(conv.kernel_size, strides, conv.dilation, strict=True)
        for i, (k, stride, apart) in enumerate(sizes):
            x = x.unfold(2 + i, (k - 1) * apart + 1, stride)[..., ::apart]
        grouped: Tensor = x.unflatten(1, (conv.groups, -1))
        d = len(conv.kernel_size)
        return grouped.movedim((1, 2), (1 + d, 2 + d))

    def results(self, y: Tensor) -> Tensor:
        grouped: Tensor = y.unflatten(1, (self.groups, -1))
        return grouped.movedim((1, 2), (-2, -1))

    def weight(self) -> Tensor:
        rows = self.module.weight.detach().double().flatten(1)
        found: Tensor = rows.unflatten(0, (self.groups, -1))
        return found

    def write_weight(self, weight: Tensor) -> None:
        self.module.weight.data.copy_(weight.reshape(self.module.weight.shape))


@dataclass(frozen=True)
class Transposed(Convolution):
    """`nn.ConvTranspose1d`, `2d`, `3d`: a convolution, with its kernel turned round, of the input
    with zeros between its entries."""

    def patches(self, x: Tensor) -> Tensor:
        conv = self.module
        sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], conv.stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        every: Any = (..., *(slice(None, None, s) for s in conv.stride))
        spread[every] = x
        reach = [(k - 1) * a for k, a in zip(conv.kernel_size, conv.dilation, strict=True)]
        ends = zip(reach, conv.padding, conv.output_padding, strict=True)
        margins = [m for r, p, more in reversed([*ends]) for m in (r - p, r - p + more)]
        # a negative margin crops
        return self._windows(F.pad(spread, margins), [1] * len(reach))

    def weight(self) -> Tensor:
        kernel: Tensor = self.module.weight.detach().double()
        turned = kernel.flip(*range(2, kernel.ndim)).unflatten(0, (self.groups, -1))
        rows: Tensor = turned.transpose(1, 2).flatten(2)
        return rows

    def write_weight(self, weight: Tensor) -> None:
        kernel = self.module.weight
        shape = self.groups, kernel.shape[1], kernel.shape[0] // self.groups, *kernel.shape[2:]
        turned = weight.reshape(shape).transpose(1, 2).flatten(0, 1)
        kernel.data.copy_(turned.flip(*range(2, kernel.ndim)))
