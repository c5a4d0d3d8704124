"""Moments: count, mean and covariance of samples that come batch by batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Moments:
    """Accumulates the first two moments of the columns of (..., S, n) samples.

    Samples are shifted by the mean of the first batch, so that neither a large mean nor many
    samples cost precision; sums are kept in float64 on the device of the samples. Leading
    dimensions are separate problems, such as the groups of a convolution.

    count: samples seen; shift: (..., n); total: (..., n) float64, the sum of the shifted samples;
    second: (..., n, n) float64, the sum of their products; few: as long as there are no more
    samples, they are kept as they are, which is smaller than the sum of their products.

    >>> a, b = Moments(), Moments()
    >>> a.add(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> b.add(torch.tensor([[5.0, 3.0]]))
    >>> both = a.merged(b)
    >>> both.count, both.mean.tolist(), both.covariance().diagonal().tolist()
    (3, [3.0, 1.0], [2.6666666666666665, 2.0])
    """

    shift: Tensor
    total: Tensor

    def __init__(self, few: int = 0) -> None:
        self.count, self.few = 0, few
        self._rows: list[Tensor] = []
        self._second: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Take in samples (..., S, n), float32 or float64."""
        if not x.shape[-2]:
            return
        if not self.count:
            self.shift = x.double().mean(-2).to(x.dtype)
            self.total = torch.zeros_like(self.shift, dtype=torch.float64)
        x = x - self.shift.unsqueeze(-2)
        self.total += x.sum(-2).double()  # small: only what differs from the first batch
        self.count += x.shape[-2]
        if self._second is None and self.count <= self.few:
            self._rows.append(x)
        elif self._second is None and not self._rows:
            self._second = (x.mT @ x).double()
        else:
            self._second = self.second.add_(x.mT @ x)
            self._rows = []

    @property
    def second(self) -> Tensor:
        """(..., n, n) float64."""
        if self._second is not None:
            return self._second
        found = self.total.new_zeros(*self.total.shape, self.total.shape[-1])
        for x in self._rows:
            found += x.mT @ x
        return found

    @property
    def samples(self) -> Tensor | None:
        """(..., S, n) float64, less the shift, as long as they are few."""
        return torch.cat(self._rows, -2).double() if self._rows else None

    def merged(self, other: Moments) -> Moments:
        """The moments of the samples of both; neither is modified."""
        if not self.count or not other.count:
            return self if self.count else other
        both = Moments(self.few)
        both.count, both.shift = self.count + other.count, self.shift
        apart = other.shift.double() - self.shift.double()
        both.total = self.total + other.total + other.count * apart
        if self._rows and other._rows and both.count <= self.few:
            both._rows = [*self._rows, *(x + apart.unsqueeze(-2) for x in other._rows)]
            return both
        crossed = other.total.unsqueeze(-1) * apart.unsqueeze(-2)
        both._second = (self.second + other.second).add_(crossed).add_(crossed.mT)
        both._second += other.count * apart.unsqueeze(-1) * apart.unsqueeze(-2)
        return both

    @property
    def mean(self) -> Tensor:
        """(..., n) float64."""
        return self.total / self.count + self.shift

    def covariance(self) -> Tensor:
        """(..., n, n) float64, over `count`; its diagonal is not negative."""
        n = self.total.shape[-1]
        mean = (self.total / self.count).reshape(-1, n, 1)
        second = self.second.reshape(-1, n, n)
        found = torch.baddbmm(second, mean, mean.mT, beta=1 / self.count, alpha=-1)
        found = found.reshape(*self.total.shape, n)
        found.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
        return found

    def finite(self) -> Tensor:
        """(..., n) bool: columns in which every sample was, and none too large for a square."""
        found = self.total.isfinite() & self.shift.isfinite()
        if self._second is not None:
            found &= self._second.diagonal(dim1=-2, dim2=-1).isfinite()
        return found


def pooled(moments: Iterable[Moments]) -> Moments:
    """The moments of the samples of all."""
    total = Moments()
    for one in moments:
        total = total.merged(one)
    return total
