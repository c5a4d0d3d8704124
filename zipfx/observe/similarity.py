"""Similarity: how well one feature can stand for another, from means and covariances.

Of N features: mean (N,) float64; covariance (N, N) float64; constant (N,) bool, those that do not
vary. Results are new tensors (N, N) float64, exactly symmetric, with diagonal 1, never nan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from zipfx.errors import ZipError

Similarity = Literal["correlation", "covariance", "cosine"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

_ROWS = 1024  # taken at a time, so that no further N x N matrix is needed
_TIE = 1e-6  # what a difference of means may cost at most


def correlation(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """Pearson correlations, in [-1, 1]; 0 off the diagonal for constant features."""
    std = torch.where(constant, torch.inf, covariance.diagonal().sqrt())
    return _scaled(covariance, std).clamp_(-1, 1).fill_diagonal_(1)


def cosine(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """Cosines of the features as vectors over all samples, means included, in [-1, 1]; 0 off the
    diagonal where a feature is always 0."""
    length = torch.hypot(covariance.diagonal().sqrt(), mean)
    length = torch.where(length == 0, torch.inf, length)
    result, unit = _scaled(covariance, length), mean / length
    for rows in torch.arange(len(unit), device=unit.device).split(_ROWS):
        # a product, then a sum: `addr_` rounds once in some places, so that (i, j) is not (j, i)
        result[rows] += torch.outer(unit[rows], unit)
    return result.clamp_(-1, 1).fill_diagonal_(1)


def relative_covariance(mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """Covariances over the largest variance, in [-1, 1]."""
    variance = covariance.diagonal()
    largest = variance.max().sqrt() if variance.any() else torch.ones(()).to(variance)
    return _scaled(covariance, largest.expand(len(variance))).clamp_(-1, 1).fill_diagonal_(1)


OF_VARYING: dict[Similarity, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "correlation": correlation,
    "covariance": relative_covariance,
    "cosine": cosine,
}


def similarity(kind: Similarity, mean: Tensor, covariance: Tensor, constant: Tensor) -> Tensor:
    """In [-3, 1], also for constants; see `Statistics.similarity`.

    Raises:
        ZipError: there is no such kind.
    """
    if kind not in OF_VARYING:
        raise ZipError(f"similarity={kind!r} is unknown; choose one of {list(SIMILARITIES)}")
    result = OF_VARYING[kind](mean, covariance, constant)
    size = mean.abs().clamp(min=torch.finfo(torch.float64).tiny)
    for rows in torch.arange(len(size), device=size.device).split(_ROWS):
        apart = (mean[rows, None] - mean).abs_()
        result[rows] -= apart.div_(size[rows, None] / 2 + size / 2).mul_(_TIE / 2)
    fixed, moving = constant.nonzero().flatten(), (~constant).nonzero().flatten()
    if len(fixed):
        half = mean[fixed] / 2  # halves: neither sums nor differences can overflow
        size = half.abs()
        distance = (half[:, None] - half).abs_()
        total = (size[:, None] + size).clamp_(min=torch.finfo(torch.float64).tiny)
        result[fixed[:, None], fixed] = distance.div_(total).neg_().add_(1)
        apart = (mean[fixed, None] - mean[moving]).abs_()
        mixed = (1 + apart).reciprocal_().sub_(3)
        result[fixed[:, None], moving] = mixed
        result[moving[:, None], fixed] = mixed.T
    return result


def _scaled(covariance: Tensor, size: Tensor) -> Tensor:
    """The covariance over the outer product of `size`."""
    result = (covariance / 2).add_(covariance.T, alpha=0.5)
    for rows in torch.arange(len(size), device=size.device).split(_ROWS):
        # One division by the outer product: its rounding is the same in (i, j) and (j, i).
        result[rows] /= torch.outer(size[rows], size)
    return result
