"""Matching: which features of all models become one, as M and U in a compact form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.observe import Statistics
from zipfx.values import ByValue


@dataclass(frozen=True, eq=False)
class Matching(ByValue):
    """Merged feature of each feature of K models, the models side by side (ZipIt!, section 4).

    Args:
        assignment: (N,) int64 on the CPU, 0 .. M - 1: the merged feature of each feature.
        sizes: features of each model, in order; they sum to N.
        merged: M, the number of merged features; each has at least one feature mapped to it.
        unmerge: (N, M) float64 on the CPU, in place of the 0/1 matrix that copies a merged feature
            to all that were mapped to it.

    Raises:
        ZipError: they do not fit together.

    >>> matching = Matching(torch.tensor([0, 1, 1, 0]), sizes=(2, 2), merged=2)
    >>> matching.of(1)
    tensor([1, 0])
    >>> matching.merge_matrix(torch.float32)
    tensor([[0.5000, 0.0000, 0.0000, 0.5000],
            [0.0000, 0.5000, 0.5000, 0.0000]])
    >>> matching.within, matching.across
    (0, 2)
    """

    assignment: Tensor
    sizes: tuple[int, ...]
    merged: int
    unmerge: Tensor | None = None

    def __post_init__(self) -> None:
        assignment, total = self.assignment, sum(self.sizes)
        _check_sizes(self.sizes)
        if assignment.dtype != torch.int64 or assignment.device.type != "cpu":
            raise ZipError(
                f"the assignment is {assignment.dtype} on {assignment.device}: "
                "it must be torch.int64 on the CPU"
            )
        if assignment.shape != (total,):
            raise ZipError(
                f"the assignment has shape {tuple(assignment.shape)}, but the sizes {self.sizes} "
                f"sum to {total}: it needs one entry per feature, ({total},)"
            )
        outside = assignment[(assignment < 0) | (assignment >= self.merged)]
        if len(outside):
            raise ZipError(
                f"{len(outside)} of {total} features are assigned outside the {self.merged} merged "
                f"features, the first to {int(outside[0])}: entries must be in 0 .. merged - 1"
            )
        empty = (self.counts == 0).nonzero().flatten().tolist()
        if empty:
            raise ZipError(
                f"no feature maps to {len(empty)} of the {self.merged} merged features, "
                f"the first of them {empty[0]}: number the groups without gaps"
            )
        if self.unmerge is not None:
            _check_matrix("unmerge", self.unmerge, (total, self.merged))

    @property
    def counts(self) -> Tensor:
        """(M,) int64: how many features became each merged one."""
        return torch.bincount(self.assignment, minlength=self.merged)

    def of(self, model: int) -> Tensor:
        """Merged feature of each feature of one model: (sizes[model],) int64, a view.

        Raises:
            ZipError: there is no such model.
        """
        return _of(self.assignment, self.sizes, model)

    def merge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Dense (M, N) matrix whose rows average the features of a group; rows sum to 1."""
        return self._pattern(dtype).T.contiguous().div_(self.counts[:, None])

    def unmerge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Dense (N, M): `unmerge`, or the 0/1 matrix that copies a merged feature back, which is
        the pseudoinverse of the merge matrix."""
        return self._pattern(dtype) if self.unmerge is None else self.unmerge.to(dtype)

    def _pattern(self, dtype: torch.dtype) -> Tensor:
        matrix = torch.zeros(len(self.assignment), self.merged, dtype=dtype)
        return matrix.scatter_(1, self.assignment[:, None], 1)

    @property
    def within(self) -> int:
        """Matches that joined features of one model: c - d for c features of d distinct models.

        Of the N - M matches each is counted once, here or in `across`.
        """
        return len(self.assignment) - self._occurrences

    @property
    def across(self) -> int:
        """Matches that brought another model into a group: d - 1 for a group with d models."""
        return self._occurrences - self.merged

    @property
    def _occurrences(self) -> int:
        """Number of (merged feature, model) pairs that occur: the sum of d over the groups."""
        models = len(self.sizes)
        model = torch.arange(models).repeat_interleave(torch.tensor(self.sizes))
        return int(torch.unique(self.assignment * models + model).numel())


@dataclass(frozen=True, eq=False)
class LinearMerge(ByValue):
    """A merge that is no matching: any merge matrix M and unmerge matrix U.

    Args:
        merge: M, (M, N) float64 on the CPU.
        unmerge: U, (N, M) float64 on the CPU.
        sizes: features of each model, in order; they sum to N.

    Raises:
        ZipError: they do not fit together, or are not finite.

    >>> LinearMerge(torch.ones(1, 2).double() / 2, torch.ones(2, 1).double(), sizes=(1, 1)).merged
    1
    """

    merge: Tensor
    unmerge: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)
        total = sum(self.sizes)
        _check_matrix("merge", self.merge, (self.merged, total))
        _check_matrix("unmerge", self.unmerge, (total, self.merged))

    @property
    def merged(self) -> int:
        """M, the number of merged features."""
        return len(self.merge)

    def merge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """M, (M, N)."""
        return self.merge.to(dtype)

    def unmerge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """U, (N, M)."""
        return self.unmerge.to(dtype)


Merge = Matching | LinearMerge


def merge_of(merge: Merge, model: int) -> Tensor:
    """M_k, the columns (M, sizes[k]) float64 of the merge matrix that read one model."""
    return _of(merge.merge_matrix().T, merge.sizes, model).T


def unmerge_of(merge: Merge, model: int) -> Tensor:
    """U_k, the rows (sizes[k], M) float64 of the unmerge matrix that restore one model."""
    return _of(merge.unmerge_matrix(), merge.sizes, model)


def _of(rows: Tensor, sizes: tuple[int, ...], model: int) -> Tensor:
    if not 0 <= model < len(sizes):
        raise ZipError(f"no model {model}: the matching has models 0 .. {len(sizes) - 1}")
    start = sum(sizes[:model])
    return rows[start : start + sizes[model]]


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if not sizes or min(sizes) < 0:
        raise ZipError(f"sizes are {sizes}: give the features of each model, none negative")


def _check_matrix(name: str, matrix: Tensor, shape: tuple[int, int]) -> None:
    if matrix.shape != shape:
        raise ZipError(
            f"the {name} matrix has shape {tuple(matrix.shape)}: for {max(shape)} features of all "
            f"models and {min(shape)} merged ones it must be {shape}"
        )
    if matrix.dtype != torch.float64 or matrix.device.type != "cpu":
        raise ZipError(
            f"the {name} matrix is {matrix.dtype} on {matrix.device}: "
            "it must be torch.float64 on the CPU"
        )
    broken = int((~matrix.isfinite()).sum())
    if broken:
        raise ZipError(f"{broken} of {matrix.numel()} entries of the {name} matrix are not finite")


@dataclass(frozen=True, eq=False)
class Pairs(ByValue):
    """The pairs of different features that a merge joined, and how they correlate.

    first, second: (P,) int64, every pair in both orders; correlation: (P,) float64, 1 where
    nothing was observed or neither feature ever varied.
    """

    first: Tensor
    second: Tensor
    correlation: Tensor

    @property
    def mean(self) -> float:
        """Mean correlation of the joined pairs (1 if there are none)."""
        return float(self.correlation.mean()) if len(self.correlation) else 1.0


_ROUNDED = 64 * torch.finfo(torch.float64).eps


def joined_pairs(merge: Merge, statistics: Statistics | None) -> Pairs:
    """Look up the correlation of every pair inside a group (the rest of Sigma is not needed)."""
    first, second = [], []
    if isinstance(merge, Matching):
        order = torch.argsort(merge.assignment, stable=True)
        groups = merge.assignment[order]
        for step in range(1, int(merge.counts.max()) if len(groups) else 1):
            same = (groups[step:] == groups[:-step]).nonzero().flatten()
            first += [order[same], order[same + step]]
            second += [order[same + step], order[same]]
    else:  # every pair
        total = sum(merge.sizes)
        both = (1 - torch.eye(total)).nonzero()
        first, second = [both[:, 0]], [both[:, 1]]
    i = torch.cat(first) if first else torch.zeros(0, dtype=torch.int64)
    j = torch.cat(second) if second else torch.zeros(0, dtype=torch.int64)
    rho = torch.ones(len(i), dtype=torch.float64)
    if statistics is not None:
        a, b = i.to(statistics.mean.device), j.to(statistics.mean.device)
        still = statistics.constant
        std = statistics.covariance.diagonal().sqrt()
        rho = (statistics.covariance[a, b] / (std[a] * std[b])).clamp(-1, 1)
        rho = torch.where(rho > 1 - _ROUNDED, 1.0, rho)  # a copy, whose sums were rounded otherwise
        # a constant stands for itself: with another constant as good as equal, else unrelated
        rho = torch.where(still[a] | still[b], (still[a] & still[b]).double(), rho).cpu()
    return Pairs(i, j, rho)


def merged_variance(merge: Merge, pairs: Pairs, std: Tensor) -> Tensor:
    """diag(M Sigma M^T), (M,) float64, for features of standard deviations `std` (N,)."""
    both = std[pairs.first] * std[pairs.second] * pairs.correlation
    if isinstance(merge, LinearMerge):
        sigma = torch.diag(std.square()).index_put((pairs.first, pairs.second), both)
        return ((merge.merge @ sigma) * merge.merge).sum(1).clamp_(min=0)
    total = torch.zeros(merge.merged, dtype=torch.float64)
    total.index_add_(0, merge.assignment, std.square())
    total.index_add_(0, merge.assignment[pairs.first], both)
    return (total / merge.counts.double().square()).clamp_(min=0)
