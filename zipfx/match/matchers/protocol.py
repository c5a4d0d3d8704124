"""Protocol: what every matcher is, the options that most take, and the checks they share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from zipfx.checks import real
from zipfx.errors import ZipError
from zipfx.hashing import Ints
from zipfx.match.matchers.matching import Matching, Merge
from zipfx.observe import SIMILARITIES, Similarity, Statistics

Needs = Literal["activations", "weights", "nothing"]
NEEDS: tuple[Needs, ...] = get_args(Needs)
UnmergeRule = Literal["pinv", "lstsq"]
UNMERGES: tuple[UnmergeRule, ...] = get_args(UnmergeRule)

_ROUNDING = 1e-13  # of sums of products, relative to the mean power


class Matcher(Protocol):
    """Statistics of one feature space -> which features become one.

    A matcher is a pure function: no random numbers, no state, the same result on every call. Where
    a space has blocks (attention heads, convolution groups), these are matched beforehand, and the
    matcher is called for the features of each set of matched blocks. An attribute `needs` says what
    it goes by, see `needs_of`.

    Your own, in a few lines: match features that vary most with one another, by rank.

    >>> def by_variance(statistics, merged, *, across_only=False):
    ...     parts = statistics.covariance.diagonal().split(statistics.sizes)
    ...     ranks = [part.argsort(stable=True).argsort().cpu() for part in parts]
    ...     return Matching(torch.cat(ranks), statistics.sizes, merged)
    >>> covariance = torch.diag(torch.tensor([1.0, 2.0, 4.0, 3.0], dtype=torch.float64))
    >>> mean = torch.zeros(4, dtype=torch.float64)
    >>> by_variance(Statistics(9, mean, covariance, sizes=(2, 2)), 2).assignment
    tensor([0, 1, 1, 0])
    """

    def __call__(self, statistics: Statistics, merged: int, *, across_only: bool = False) -> Merge:
        """Match the N features of all models down to `merged`, M.

        Args:
            statistics: of all models side by side; never modified.
            merged: M, normally the size of one model.
            across_only: never join two features of one model.

        Returns:
            A `Matching`, or a `LinearMerge` where M and U are any matrices.

        Raises:
            ZipError: the matcher cannot give M merged features for these sizes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all matchers of pairs can be told.

    Args:
        similarity: of two features: "correlation" (ZipIt!, section 4), "covariance" (large features
            count more) or "cosine" (means count, too).
        unmerge: "pinv", the pseudoinverse of the merge matrix, which copies a merged feature to all
            that became it; or "lstsq", the matrix that restores all features best from all merged
            ones in the mean square on the calibration data, U = S M^T (M S M^T)^-1 with S the
            second moments. These are not centred, since U comes without an offset.
        ridge: of "lstsq": how strongly U is drawn to the pseudoinverse P, relative to the mean
            power of the merged features: U = P + (S M^T - P M S M^T) (M S M^T + r)^-1. So nothing
            changes where P restores everything.

    Raises:
        ZipError: one of them is unknown, or the ridge is not in 0 .. 1.
    """

    similarity: Similarity = "correlation"
    unmerge: UnmergeRule = "pinv"
    ridge: float = 1e-6

    def __post_init__(self) -> None:
        for name, value, known in (
            ("similarity", self.similarity, SIMILARITIES),
            ("unmerge", self.unmerge, UNMERGES),
        ):
            if value not in known:
                raise ZipError(f"{name}={value!r} is unknown; choose one of {list(known)}")
        if not 0 < real("ridge", self.ridge) <= 1:
            raise ZipError(f"ridge is {self.ridge}: choose a value above 0, at most 1")

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in sorted(fields(self), key=lambda f: bool(f.kw_only))
            if not f.kw_only or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def score(self, statistics: Statistics) -> Tensor:
        """(N, N) float64 on the device of the statistics: how alike features are; a new tensor."""
        return statistics.similarity(self.similarity)

    def matching(self, groups: Ints, statistics: Statistics, merged: int) -> Matching:
        """The matching with these groups, (N,) of any numbers, and the chosen unmerge matrix.

        Merged features are numbered by their first member.
        """
        _, first, group = np.unique(groups, return_index=True, return_inverse=True)
        assignment = torch.from_numpy(np.argsort(np.argsort(first))[group])
        found = Matching(assignment, statistics.sizes, merged)
        if self.unmerge == "pinv":
            return found
        return replace(found, unmerge=least_squares(found, statistics, self.ridge))


def least_squares(matching: Matching, statistics: Statistics, ridge: float) -> Tensor:
    """The unmerge matrix of "lstsq", (N, M) float64 on the CPU; see `Options`."""
    device = statistics.mean.device
    groups = matching.assignment.to(device)
    counts = matching.counts.to(device).double()
    moment = statistics.second_moment()
    n, m = len(groups), matching.merged
    read = moment.new_zeros(n, m).index_add_(1, groups, moment).div_(counts)  # S M^T
    power = moment.new_zeros(m, m).index_add_(0, groups, read).div_(counts[:, None])  # M S M^T
    lost = read.sub_(power[groups])
    mean = power.diagonal().mean()
    lost.masked_fill_(lost.abs() <= _ROUNDING * mean, 0)  # else the inverse would magnify it
    least = ridge * mean
    power.diagonal().add_(least if least > 0 else 1.0)  # nothing but zeros: nothing is lost, too
    factor: Tensor = torch.linalg.cholesky(power)
    better = torch.cholesky_solve(lost.T.contiguous(), factor).T.cpu()
    return better.add_(matching.unmerge_matrix())


def needs_of(matcher: Matcher) -> Needs:
    """What a matcher goes by, which it says as `needs`.

    "activations" (also where it says nothing): it needs data. "weights": it is called with inner
    products of the features' weights in place of covariances, again and again until nothing
    changes, and needs no data. "nothing": it needs no data either, and without any is called with
    statistics of features that are all alike.

    Raises:
        ZipError: it says something else.
    """
    needs: Needs = getattr(matcher, "needs", "activations")
    if needs not in NEEDS:
        raise ZipError(f"the matcher needs {needs!r}: choose one of {list(NEEDS)}")
    return needs


def wanted(matcher: Matcher) -> tuple[Similarity, bool]:
    """The similarity that a matcher goes by, and whether it needs second moments for U."""
    if isinstance(matcher, Options):
        return matcher.similarity, matcher.unmerge == "lstsq"
    return "correlation", False


def check_one_to_one(statistics: Statistics, merged: int, matcher: str) -> None:
    """Raise ZipError unless every model has exactly `merged` features."""
    if any(size != merged for size in statistics.sizes):
        raise ZipError(
            f"matcher {matcher!r} pairs features one to one, but the models have "
            f"{statistics.sizes} features and {merged} are to remain: the numbers must be equal; "
            "for unequal numbers use matcher 'zip'"
        )


def check_merged(statistics: Statistics, merged: int) -> None:
    """Raise ZipError unless M is in 1 .. N."""
    total = sum(statistics.sizes)
    if not min(total, 1) <= merged <= total:
        raise ZipError(f"cannot match {total} features down to {merged}: choose 1 .. {total}")
