"""Optimal: maximum weight matching on the general graph; the best pairs, within or across."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from zipfx.errors import ZipError
from zipfx.hashing import Floats, Ints
from zipfx.match.matchers.greedy import join_one_by_one
from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.one_to_one import one_to_one
from zipfx.match.matchers.protocol import Options, check_merged
from zipfx.observe import Statistics

rustworkx: Any
try:
    import rustworkx
except ImportError:  # an extra
    rustworkx = None


_SCALE = 2**40  # similarities become integers: no rounding can decide, and both libraries agree
_TIES = 2**20  # below one step of them, so that equal sums are told apart in the same way
_NEIGHBOURS = 16
_MARGIN = 1e-9
_SECONDS = {True: 3e-9, False: 3e-8}  # times N ** 3, with rustworkx and without, on one thread


@dataclass(frozen=True, repr=False)
class Optimal(Options):
    """The N - M disjoint pairs of features with the largest sum of similarities.

    The optimum that the greedy `Zip` approaches (Edmonds 1965). Below N / 2 merged features the
    pairs are matched again, by the statistics of their averages, until M are left. By rustworkx
    where it is installed, else by networkx, with the same result.

    Only few pairs can be in the best matching, and only these are given to the library: the linear
    programme without odd-set constraints (an assignment of the features to themselves) bounds every
    matching from above, and a pair whose reduced cost is more than the bound's gap to a matching at
    hand is in no better one.

    Args:
        beta: 1: within and across models; 0: across models only, which is `Permute`.
        most: features at most; more are an error, which says how long it would take.

    The other options are those of `Options`.

    Raises:
        ZipError: beta is neither 0 nor 1.

    >>> correlation = torch.eye(4, dtype=torch.float64)
    >>> for i, j, rho in ((0, 1, 0.9), (0, 2, 0.8), (1, 3, 0.8), (2, 3, 0.1)):
    ...     correlation[i, j] = correlation[j, i] = rho
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), correlation, sizes=(2, 2))
    >>> Optimal()(statistics, 2).assignment  # the greedy one would take 0.9 + 0.1
    tensor([0, 1, 0, 1])
    """

    beta: float = 1.0
    most: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta not in (0, 1):
            raise ZipError(
                f"beta is {self.beta}: the optimal matching is known for beta 1 (any pairs) and 0 "
                "(across models only); for a budget in between use matcher 'zip'"
            )

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`.

        Raises:
            ZipError: M is not in 1 .. N, more than `most` features, or models of other than M
                features where only pairs across models are allowed.
        """
        check_merged(statistics, merged)
        if across_only or self.beta == 0:
            return one_to_one(self, statistics, merged)
        total = sum(statistics.sizes)
        if total > self.most:
            minutes = _SECONDS[rustworkx is not None] * total**3 / 60
            raise ZipError(
                f"the optimal matching of {total} features would take about {minutes:.0f} minutes "
                f"(at most {self.most} are allowed); use matcher 'zip', or Optimal(most={total})"
            )
        groups, level = np.arange(total), statistics
        while merged < (left := sum(level.sizes)):
            count = min(left - merged, left // 2)
            found = _pairs(self.score(level).cpu().numpy(), count)
            level = _averages(level, found)
            groups = found[groups]
        return self.matching(groups, statistics, merged)


def _averages(statistics: Statistics, groups: Ints) -> Statistics:
    """Statistics of the averages of groups, as if of one model."""
    matching = Matching(torch.from_numpy(groups), statistics.sizes, int(groups.max()) + 1)
    m = matching.merge_matrix().to(statistics.mean.device)
    return Statistics.trusted(
        statistics.count, m @ statistics.mean, m @ statistics.covariance @ m.T,
        (matching.merged,), statistics.resolution,
    )  # fmt: skip


def _pairs(similarity: Floats, count: int) -> Ints:
    """Group of each feature, (N,), after the best `count` pairs are joined."""
    total = len(similarity)
    single = total - 2 * count  # features that stay alone: matched with as many dummies
    cost = np.zeros((total + single, total + single))
    cost[:total, :total] = -similarity
    cost[total:, total:] = np.inf
    np.fill_diagonal(cost, np.inf)
    potential = _potentials(cost)
    slack = cost - potential[:, None] - potential
    start = _greedy_pairs(similarity, count, len(cost))
    near = min(_NEIGHBOURS, len(cost) - 1)
    few = np.zeros(cost.shape, dtype=np.bool_)
    np.put_along_axis(few, np.argpartition(slack, near, axis=1)[:, : near + 1], True, axis=1)
    few[start, np.arange(len(cost))] = True
    partner = _matching(cost, few)
    gap = cost[np.arange(len(cost)), partner].sum() / 2 - potential.sum()
    able = slack <= gap + _MARGIN
    if gap > _MARGIN and (able & ~(few | few.T)).any():
        partner = _matching(cost, able | few)
    first = np.minimum(np.arange(total), partner[:total])
    return np.unique(first, return_inverse=True)[1].astype(np.int64)


def _greedy_pairs(similarity: Floats, count: int, size: int) -> Ints:
    """Partner of each of `size` nodes in the greedy matching, the dummies included."""
    total = len(similarity)
    apart = np.minimum(similarity, 1 - 1e-6)  # copies, too, go in pairs
    first = join_one_by_one(apart, 0.0, total - count, np.zeros(total, np.int64), [total], total)
    partner = np.empty(size, np.int64)
    joined = np.flatnonzero(first != np.arange(total))
    partner[joined], partner[first[joined]] = first[joined], joined
    alone = np.setdiff1d(np.arange(total), np.concatenate([joined, first[joined]]))
    partner[alone], partner[total:] = np.arange(total, size), alone
    return partner


def _potentials(cost: Floats) -> Floats:
    """y with y_i + y_j <= cost_ij for all pairs and the largest sum: the dual of the assignment.

    By shortest paths from the optimal assignment (Bellman and Ford, all edges at a time).
    """
    rows, columns = linear_sum_assignment(cost)
    length = cost - cost[rows, columns][:, None]
    v = np.zeros(len(cost))
    for _ in range(len(cost)):
        shorter = np.minimum(v, (length + v[columns][:, None]).min(0))
        if (shorter >= v - _MARGIN * 1e-3).all():
            break
        v = shorter
    u = (cost - v).min(1)
    return (u + v) / 2  # type: ignore[no-any-return]


def _matching(cost: Floats, candidates: NDArray[np.bool_]) -> Ints:
    """Partner of each node in the perfect matching of least cost among the candidate pairs."""
    i, j = np.nonzero(np.triu(candidates | candidates.T, 1) & np.isfinite(cost))
    ties = np.random.default_rng(0).integers(_TIES, size=cost.shape)[i, j].tolist()
    steps = np.rint((4 - cost[i, j]) * _SCALE).astype(np.int64).tolist()
    weights = [step * len(cost) * _TIES + tie for step, tie in zip(steps, ties, strict=True)]
    edges = list(zip(i.tolist(), j.tolist(), weights, strict=True))
    if rustworkx is not None:
        graph = rustworkx.PyGraph(multigraph=False)
        graph.add_nodes_from(range(len(cost)))
        graph.add_edges_from(edges)
        found = rustworkx.max_weight_matching(graph, max_cardinality=True, weight_fn=int)
    else:
        plain = networkx.Graph()
        plain.add_weighted_edges_from(edges)
        found = networkx.max_weight_matching(plain, maxcardinality=True)
    pairs = np.array(sorted(found), dtype=np.int64)
    partner = np.empty(len(cost), np.int64)
    partner[pairs[:, 0]], partner[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return partner
