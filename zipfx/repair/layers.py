"""Layers: modules that compute y = W x + b, seen as such.

Letters: B batch, P positions, S samples (B and P folded), G groups, n inputs and o outputs of each
group: (G, S, n) samples times (G, o, n) weights give (G, S, o). A linear layer has G = 1; of a
convolution P are the output's positions, and x a patch of n = channels / G times kernel size; a
BatchNorm by itself is G = channels with n = o = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.merge import Limit
from zipfx.model.tensors import is_batch_norm, runs_as


@dataclass(frozen=True)
class Layer(ABC):
    """One such module, and the BatchNorm that its outputs run through before anything else.

    limit: of a weight that can not have every value, what tells the nearest to one.
    """

    module: Any
    norm: Any = None
    limit: Limit | None = None

    def buffers(self) -> Iterator[Tensor]:
        """Those that `write` may write to."""
        for module in (self.module, self.norm):
            yield from () if module is None else module.buffers()

    @abstractmethod
    def takes(self, shape: torch.Size) -> bool:
        """Whether an output of this shape has a dimension B."""

    @abstractmethod
    def patches(self, x: Tensor) -> Tensor:
        """The inputs as a view (B, P1, .., G, n1, .., ) of x (or of x, padded)."""

    @abstractmethod
    def results(self, y: Tensor) -> Tensor:
        """The outputs as a view (B, P1, .., G, o)."""

    @property
    @abstractmethod
    def channel(self) -> int:
        """The dimension of the output along which its features lie."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """G."""

    @abstractmethod
    def weight(self) -> Tensor:
        """(G, o, n) float64, without the norm."""

    @abstractmethod
    def write_weight(self, weight: Tensor) -> None:
        """Store (G, o, n)."""

    @property
    def bias(self) -> Tensor:
        """(G, o) float64, without the norm."""
        bias = self.module.bias
        weight = self.weight()
        return weight.new_zeros(weight.shape[:2]) if bias is None else self._grouped(bias)

    def _grouped(self, t: Tensor) -> Tensor:
        return t.detach().double().reshape(self.groups, -1)

    @property
    def takes_bias(self) -> bool:
        """Whether any bias can be stored."""
        return self.norm is not None or self.module.bias is not None

    def nearest(self, weight: Tensor) -> Tensor:
        """The weight (G, o, n) that can be stored, nearest to this one."""
        assert self.limit is not None
        own: Tensor = self.module.weight.detach()
        was = own.clone()
        self.write_weight(weight)
        own.copy_(self.limit(own))
        found = self.weight()
        own.copy_(was)
        return found

    @property
    def scales(self) -> bool:
        """Whether a norm scales the outputs."""
        return self.norm is not None and self.norm.affine

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight (G, o, n) and bias (G, o) of the layer and its norm in one."""
        weight, bias, norm = self.weight(), self.bias, self.norm
        if norm is None:
            return weight, bias
        scale = (self._grouped(norm.running_var) + norm.eps).rsqrt()
        shift = torch.zeros_like(scale)
        if norm.affine:
            scale, shift = scale * self._grouped(norm.weight), self._grouped(norm.bias)
        mean = self._grouped(norm.running_mean)
        return weight * scale.unsqueeze(-1), shift + (bias - mean) * scale

    def measured(self, weight: Tensor) -> Tensor:
        """(G, o, n): times x that is what the running statistics of a norm are of, but for the
        module's own bias, once `weight` is written."""
        return weight

    def write(
        self,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor,
        mean: Tensor,
        variance: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Store what `folded` shall be for some of the outputs.

        Args:
            weight: (G, o, n), of the module; bias: (G, o); both float64.
            rows: (G, o) bool, which of them to store; the others stay as they are.
            mean, variance: (G, o), of `measured` times x on the calibration data: a norm gets them
                as running statistics, so that training can go on from there.
            scale: (G, o), by which the norm shall scale what the module gives (default: 1).
        """
        self.write_weight(torch.where(rows.unsqueeze(-1), weight, self.weight()))
        scale = torch.ones_like(bias) if scale is None else scale
        norm = self.norm
        if norm is None:
            self._store(self.module.bias, bias, rows)
            return
        own = torch.zeros_like(bias) if self.module.bias is None else self.bias
        if norm.affine:
            self._store(norm.running_mean, mean + own, rows)
            self._store(norm.running_var, variance, rows)
            self._store(norm.weight, scale * (variance + norm.eps).sqrt(), rows)
            self._store(norm.bias, scale * mean + bias, rows)
        else:  # can do nothing but pass the sum on
            self._store(norm.running_mean, own - bias, rows)
            self._store(norm.running_var, torch.full_like(variance, 1 - norm.eps), rows)

    def _store(self, t: Tensor | None, value: Tensor, rows: Tensor) -> None:
        if t is not None:
            t.data.copy_(torch.where(rows, value, self._grouped(t)).reshape(t.shape))


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


@dataclass(frozen=True)
class Norm(Layer):
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


KINDS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Conv3d: Convolution,
    nn.ConvTranspose1d: Transposed,
    nn.ConvTranspose2d: Transposed,
    nn.ConvTranspose3d: Transposed,
}


def layer_of(
    module: nn.Module, norm: nn.Module | None = None, limit: Limit | None = None
) -> Layer | None:
    """The module as a layer; None: it is of no known kind, or has a forward of its own, or computes
    its weight, which then can not be stored, or is complex."""
    both = [m for m in (module, norm) if m is not None]
    if any(is_parametrized(m) or any(p.is_complex() for p in m.parameters()) for m in both):
        return None
    for kind, view in KINDS.items():
        if isinstance(module, kind) and runs_as(module, kind):
            return view(module, norm, limit)
    known = is_batch_norm(module) and module.affine and limit is None
    return Norm(module) if known else None


def samples(view: Tensor, dims: int, step: int, offset: Sequence[int], images: Tensor) -> Tensor:
    """(G, S, n) of a view (B, P1, .., G, n1, ..) with `dims` dimensions of positions.

    step, offset: of the positions that are taken, along each dimension; images: (b,) indices.
    """
    for d in range(dims):
        view = view.narrow(1 + d, offset[d], view.shape[1 + d] - offset[d])
        view = view[(slice(None),) * (1 + d) + (slice(None, None, step),)]
    taken = view[images].flatten(0, dims).flatten(2)
    return taken.movedim(1, 0)
