"""The result of matching one feature space: which features of all models become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Matching:
    """Merged feature of each feature of K models, the models side by side (ZipIt!, section 4).

    Args:
        assignment: (N,) int64 on the CPU, 0 .. M - 1: the merged feature of each feature.
        sizes: features of each model, in order; they sum to N.
        merged: M, the number of merged features; each has at least one feature mapped to it.

    Raises:
        ZipError: the three do not fit together.

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

    def __post_init__(self) -> None:
        assignment, total = self.assignment, sum(self.sizes)
        if not self.sizes or min(self.sizes) < 0:
            raise ZipError(
                f"sizes are {self.sizes}: give the features of each model, none negative"
            )
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

    @property
    def counts(self) -> Tensor:
        """(M,) int64: how many features became each merged one."""
        return torch.bincount(self.assignment, minlength=self.merged)

    def of(self, model: int) -> Tensor:
        """Merged feature of each feature of one model: (sizes[model],) int64, a view.

        Raises:
            ZipError: there is no such model.
        """
        if not 0 <= model < len(self.sizes):
            raise ZipError(f"no model {model}: the matching has models 0 .. {len(self.sizes) - 1}")
        start = sum(self.sizes[:model])
        return self.assignment[start : start + self.sizes[model]]

    def merge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Dense (M, N) matrix whose rows average the features of a group; rows sum to 1."""
        matrix = self.unmerge_matrix(dtype).T.contiguous()
        return matrix.div_(self.counts[:, None])

    def unmerge_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Dense 0/1 (N, M) matrix that copies a merged feature back: pinv of the merge matrix."""
        matrix = torch.zeros(len(self.assignment), self.merged, dtype=dtype)
        matrix.scatter_(1, self.assignment[:, None], 1)
        return matrix

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
class Pairs:
    """The pairs of different features that a matching joined, and how they correlate.

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


def joined_pairs(matching: Matching, statistics: Statistics | None) -> Pairs:
    """Look up the correlation of every pair inside a group (the rest of Sigma is not needed)."""
    order = torch.argsort(matching.assignment, stable=True)
    groups = matching.assignment[order]
    first, second = [], []
    for step in range(1, int(matching.counts.max()) if len(groups) else 1):
        same = (groups[step:] == groups[:-step]).nonzero().flatten()
        first += [order[same], order[same + step]]
        second += [order[same + step], order[same]]
    i = torch.cat(first) if first else torch.zeros(0, dtype=torch.int64)
    j = torch.cat(second) if second else torch.zeros(0, dtype=torch.int64)
    rho = torch.ones(len(i), dtype=torch.float64)
    if statistics is not None:
        a, b = i.to(statistics.mean.device), j.to(statistics.mean.device)
        still = statistics.constant
        std = statistics.covariance.diagonal().sqrt()
        rho = (statistics.covariance[a, b] / (std[a] * std[b])).clamp(-1, 1)
        # a constant stands for itself: with another constant as good as equal, else unrelated
        rho = torch.where(still[a] | still[b], (still[a] & still[b]).double(), rho).cpu()
    return Pairs(i, j, rho)
