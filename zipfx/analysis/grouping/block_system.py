"""Nesting: what may be exchanged when features belong to blocks.

Vertices are features and blocks; a pair (a, b) says that a belongs to b, or that the two meet.
Colour refinement (Weisfeiler and Leman) finds classes of vertices that look alike.  Between two
classes the pairs must fall apart into complete parts (every a with every b): then each part moves
as a whole.  A part with a single b makes b the parent of its a's; a part with one of each makes
them one vertex; of a larger part a new vertex becomes the parent.  Classes whose pairs do not fall
apart so (blocks that overlap without nesting) are left where they are.

Vertices of a class may be exchanged with one another inside a *cell*: those that have the same
parents.  A vertex moves with all its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zipfx.analysis.grouping.squares import closure, find_sides, rows_and_columns
from zipfx.hashing import Flags, Hashes, Ints, hash64

_ROUNDS = 100  # every round removes pairs, or adds a level: more is a fault


@dataclass(frozen=True)
class Nesting:
    """Classes and blocks of n given vertices (joined ones share a number).

    vertex: (n,) number of each given vertex, below V; part: (n,) which of those that were joined
    into one it is, alike in all vertices of a class; kind: (V,) class; cell: (V,) vertices of one
    class that may be exchanged share a cell; child, ancestor: pairs of vertices, all generations;
    side: of each pair, 1 where a column leads to the ancestor, else 0 (see `twofold`); row, column:
    (V,) the parents of vertices that have two of one class, else -1; overlapping: (V,) bool, left
    alone because blocks overlap.
    """

    vertex: Ints
    part: Hashes
    kind: Ints
    cell: Ints
    child: Ints
    ancestor: Ints
    side: Ints
    row: Ints
    column: Ints
    overlapping: Flags


def nest(colour: Hashes, a: Ints, b: Ints, role: Hashes) -> Nesting:
    """Find what may be exchanged.

    Args:
        colour: (n,) of each vertex.
        a, b: (m,) a[i] belongs to b[i].
        role: (m,) in which way; only pairs of one role are compared with one another.

    >>> heads = np.array([8, 8, 8, 9, 9, 9])  # two blocks, numbers 8 and 9, of three features
    >>> colour = np.array([1] * 6 + [2, 2, 3, 3], dtype=np.uint64)
    >>> found = nest(colour, np.arange(6), heads, np.ones(6, dtype=np.uint64))
    >>> found.cell[:6] == found.cell[0], found.cell[8] == found.cell[9]
    (array([ True,  True,  True, False, False, False]), np.True_)
    """
    state = _State(colour.copy(), a, b, role)
    for _ in range(_ROUNDS):
        parents = state.step()
        if parents is not None:
            return state.result(*parents)
    state.hold(np.unique([state.a, state.b]))
    state.a = state.b = np.zeros(0, np.int64)
    state.role = np.zeros(0, np.uint64)
    return state.result(state.a, state.b, state.role, state.a)


_DERIVED, _ADOPTED = np.uint64(1), np.uint64(2)


class _State:
    def __init__(self, colour: Hashes, a: Ints, b: Ints, role: Hashes) -> None:
        self.colour = colour
        self.vertex = np.arange(len(colour))
        self.part = np.zeros(len(colour), np.uint64)
        self.overlapping = np.zeros(len(colour), bool)
        self.settled = np.zeros(0, np.int64)  # pairs that a common parent stands for
        self.kind = np.zeros(0, np.int64)
        self.a, self.b, self.role = a, b, role

    def code(self, a: Ints, b: Ints) -> Ints:
        """Pairs in either order as one number."""
        low, high = np.minimum(a, b), np.maximum(a, b)
        found: Ints = (low << 32) | high
        return found

    def tidy(self) -> None:
        """Every pair once in each role, none with itself."""
        order = np.lexsort((self.role, self.b, self.a))
        order = order[self.a[order] != self.b[order]]
        a, b, role = self.a[order], self.b[order], self.role[order]
        new = np.ones(len(a), bool)
        new[1:] = (np.diff(a) != 0) | (np.diff(b) != 0) | (role[1:] != role[:-1])
        self.a, self.b, self.role = a[new], b[new], role[new]

    def hold(self, vertices: Ints) -> None:
        """These overlap: no two of them are alike."""
        self.overlapping[vertices] = True
        self.colour[vertices] += hash64(hash64(vertices).view(np.int64))

    def add(self, a: Ints, b: Ints, role: np.uint64) -> None:
        self.a, self.b = np.concatenate([self.a, a]), np.concatenate([self.b, b])
        self.role = np.concatenate([self.role, np.full(a.shape, role)])

    def join(self, a: Ints, b: Ints) -> None:
        """Make each a[i] and b[i] one vertex; pairs, and the vertices given, remember which of the
        two they were with: no two of a class become one, so that the class tells.

        What would make two vertices of one class the same goes round in a circle: it is held.
        """
        n = len(self.colour)
        graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n))
        group = connected_components(graph, directed=False)[1].astype(np.int64)
        met = np.unique(np.concatenate([a, b]))
        order = np.lexsort((self.kind[met], group[met]))
        twice = (np.diff(group[met][order]) == 0) & (np.diff(self.kind[met][order]) == 0)
        circles = np.zeros(n, bool)
        circles[group[met][order[1:][twice]]] = True
        if circles.any():
            self.hold(met[circles[group[met]]])
            return
        joined = np.zeros(n, bool)
        joined[a] = joined[b] = True
        told = hash64((self.part ^ hash64(self.kind[self.vertex])).view(np.int64))
        self.part = np.where(joined[self.vertex], told, self.part)
        for end, salt in ((self.a, 1), (self.b, 2)):
            told = hash64(
                self.role.view(np.int64) ^ hash64(3 * self.kind[end] + salt).view(np.int64)
            )
            self.role = np.where(joined[end], told, self.role)
        count = group.max() + 1
        colour, overlapping = np.zeros(count, np.uint64), np.zeros(count, bool)
        np.add.at(colour, group, self.colour)
        np.logical_or.at(overlapping, group, self.overlapping)
        self.colour, self.overlapping = colour, overlapping
        self.vertex, self.a, self.b = group[self.vertex], group[self.a], group[self.b]
        low, high = group[self.settled >> 32], group[self.settled & 0xFFFFFFFF]
        self.settled = self.code(low, high)

    def refine(self) -> Ints:
        """Classes of vertices that look alike, and whose neighbours do."""
        kind = np.unique(self.colour, return_inverse=True)[1].astype(np.int64)
        met, where = np.unique(np.concatenate([self.a, self.b]), return_inverse=True)
        a, b = where[: len(self.a)], where[len(self.a) :]
        up, down = hash64(self.role.view(np.int64)), hash64(~self.role.view(np.int64))
        count = 0
        mine = kind[met]
        while len(met) and (now := int(np.unique(mine).size)) > count:
            count = now
            h, seen = hash64(mine), np.zeros(len(met), np.uint64)
            np.add.at(seen, a, hash64((h[b] ^ up).view(np.int64)))
            np.add.at(seen, b, hash64((h[a] ^ down).view(np.int64)))
            mine = np.unique(h + hash64(seen.view(np.int64)), return_inverse=True)[1]
        kind[met] = kind.max(initial=0) + 1 + mine
        return np.unique(kind, return_inverse=True)[1].astype(np.int64)

    def step(self) -> tuple[Ints, Ints, Hashes, Ints] | None:
        """One round; (children, parents, roles, sides) when nothing is left to do."""
        self.tidy()
        self.kind = kind = self.refine()
        a, b = self.a, self.b
        order = np.lexsort((self.role, kind[b], kind[a]))
        new = np.zeros(len(a), np.int64)
        for key in (self.role, kind[b], kind[a]):
            new[1:] |= key[order][1:] != key[order][:-1]
        relation = np.empty(len(a), np.int64)
        relation[order] = np.cumsum(new)
        part, p, q, full, alone = _parts(relation, a, b)
        same = kind[a] == kind[b]
        circle, each_other = _circles(relation[same], a[same], b[same], len(kind))
        if each_other.any():
            a, b, relation = (t[same][each_other] for t in (a, b, relation))
            self.adopt(a, b, circle[each_other], relation)
            return None
        if (torn := ~full[part]).any() or same.any():
            self.hold(np.unique(np.concatenate([b[torn], a[same], b[same]])))
            return None
        p, q, counts = p[part], q[part], ~alone[relation]
        if (one := counts & (p == 1) & (q == 1)).any():
            self.join(a[one], b[one])
            return None
        if (many := counts & (p > 1) & (q > 1)).any():
            self.adopt(a[many], b[many], part[many], relation[many])
            return None
        up, down = counts & (q == 1), counts & (p == 1)
        child = np.concatenate([a[up], b[down]])
        parent = np.concatenate([b[up], a[down]])
        role = np.concatenate([self.role[up], ~self.role[down]])
        side, bad = find_sides(child, parent, role, kind, self.cells(child, parent, role))
        if len(bad):
            self.hold(bad)
            return None
        if self.derive(child, parent, role, side) or self.uneven(child, parent, role):
            return None
        return child, parent, role, side

    def adopt(self, a: Ints, b: Ints, part: Ints, relation: Ints) -> None:
        """A new vertex becomes the parent of every part, in place of its pairs."""
        parts, new = np.unique(part, return_inverse=True)
        # alike for all parts of a relation, whatever the order of relations
        colour = np.zeros(len(parts), np.uint64)
        colour[new] = hash64(
            hash64(hash64(self.kind[a]).view(np.int64) ^ self.kind[b]).view(np.int64)
        )
        first = len(self.colour)
        self.colour = np.concatenate([self.colour, colour])
        self.overlapping = np.concatenate([self.overlapping, np.zeros(len(parts), bool)])
        gone = self.code(a, b)
        self.settled = np.union1d(self.settled, gone)
        keep = ~np.isin(self.code(self.a, self.b), gone)
        self.a, self.b, self.role = self.a[keep], self.b[keep], self.role[keep]
        self.add(a, first + new, _ADOPTED)
        self.add(b, first + new, _ADOPTED)

    def derive(self, child: Ints, parent: Ints, role: Hashes, side: Ints) -> bool:
        """Two parents of one child meet each other, unless one is told by its row and the other by
        its column; whether that is news."""
        order = np.lexsort((role, child))
        child, parent, side = child[order], parent[order], side[order]
        found = []
        for step in range(1, int(np.bincount(child).max(initial=0))):
            same = np.flatnonzero(child[step:] == child[:-step])
            same = same[side[same] + side[same + step] != 1]
            found.append(np.stack([parent[same], parent[same + step]]))
        if not found:
            return False
        one, other = np.concatenate(found, axis=1)
        apart = one != other
        one, other = one[apart], other[apart]
        swap = self.kind[one] > self.kind[other]
        low, high = np.where(swap, other, one), np.where(swap, one, other)
        codes = np.unique((low << 32) | high)
        low, high = codes >> 32, codes & 0xFFFFFFFF
        known = np.concatenate([self.code(self.a, self.b), self.settled])
        news = ~np.isin(self.code(low, high), known)
        self.add(low[news], high[news], _DERIVED)
        return bool(news.any())

    def uneven(self, child: Ints, parent: Ints, role: Hashes) -> bool:
        """Cells of one class must be alike in size; those that are not are held."""
        cell = self.cells(child, parent, role)
        size = np.bincount(cell)[cell]
        low, high = np.full(self.kind.max() + 1, len(size)), np.zeros(self.kind.max() + 1, np.int64)
        np.minimum.at(low, self.kind, size)
        np.maximum.at(high, self.kind, size)
        bad = (low != high)[self.kind]
        if bad.any():
            self.hold(np.flatnonzero(bad))
        return bool(bad.any())

    def cells(self, child: Ints, parent: Ints, role: Hashes) -> Ints:
        """Vertices of one class with the same parents."""
        parents = np.zeros(len(self.colour), np.uint64)
        np.add.at(parents, child, hash64((hash64(parent) ^ role).view(np.int64)))
        h = hash64(hash64(self.kind).view(np.int64) ^ parents.view(np.int64))
        return np.unique(h, return_inverse=True)[1].astype(np.int64)

    def result(self, child: Ints, parent: Ints, role: Hashes, side: Ints) -> Nesting:
        n = len(self.colour)
        kind = self.kind if len(self.kind) == n else self.refine()
        self.kind = kind
        cell = self.cells(child, parent, role)
        row, column = rows_and_columns(child, parent, side, kind)
        found = closure(child, parent, side, n)
        return Nesting(
            self.vertex, self.part, kind, cell, *found, row, column, self.overlapping
        )  # fmt: skip


def _circles(relation: Ints, a: Ints, b: Ints, n: int) -> tuple[Ints, Flags]:
    """Of pairs inside a class, which part of their relation each lies in, and whether all that are
    in that part meet each other: the heads of a stack of matrices that reads what it makes."""
    left, right = relation * n + a, relation * n + b
    met, where = np.unique(np.concatenate([left, right]), return_inverse=True)
    ends = where[: len(a)], where[len(a) :]
    graph = coo_array((np.ones(len(a), np.int8), ends), shape=(len(met), len(met)))
    if not len(met):
        return np.zeros(0, np.int64), np.zeros(0, bool)
    of = connected_components(graph, directed=False)[1].astype(np.int64)
    part, size = of[ends[0]], np.bincount(of)
    return part, (np.bincount(part, minlength=len(size)) == size * (size - 1))[part]


def _parts(relation: Ints, a: Ints, b: Ints) -> tuple[Ints, Ints, Ints, Flags, Flags]:
    """Connected parts of every relation: the part of each pair; of each part its number of a's and
    b's and whether it is complete; of each relation whether it is a single part."""
    left = np.unique((relation << 32) | a, return_inverse=True)[1]
    right = np.unique((relation << 32) | b, return_inverse=True)[1]
    n, m = int(left.max(initial=-1)) + 1, int(right.max(initial=-1)) + 1
    graph = coo_array((np.ones(len(a), np.int8), (left, n + right)), shape=(n + m, n + m))
    if not n:
        none = np.zeros(0, np.int64)
        return none, none, none, none.astype(bool), none.astype(bool)
    of = connected_components(graph, directed=False)[1].astype(np.int64)
    p, q = np.bincount(of[:n], minlength=of.max() + 1), np.bincount(of[n:], minlength=of.max() + 1)
    part = of[left]
    full = np.bincount(part, minlength=len(p)) == p * q
    relation_of = np.zeros(len(p), np.int64)
    relation_of[part] = relation
    alone = np.bincount(relation_of) == 1
    return part, p, q, full, alone
