"""Block state: features and blocks as a coloured graph, and the ways to rewrite it.

Every rewriting is a pure function, so that `block_system` can try them in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zipfx.hashing import Flags, Hashes, Ints, hash64

_ADOPTED = np.uint64(2)


@dataclass(frozen=True)
class BlockState:
    """V vertices, those that n given ones have become, and the pairs of them that meet.

    colour: (V,); a, b, role: (m,) a[i] belongs to b[i], in which way; vertex, part: (n,) see
    `BlockSystem`; overlapping: (V,) held, as blocks overlap; settled: pairs (see `codes`) that a
    common parent stands for; kind: (V,) the class of each vertex, once the state is `refined`.
    """

    colour: Hashes
    a: Ints
    b: Ints
    role: Hashes
    vertex: Ints
    part: Hashes
    overlapping: Flags
    settled: Ints
    kind: Ints

    @staticmethod
    def of(colour: Hashes, a: Ints, b: Ints, role: Hashes) -> BlockState:
        """The given vertices, each for itself."""
        n, none = len(colour), np.zeros(0, np.int64)
        part, overlapping = np.zeros(n, np.uint64), np.zeros(n, bool)
        return BlockState(colour, a, b, role, np.arange(n), part, overlapping, none, none)

    def refined(self) -> BlockState:
        """With every pair once in each role, none with itself, and the classes of vertices."""
        order = np.lexsort((self.role, self.b, self.a))
        order = order[self.a[order] != self.b[order]]
        a, b, role = self.a[order], self.b[order], self.role[order]
        new = np.ones(len(a), bool)
        new[1:] = (np.diff(a) != 0) | (np.diff(b) != 0) | (role[1:] != role[:-1])
        a, b, role = a[new], b[new], role[new]
        return replace(self, a=a, b=b, role=role, kind=refine(self.colour, a, b, role))

    def hold(self, vertices: Ints) -> BlockState:
        """These overlap: no two of them are alike."""
        overlapping, colour = self.overlapping.copy(), self.colour.copy()
        overlapping[vertices] = True
        colour[vertices] += hash64(hash64(vertices).view(np.int64))
        return replace(self, overlapping=overlapping, colour=colour)

    def add(self, a: Ints, b: Ints, role: np.uint64) -> BlockState:
        """With further pairs, all of one role."""
        return replace(
            self,
            a=np.concatenate([self.a, a]),
            b=np.concatenate([self.b, b]),
            role=np.concatenate([self.role, np.full(a.shape, role)]),
        )

    def join(self, a: Ints, b: Ints) -> BlockState:
        """Make each a[i] and b[i] one vertex; pairs, and the vertices given, remember which of the
        two they were with: no two of a class become one, so that the class tells.

        If that would identify two vertices of one class, theirs is a circle: it is held.
        """
        n = len(self.colour)
        graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n))
        group = connected_components(graph, directed=False)[1].astype(np.int64)
        met = np.unique(np.concatenate([a, b]))
        circles = self._circles(group, met)
        if circles.any():
            return self.hold(met[circles[group[met]]])
        return self._identify(group, met)

    def _circles(self, group: Ints, met: Ints) -> Flags:
        """The groups in which two of these vertices are of one class."""
        order = np.lexsort((self.kind[met], group[met]))
        twice = (np.diff(group[met][order]) == 0) & (np.diff(self.kind[met][order]) == 0)
        circles = np.zeros(len(group), bool)
        circles[group[met][order[1:][twice]]] = True
        return circles

    def _identify(self, group: Ints, met: Ints) -> BlockState:
        """Make every group one vertex; met: the vertices that are not alone in theirs."""
        joined = np.zeros(len(group), bool)
        joined[met] = True
        told = hash64((self.part ^ hash64(self.kind[self.vertex])).view(np.int64))
        part, role = np.where(joined[self.vertex], told, self.part), self.role
        for end, salt in ((self.a, 1), (self.b, 2)):
            told = hash64(role.view(np.int64) ^ hash64(3 * self.kind[end] + salt).view(np.int64))
            role = np.where(joined[end], told, role)
        count = group.max() + 1
        colour, overlapping = np.zeros(count, np.uint64), np.zeros(count, bool)
        np.add.at(colour, group, self.colour)
        np.logical_or.at(overlapping, group, self.overlapping)
        a, b, vertex = group[self.a], group[self.b], group[self.vertex]
        settled = codes(group[self.settled >> 32], group[self.settled & 0xFFFFFFFF])
        return BlockState(colour, a, b, role, vertex, part, overlapping, settled, self.kind)

    def adopt(self, a: Ints, b: Ints, part: Ints) -> BlockState:
        """A new vertex becomes the parent of every part, in place of its pairs a[i], b[i]."""
        parts, new = np.unique(part, return_inverse=True)
        # alike for all parts of a relation, whatever the order of relations
        colour = np.zeros(len(parts), np.uint64)
        colour[new] = hash64(
            hash64(hash64(self.kind[a]).view(np.int64) ^ self.kind[b]).view(np.int64)
        )
        gone, first = codes(a, b), len(self.colour)
        keep = ~np.isin(codes(self.a, self.b), gone)
        rest = replace(
            self,
            colour=np.concatenate([self.colour, colour]),
            overlapping=np.concatenate([self.overlapping, np.zeros(len(parts), bool)]),
            settled=np.union1d(self.settled, gone),
            a=self.a[keep],
            b=self.b[keep],
            role=self.role[keep],
        )
        return rest.add(a, first + new, _ADOPTED).add(b, first + new, _ADOPTED)

    def cells(self, child: Ints, parent: Ints, role: Hashes) -> Ints:
        """Vertices of one class with the same parents."""
        parents = np.zeros(len(self.colour), np.uint64)
        np.add.at(parents, child, hash64((hash64(parent) ^ role).view(np.int64)))
        h = hash64(hash64(self.kind).view(np.int64) ^ parents.view(np.int64))
        return np.unique(h, return_inverse=True)[1].astype(np.int64)


def codes(a: Ints, b: Ints) -> Ints:
    """Pairs in either order as one number."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    found: Ints = (low << 32) | high
    return found


def refine(colour: Hashes, a: Ints, b: Ints, role: Hashes) -> Ints:
    """Colour refinement (1-WL): classes of vertices that look alike, and whose neighbours do.

    >>> same = np.zeros(4, np.uint64)
    >>> kind = refine(same, np.array([0, 1]), np.array([2, 2]), np.ones(2, np.uint64))
    >>> bool(kind[0] == kind[1]), len(np.unique(kind))
    (True, 3)
    """
    kind = np.unique(colour, return_inverse=True)[1].astype(np.int64)
    met, where = np.unique(np.concatenate([a, b]), return_inverse=True)
    a, b = where[: len(a)], where[len(a) :]
    up, down = hash64(role.view(np.int64)), hash64(~role.view(np.int64))
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
