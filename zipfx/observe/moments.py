"""Moments: count, mean and covariance of samples that come batch by batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WAIT = 4  # samples wait until there are a quarter as many as columns


class Moments:
    """Accumulates the first two moments of the columns of (..., S, n) samples.

    Samples are shifted by the mean of the first batch, so that neither a large mean nor many
    samples cost precision; sums are kept in float64 on the device of the samples. Leading
    dimensions are separate problems, such as the groups of a convolution.

    count: samples seen; shift: (..., n); total: (..., n) float64, the sum of the shifted samples;
    second: (..., m, n) float64, the sum of the products of the first m columns (default: all) with
    all; squares: (..., n) float64, where they are not all in there; few: as long as there are no
    more samples, they are kept as they are, which is smaller than the sum of their products. Later
    samples wait until there are enough for a product of matrices to be worth its n^2 additions.

    >>> a, b = Moments(), Moments()
    >>> a.add(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> b.add(torch.tensor([[5.0, 3.0]]))
    >>> both = a.merged(b)
    >>> both.count, both.mean.tolist(), both.covariance().diagonal().tolist()
    (3, [3.0, 1.0], [2.6666666666666665, 2.0])
    """

    shift: Tensor
    total: Tensor
    squares: Tensor

    def __init__(self, few: int = 0, first: int | None = None) -> None:
        self.count, self.few, self.first = 0, few, first
        self._rows: list[Tensor] = []
        self._second: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Take in samples (..., S, n), float32 or float64."""
        if not x.shape[-2]:
            return
        if not self.count:
            self.shift = x.double().mean(-2).to(x.dtype)
            self.total = torch.zeros_like(self.shift, dtype=torch.float64)
            self.squares = torch.zeros_like(self.total)
        x = x - self.shift.unsqueeze(-2)
        self.total += x.sum(-2).double()  # small: only what differs from the first batch
        if self.first is not None:
            self.squares += x.square().sum(-2).double()
        self.count += x.shape[-2]
        self._rows.append(x)
        waiting = sum(rows.shape[-2] for rows in self._rows)
        if not self._kept and waiting * _WAIT >= x.shape[-1]:
            self._sum_up()

    @property
    def _kept(self) -> bool:
        """Whether all samples are still there."""
        return self._second is None and self.count <= self.few

    def _products(self) -> Tensor:
        x = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, -2)
        return x[..., : self.first].mT @ x

    def _sum_up(self) -> None:
        known, found = self._second, self._products()
        self._second, self._rows = found.double() if known is None else known.add_(found), []

    @property
    def second(self) -> Tensor:
        """(..., m, n) float64."""
        if self._kept:
            return self._products().double()
        if self._rows:
            self._sum_up()
        assert self._second is not None
        return self._second

    @property
    def samples(self) -> Tensor | None:
        """(..., S, n) float64, less the shift, as long as they are few."""
        return torch.cat(self._rows, -2).double() if self._kept and self._rows else None

    def merged(self, other: Moments) -> Moments:
        """The moments of the samples of both; neither is modified."""
        if not self.count or not other.count:
            return self if self.count else other
        both = Moments(self.few, self.first)
        both.count, both.shift = self.count + other.count, self.shift
        apart = other.shift.double() - self.shift.double()
        both.total = self.total + other.total + other.count * apart
        both.squares = self.squares + other.squares + 2 * other.total * apart
        both.squares += other.count * apart.square()
        if self._kept and other._kept and both.count <= self.few:
            both._rows = [*self._rows, *(x + apart.unsqueeze(-2) for x in other._rows)]
            return both
        both._second = self.second + other.second
        for a, b in ((other.total, apart), (apart, other.total), (other.count * apart, apart)):
            both._second += a[..., : self.first].unsqueeze(-1) * b.unsqueeze(-2)
        return both

    @property
    def mean(self) -> Tensor:
        """(..., n) float64."""
        return self.total / self.count + self.shift

    def covariance(self) -> Tensor:
        """(..., m, n) float64, over `count`; its diagonal is not negative."""
        second = self.second
        mean = (self.total / self.count).reshape(-1, self.total.shape[-1], 1)
        found = torch.baddbmm(
            second.reshape(-1, *second.shape[-2:]),
            mean[:, : self.first],
            mean.mT,
            beta=1 / self.count,
            alpha=-1,
        ).reshape(second.shape)
        found.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
        return found

    def variance(self) -> Tensor:
        """(..., n) float64, over `count`."""
        mean = self.total / self.count
        return (self._powers() / self.count - mean.square()).clamp(min=0)

    def _powers(self) -> Tensor:
        """(..., n) float64, sums of squares."""
        if self.first is not None:
            return self.squares
        if self._kept:  # no need of their products yet
            powers = torch.zeros_like(self.total)
            for rows in self._rows:
                powers += rows.square().sum(-2)
            return powers
        return self.second.diagonal(dim1=-2, dim2=-1)

    def finite(self) -> Tensor:
        """(..., n) bool: columns in which every sample was, and none too large for a square."""
        return self.total.isfinite() & self.shift.isfinite() & self._powers().isfinite()


def pooled(moments: Iterable[Moments]) -> Moments:
    """The moments of the samples of all."""
    total = Moments()
    for one in moments:
        total = total.merged(one)
    return total
