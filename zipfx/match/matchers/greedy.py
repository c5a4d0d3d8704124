"""Greedy: the most similar groups of features are joined, one pair at a time on a CPU, many at a
time on a GPU."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zipfx.hashing import Ints

_ROWS = 1024  # taken at a time, so that no further N x N matrix is needed
_APART = 5  # more than the whole range of similarities, [-3, 1]
LOSSLESS = 1 - 1e-9  # from this similarity on two features are one, up to rounding


class _Pairs:
    """Similarity of all pairs of groups, -inf where two may not be joined.

    A group's row is that of its first member.

    Each row keeps a bound on its largest entry and where that was. Entries only ever fall, so a
    bound is exact as long as its entry stands, and one that has gone stale matters only when it
    comes to the top: only then is its row searched again. (Searching every row whose partner was
    joined would be cubic where thousands share a partner.)
    """

    def __init__(self, similarity: NDArray[np.float64], alpha: float) -> None:
        """Takes over `similarity`, (N, N) and exactly symmetric, and changes it in place."""
        np.fill_diagonal(similarity, -np.inf)
        self.similarity = similarity
        self.alpha = alpha
        self.partner = similarity.argmax(axis=1)
        self.bound = similarity.max(axis=1)

    def best(self, rows: NDArray[np.bool_] | None = None) -> tuple[int, int]:
        """Most similar pair (i, j) with i < j, of those in the given rows; first row, column."""
        while True:
            bound = self.bound if rows is None else np.where(rows, self.bound, -np.inf)
            row = int(bound.argmax())
            column = int(self.partner[row])
            if self.similarity[row, column] == bound[row]:
                return min(row, column), max(row, column)
            self.partner[row] = column = self.similarity[row].argmax()
            self.bound[row] = self.similarity[row, column]

    def join(self, i: int, j: int) -> None:
        """Let row i stand for i and j together, and end row j."""
        low = np.minimum(self.similarity[i], self.similarity[j])  # -inf at i and j themselves
        if self.similarity[i, j] >= LOSSLESS:
            pass
        elif self.alpha == 0:
            low -= _APART
        else:
            np.multiply(low, self.alpha, out=low, where=low > 0)
        self.similarity[i] = self.similarity[:, i] = low
        self.similarity[j] = self.similarity[:, j] = -np.inf
        self.bound[j] = -np.inf

    def forbid(self, rows: NDArray[np.bool_]) -> None:
        """Let no two of these groups be joined, nor groups that contain two of them."""
        self.similarity[np.ix_(rows, rows)] = -np.inf


def join_one_by_one(
    similarity: NDArray[np.float64],
    alpha: float,
    merged: int,
    model: Ints,
    budgets: list[int],
    most_joined: int,
) -> Ints:
    """First member of each feature's group, (N,), after joining N features of `model` to M.

    Takes over `similarity`, (N, N) and exactly symmetric, and changes it in place.
    """
    pairs = _Pairs(similarity, alpha)
    total = len(model)
    first = np.arange(total)
    holds = model[:, None] == np.arange(len(budgets))  # (N, K): models of each group
    joined = np.zeros(total, dtype=np.bool_)
    left = np.array(budgets)
    for k in np.flatnonzero(left == 0):
        pairs.forbid(holds[:, k])
    for _ in range(total - merged):
        full = np.count_nonzero(joined) == most_joined
        i, j = pairs.best(joined if full else None)
        pairs.join(i, j)
        shared = holds[i] & holds[j]
        holds[i] |= holds[j]
        joined[i], joined[j] = True, False
        first[first == j] = i
        left -= shared
        for k in np.flatnonzero(shared & (left == 0)):
            pairs.forbid(holds[:, k])
    return first


def join_in_rounds(
    similarity: Tensor, alpha: float, merged: int, model: Ints, across_only: bool
) -> Ints:
    """The result of `join_one_by_one` without budgets, in a few passes over all pairs.

    A group is never more similar to a third than its better member was. So two groups that are
    each other's best will be joined sooner or later, whatever else is: all such pairs are joined at
    once (as in reciprocal nearest neighbours for clustering: Murtagh 1983). The N - M joins that
    are made first, one by one, are read off afterwards: always the most similar of those whose
    groups exist. Random features take some ten rounds, each with a maximum over every row; a
    round joins at least one pair, so that many exact ties cost a round each.

    Takes over `similarity`, (N, N) on any device; across_only: never join within a model.
    """
    total = len(model)
    if merged == total:
        return np.arange(total)
    similarity.fill_diagonal_(-torch.inf)
    if across_only:
        own = torch.from_numpy(model).to(similarity.device)
        similarity[own[:, None] == own] = -torch.inf
    first = torch.arange(total, device=similarity.device)  # of the group of each row
    joins: list[tuple[Tensor, Tensor, Tensor]] = []
    heights = similarity.new_empty(0)
    while True:
        bound, partner = similarity.max(1)
        if int((heights > bound.max()).sum()) >= total - merged or not bound.max().isfinite():
            break
        row = torch.arange(len(bound), device=bound.device)
        i = ((partner[partner] == row) & (row < partner) & bound.isfinite()).nonzero().flatten()
        j = partner[i]
        joins.append((first[i], first[j], bound[i]))
        heights = torch.cat([heights, bound[i]])
        for some in torch.arange(len(i), device=i.device).split(_ROWS):
            _join_rows(similarity, i[some], j[some], bound[i[some]] >= LOSSLESS, alpha)
        kept = torch.ones_like(row, dtype=torch.bool).index_fill_(0, j, False).nonzero().flatten()
        similarity, first = _kept(similarity, kept), first[kept]
    a, b, height = (torch.cat(values).cpu().numpy() for values in zip(*joins, strict=True))
    return _first_joins(a, b, height, total, total - merged)


def _join_rows(similarity: Tensor, i: Tensor, j: Tensor, copies: Tensor, alpha: float) -> None:
    """Let the rows and columns i stand for i and j together, pair by pair."""
    rows = _lower(similarity[i], similarity[j], alpha, copies[:, None])
    both = _lower(rows.index_select(1, i), rows.index_select(1, j), alpha, copies)
    rows.index_copy_(1, i, both.fill_diagonal_(-torch.inf))
    similarity.index_copy_(0, i, rows).index_copy_(1, i, rows.T)


def _kept(matrix: Tensor, kept: Tensor) -> Tensor:
    """These rows and columns, in ascending order, moved to the front without a copy of them all."""
    for done, some in zip(range(0, len(kept), _ROWS), kept.split(_ROWS), strict=True):
        matrix[done : done + len(some), : len(kept)] = matrix[some].index_select(1, kept)
    return matrix[: len(kept), : len(kept)]


def _lower(a: Tensor, b: Tensor, alpha: float, copies: Tensor) -> Tensor:
    """What is left of the smaller of two similarities after a join: all of it, of copies."""
    low = torch.minimum(a, b)
    cost = low - _APART if alpha == 0 else torch.where(low > 0, alpha * low, low)
    return torch.where(copies, low, cost)


def _first_joins(a: Ints, b: Ints, height: NDArray[np.float64], total: int, count: int) -> Ints:
    """First member of each feature's group after the `count` joins (a, b) that come first."""
    made: dict[int, int] = {}  # group -> the join that made it
    needs = [0] * len(a)
    needed_by: list[int | None] = [None] * len(a)
    for t, pair in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        for group in pair:
            if group in made:
                needed_by[made.pop(group)] = t
                needs[t] += 1
        made[pair[0]] = t
    key = [*zip((-height).tolist(), a.tolist(), b.tolist(), range(len(a)), strict=True)]
    ready = [key[t] for t in range(len(a)) if not needs[t]]
    heapq.heapify(ready)
    first = np.arange(total)
    for _ in range(count):
        *_, i, j, t = heapq.heappop(ready)
        first[j] = i
        after = needed_by[t]
        if after is not None:
            needs[after] -= 1
            if not needs[after]:
                heapq.heappush(ready, key[after])
    while (first != first[first]).any():
        first = first[first]
    return first
