"""Layer: a module that computes y = W x + b, seen as such.

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
from torch import Tensor

from zipfx.merge import Limit


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
        bias = self._bias
        weight = self.weight()
        return weight.new_zeros(weight.shape[:2]) if bias is None else self._grouped(bias)

    @property
    def _bias(self) -> Tensor | None:
        found: Tensor | None = getattr(self.module, "bias", None)
        return found

    def _grouped(self, t: Tensor) -> Tensor:
        return t.detach().double().reshape(self.groups, -1)

    @property
    def takes_bias(self) -> bool:
        """Whether any bias can be stored."""
        return self.norm is not None or self._bias is not None

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
            self._store(self._bias, bias, rows)
            return
        own = torch.zeros_like(bias) if self._bias is None else self.bias
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


def samples(view: Tensor, dims: int, step: int, offset: Sequence[int], images: Tensor) -> Tensor:
    """(G, S, n) of a view (B, P1, .., G, n1, ..) with `dims` dimensions of positions.

    step, offset: of the positions that are taken, along each dimension; images: (b,) indices.
    """
    for d in range(dims):
        view = view.narrow(1 + d, offset[d], view.shape[1 + d] - offset[d])
        view = view[(slice(None),) * (1 + d) + (slice(None, None, step),)]
    taken = view[images].flatten(0, dims).flatten(2)
    return taken.movedim(1, 0)
