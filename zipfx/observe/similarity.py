"""Similarity: how well one feature can stand for another, from their means and covariance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Similarity = Literal["correlation", "covariance", "cosine"]

_ROWS = 1024  # taken at a time, so that no further N x N matrix is needed
_TIE = 1e-6  # what a difference of means may cost at most
_TINY = torch.finfo(torch.float64).tiny


def correlations(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """0 off the diagonal in rows and columns of constant features."""
    std = torch.where(constant, torch.inf, covariance.diagonal().sqrt())
    return _over(covariance, std).clamp_(-1, 1).fill_diagonal_(1)


def covariances(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """Over the largest variance, with 1 on the diagonal."""
    variance = covariance.diagonal()
    largest = variance.max().sqrt() if variance.any() else torch.ones(()).to(variance)
    return _over(covariance, largest.expand(len(variance))).clamp_(-1, 1).fill_diagonal_(1)


def cosines(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """Of the features as vectors over all samples, means included; 0 off the diagonal where a
    feature is always 0."""
    length = torch.hypot(covariance.diagonal().sqrt(), mean)
    length = torch.where(length == 0, torch.inf, length)
    result = _over(covariance, length)
    return result.addr_(*[mean / length] * 2).clamp_(-1, 1).fill_diagonal_(1)


_KINDS: Mapping[Similarity, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "correlation": correlations,
    "covariance": covariances,
    "cosine": cosines,
}
SIMILARITIES: tuple[Similarity, ...] = tuple(_KINDS)


def similarities(kind: Similarity, mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """The similarity of any two features, as `Statistics.similarity` says."""
    result = _KINDS[kind](mean, covariance, constant)
    _part_ties(result, mean)
    fixed = constant.nonzero().flatten()
    if len(fixed):
        _set_constants(result, mean, fixed, (~constant).nonzero().flatten())
    return result


def _over(covariance: Tensor, size: Tensor) -> Tensor:
    """The covariance over the outer product of `size`, exactly symmetric; a new tensor."""
    result = (covariance / 2).add_(covariance.T, alpha=0.5)
    for rows in _rows(size):
        # One division by the outer product: its rounding is the same in (i, j) and (j, i).
        result[rows] /= torch.outer(size[rows], size)
    return result


def _part_ties(result: Tensor, mean: Tensor) -> None:
    """Take a little from features of unequal means, to tell ties apart."""
    size = mean.abs().clamp(min=_TINY)
    for rows in _rows(size):
        apart = (mean[rows, None] - mean).abs_()
        result[rows] -= apart.div_(size[rows, None] / 2 + size / 2).mul_(_TIE / 2)


def _set_constants(result: Tensor, mean: Tensor, fixed: Tensor, moving: Tensor) -> None:
    """Go by the means alone where a feature is constant; fixed: indices of those that are."""
    half = mean[fixed] / 2  # halves: neither sums nor differences can overflow
    size = half.abs()
    distance = (half[:, None] - half).abs_()
    total = (size[:, None] + size).clamp_(min=_TINY)
    result[fixed[:, None], fixed] = distance.div_(total).neg_().add_(1)
    apart = (mean[fixed, None] - mean[moving]).abs_()
    mixed = (1 + apart).reciprocal_().sub_(3)
    result[fixed[:, None], moving] = mixed
    result[moving[:, None], fixed] = mixed.T


def _rows(size: Tensor) -> Iterator[Tensor]:
    """The indices of all rows, some at a time."""
    yield from torch.arange(len(size), device=size.device).split(_ROWS)
