"""Squares: vertices that lie in two blocks of one class, as the entries of a square matrix do.

Entry (i, j) of a matrix whose rows and columns are the same features lies in block i as a row and
in block j as a column.  Both may be followed at once if the matrix is whole: a permutation of the
features moves entry (i, j) to where its row goes, and from there to where its column goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from zipfx.hashing import Flags, Hashes, Ints


def find_sides(
    child: Ints, parent: Ints, role: Hashes, kind: Ints, cell: Ints
) -> tuple[Ints, Ints]:
    """Which children lie in two blocks of one class, and which of the two a parent is.

    Args:
        child, parent, role: (m,) pairs.
        kind, cell: of every vertex: its class, and which of its class have the same parents.

    Returns:
        (m,) 0 or 1 for a parent that the row, or the column, of its child tells, 2 for one that
        both do, -1 where the child is not twofold; and the parents that can not be followed.

    >>> row, column = np.divmod(np.arange(9), 3)  # the entries of a matrix; features are 9, 10, 11
    >>> kind, role = np.array([0] * 9 + [1] * 3), np.array([5] * 9 + [6] * 9, dtype=np.uint64)
    >>> pairs = np.tile(np.arange(9), 2), np.concatenate([row, column]) + 9
    >>> find_sides(*pairs, role, kind, np.zeros(12, np.int64))[0].reshape(2, 9)[:, :3].tolist()
    [[0, 0, 0], [1, 1, 1]]
    """
    side = np.full(len(child), -1, np.int64)
    pairs = np.unique((child << 32) | parent)
    below, above = pairs >> 32, kind[pairs & 0xFFFFFFFF]
    order = np.lexsort((above, below))
    below, above = below[order], above[order]
    several = (np.diff(below) == 0) & (np.diff(above) == 0)
    bad = [np.zeros(0, np.int64)]
    for c, p in sorted(set(zip(kind[below[1:][several]].tolist(), above[1:][several].tolist()))):
        mine = np.flatnonzero(kind[child] == c)
        leaf = not (kind[parent] == c).any()
        found = _sides(child[mine], parent[mine], role[mine], kind, cell, p) if leaf else None
        if found is None:
            bad.append(parent[mine][kind[parent[mine]] == p])
        else:
            side[mine] = found
    return side, np.unique(np.concatenate(bad))


def _sides(child: Ints, parent: Ints, role: Hashes, kind: Ints, cell: Ints, p: int) -> Ints | None:
    """The sides of all pairs of one class of children; None where those of class p do not make a
    whole square, or others are told by row and column together."""
    number = np.unique(child, return_inverse=True)[1]
    n, of = int(number.max()) + 1, kind[parent].astype(np.uint64)
    way = np.unique(np.stack([role, of]), axis=1, return_inverse=True)[1].reshape(-1)
    told = np.full((int(way.max()) + 1, n), -1, np.int64)  # the parent of every child, in every way
    told[way, number] = parent
    if len(np.unique(way * n + number)) < len(child) or (told < 0).any():
        return None
    two = np.unique(told[np.unique(way[kind[parent] == p])], axis=0)
    if len(two) != 2 or not _whole(two[0], two[1], kind, cell, p):
        return None
    follows = np.stack([[_follows(row, one) for row in told] for one in two])
    sides = np.where(follows.all(0), 2, follows.argmax(0))
    return sides[way] if bool(follows.any(0).all()) else None


def _whole(row: Ints, column: Ints, kind: Ints, cell: Ints, p: int) -> bool:
    """Whether there is one entry for every two of a class (or of a cell), and for all or none with
    itself."""
    size = np.bincount(cell[kind == p])
    inside = bool((cell[row] == cell[column]).all())
    pairs = int((size * (size - 1)).sum()) if inside else int(size.sum() * (size.sum() - 1))
    itself = int((row == column).sum())
    once = len(np.unique(np.stack([row, column]), axis=1).T) == len(row)
    return once and itself in (0, int(size.sum())) and len(row) - itself == pairs


def _follows(other: Ints, one: Ints) -> bool:
    """Whether `other` is a function of `one`."""
    return len(np.unique(np.stack([one, other]), axis=1).T) == len(np.unique(one))


def rows_and_columns(child: Ints, parent: Ints, side: Ints, kind: Ints) -> tuple[Ints, Ints]:
    """Of every vertex that has two parents of one class, these; else -1. (V,), (V,)"""
    found = np.full((2, len(kind)), -1, np.int64)
    told = side >= 0
    child, parent, side = child[told], parent[told], side[told]
    for k in np.unique(kind[parent]).tolist():
        mine = kind[parent] == k
        at = [child[mine & (side == s)] for s in (0, 1)]
        if all(map(len, at)):
            for s in (0, 1):
                found[s][at[s]] = parent[mine & (side == s)]
    return found[0], found[1]


def closure(child: Ints, parent: Ints, side: Ints, n: int) -> tuple[Ints, Ints, Ints]:
    """All ancestors of n vertices, and on which side: 1 where a column leads there, else 0."""
    if not (side == 1).any():
        pairs = np.unique((child << 32) | parent)
        child, parent = pairs >> 32, pairs & 0xFFFFFFFF
        up = csr_array((np.ones(len(child), bool), (child, parent)), shape=(n, n))
        every = up
        while (more := (every + every @ up).astype(bool)).nnz > every.nnz:
            every = more
        at = every.tocoo().coords
        return at[0].astype(np.int64), at[1].astype(np.int64), np.zeros(every.nnz, np.int64)
    child, parent, side = found = _distinct(child, parent, (side == 1).astype(np.int64))
    while True:
        start = np.searchsorted(child, found[1])
        count = np.searchsorted(child, found[1], side="right") - start
        again = np.repeat(np.arange(len(start)), count)
        at = np.repeat(start - np.cumsum(count) + count, count) + np.arange(len(again))
        further = found[0][again], parent[at], np.maximum(found[2][again], side[at])
        grown = _distinct(*(np.concatenate(both) for both in zip(found, further, strict=True)))
        if len(grown[0]) == len(found[0]):
            return found
        found = grown


def _distinct(child: Ints, parent: Ints, side: Ints) -> tuple[Ints, Ints, Ints]:
    """Each of these once, sorted."""
    found = np.unique(np.stack([child, parent, side]), axis=1)
    return found[0], found[1], found[2]


@dataclass(frozen=True)
class Square:
    """What moves the labels of an axis, some of which are the entries of a square.

    entries: (index, space, member, side, vertex), with one for the column of every label that is on
    the diagonal as a feature by itself; across, along: of each, the vertices by which the entries
    of a row (or column) are told, and those that tell the row; torn: spaces whose squares are not
    whole.
    """

    entries: tuple[Ints, Ints, Ints, Ints, Ints]
    across: Ints
    along: Ints
    torn: set[int]

    @staticmethod
    def of(
        vertex: Ints, row: Ints, column: Ints, index: Ints, space: Ints, member: Ints, side: Ints
    ) -> Square:
        """From the entries of an axis; row, column: of every vertex, see `rows_and_columns`."""
        twice = np.unique(space[side == 1])
        alone = np.isin(space, twice) & (row[vertex] < 0)
        added = (*(values[alone] for values in (index, space, member)), np.ones(alone.sum(), int))
        index, space, member, side, vertex = (
            np.concatenate(both)
            for both in zip((index, space, member, side, vertex), (*added, vertex[alone]))
        )
        r = np.where(row[vertex] < 0, vertex, row[vertex])
        c = np.where(row[vertex] < 0, vertex, column[vertex])
        across, along = np.where(side == 0, c, r), np.where(side == 0, r, c)
        torn = {s for s in twice.tolist() if not _square(r, c, (space == s) & (side == 0))}
        flat = ~np.isin(space, twice)
        across[flat] = along[flat] = vertex[0]
        keep = ~np.isin(space, sorted(torn))
        entries = tuple(values[keep] for values in (index, space, member, side, vertex))
        return Square(entries, across[keep], along[keep], torn)  # type: ignore[arg-type]


def _square(row: Ints, column: Ints, here: Flags) -> bool:
    """Whether these are the entries of a square with its diagonal, each as often as the others.

    That the others are all there is known of the vertices.
    """
    pairs, count = np.unique(np.stack([row[here], column[here]]), axis=1, return_counts=True)
    ends = np.unique(pairs)
    itself = pairs[0][pairs[0] == pairs[1]]
    return len(itself) == len(ends) and bool((count == count[0]).all())
