"""Block system: what may be exchanged when features belong to blocks.

Vertices are features and blocks; a pair (a, b) says that a belongs to b, or that the two meet.
Colour refinement (Weisfeiler and Leman) finds classes of vertices that look alike.  Between two
classes the pairs must fall apart into complete parts (every a with every b): then each part moves
as a whole.  A part with a single b makes b the parent of its a's; a part with one of each makes
them one vertex; of a larger part a new vertex becomes the parent.  Classes whose pairs do not fall
apart so (blocks that overlap without nesting) are left where they are.

Vertices of a class may be exchanged with one another inside a *cell*: those that have the same
parents.  A vertex moves with all its ancestors.  So the parts, and the cells, are systems of blocks
of the permutation group that leaves the network's function alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zipfx.analysis.grouping.block_state import BlockState, codes
from zipfx.analysis.grouping.squares import closure, find_sides, rows_and_columns
from zipfx.hashing import Flags, Hashes, Ints

_ROUNDS = 100  # every round removes pairs, or adds a level: more is a fault
_DERIVED = np.uint64(1)


@dataclass(frozen=True)
class BlockSystem:
    """Classes and blocks of n given vertices (joined ones share a number).

    vertex: (n,) number of each given vertex, below V; part: (n,) which of those that were joined
    into one it is, alike in all vertices of a class; kind: (V,) class; cell: (V,) vertices of one
    class that may be exchanged share a cell; child, ancestor: pairs of vertices, all generations;
    side: of each pair, 1 where a column leads to the ancestor, else 0 (see `squares`); row, column:
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

    @staticmethod
    def of(state: BlockState, parents: Parents) -> BlockSystem:
        """Of a state in which nothing is left to rewrite."""
        child, parent, side = parents.child, parents.parent, parents.side
        ancestors = closure(child, parent, side, len(state.colour))
        sides = rows_and_columns(child, parent, side, state.kind)
        cell = state.cells(child, parent, parents.role)
        return BlockSystem(
            state.vertex, state.part, state.kind, cell, *ancestors, *sides, state.overlapping
        )


def find_blocks(colour: Hashes, a: Ints, b: Ints, role: Hashes) -> BlockSystem:
    """Find what may be exchanged.

    Args:
        colour: (n,) of each vertex.
        a, b: (m,) a[i] belongs to b[i].
        role: (m,) in which way; only pairs of one role are compared with one another.

    >>> heads = np.array([8, 8, 8, 9, 9, 9])  # two blocks, numbers 8 and 9, of three features
    >>> colour = np.array([1] * 6 + [2, 2, 3, 3], dtype=np.uint64)
    >>> found = find_blocks(colour, np.arange(6), heads, np.ones(6, dtype=np.uint64))
    >>> found.cell[:6] == found.cell[0], found.cell[8] == found.cell[9]
    (array([ True,  True,  True, False, False, False]), np.True_)
    """
    state = BlockState.of(colour, a, b, role)
    for _ in range(_ROUNDS):
        state = state.refined()
        found = rewrite(state)
        if isinstance(found, Parents):
            return BlockSystem.of(state, found)
        state = found
    none, no_role = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    state = replace(state.hold(np.unique([state.a, state.b])), a=none, b=none, role=no_role)
    if len(state.kind) != len(state.colour):
        state = state.refined()
    return BlockSystem.of(state, Parents(none, none, no_role, none))


def rewrite(state: BlockState) -> BlockState | Parents:
    """What the first rewriting that applies makes of a refined state; where none does, the parents
    of every vertex."""
    relations = Relations.of(state)
    for by_relations in _BY_RELATIONS:
        if (found := by_relations(state, relations)) is not None:
            return found
    parents = Parents.of(state, relations)
    for by_parents in _BY_PARENTS:
        if (found := by_parents(state, parents)) is not None:
            return found
    return parents


# ------------------------------------------------------------------ relations of classes
@dataclass(frozen=True)
class Relations:
    """Of every pair (m,): its relation (pairs of one role between the same two classes), the
    connected part of it, the part's number of a's and of b's, and whether the part is complete;
    alone: whether it is the only one of its relation; same: whether a and b are of one class."""

    relation: Ints
    part: Ints
    p: Ints
    q: Ints
    full: Flags
    alone: Flags
    same: Flags

    @staticmethod
    def of(state: BlockState) -> Relations:
        """Of a refined state."""
        left, right = state.kind[state.a], state.kind[state.b]
        order = np.lexsort((state.role, right, left))
        new = np.zeros(len(order), np.int64)
        for key in (state.role, right, left):
            new[1:] |= key[order][1:] != key[order][:-1]
        relation = np.empty(len(order), np.int64)
        relation[order] = np.cumsum(new)
        part, p, q, full, alone = _parts(relation, state.a, state.b)
        return Relations(
            relation, part, p[part], q[part], full[part], alone[relation], left == right
        )

    @property
    def binding(self) -> Flags:
        """Pairs of relations with several parts: a lone part holds all of both classes, which
        binds no a to any b."""
        return ~self.alone


def adopt_circles(state: BlockState, relations: Relations) -> BlockState | None:
    """Vertices of one class that all meet each other get a parent."""
    same = relations.same
    a, b = state.a[same], state.b[same]
    circle, each_other = _circles(relations.relation[same], a, b, len(state.kind))
    if not each_other.any():
        return None
    return state.adopt(a[each_other], b[each_other], circle[each_other])


def hold_torn(state: BlockState, relations: Relations) -> BlockState | None:
    """Blocks of parts that are not complete overlap; so do others that meet inside a class."""
    torn, same = ~relations.full, relations.same
    held = np.concatenate([state.b[torn], state.a[same], state.b[same]])
    return state.hold(np.unique(held)) if len(held) else None


def join_pairs(state: BlockState, relations: Relations) -> BlockState | None:
    """Parts with one of each are one vertex."""
    one = relations.binding & (relations.p == 1) & (relations.q == 1)
    return state.join(state.a[one], state.b[one]) if one.any() else None


def adopt_parts(state: BlockState, relations: Relations) -> BlockState | None:
    """Parts with several of both get a parent."""
    many = relations.binding & (relations.p > 1) & (relations.q > 1)
    return state.adopt(state.a[many], state.b[many], relations.part[many]) if many.any() else None


_ByRelations = Callable[[BlockState, Relations], BlockState | None]
_BY_RELATIONS: tuple[_ByRelations, ...] = (adopt_circles, hold_torn, join_pairs, adopt_parts)


# ------------------------------------------------------------------ parents
@dataclass(frozen=True)
class Parents:
    """The parents of every vertex, in which role, and on which side (see `find_sides`); bad: those
    that can not be followed."""

    child: Ints
    parent: Ints
    role: Hashes
    side: Ints
    bad: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def of(state: BlockState, relations: Relations) -> Parents:
        """Of a state all of whose parts have a single vertex on one of their ends."""
        a, b, role = state.a, state.b, state.role
        up, down = relations.binding & (relations.q == 1), relations.binding & (relations.p == 1)
        child = np.concatenate([a[up], b[down]])
        parent = np.concatenate([b[up], a[down]])
        role = np.concatenate([role[up], ~role[down]])
        cells = state.cells(child, parent, role)
        return Parents(child, parent, role, *find_sides(child, parent, role, state.kind, cells))


def hold_unfollowed(state: BlockState, parents: Parents) -> BlockState | None:
    """Two parents of one class that are no row and column of a square are held."""
    return state.hold(parents.bad) if len(parents.bad) else None


def derive(state: BlockState, parents: Parents) -> BlockState | None:
    """Two parents of one child meet each other, unless one is told by its row and the other by its
    column."""
    order = np.lexsort((parents.role, parents.child))
    child, parent, side = parents.child[order], parents.parent[order], parents.side[order]
    found = [np.zeros((2, 0), np.int64)]
    for step in range(1, int(np.bincount(child).max(initial=0))):
        same = np.flatnonzero(child[step:] == child[:-step])
        same = same[side[same] + side[same + step] != 1]
        found.append(np.stack([parent[same], parent[same + step]]))
    one, other = np.concatenate(found, axis=1)
    apart = one != other
    one, other = one[apart], other[apart]
    swap = state.kind[one] > state.kind[other]
    met = np.unique((np.where(swap, other, one) << 32) | np.where(swap, one, other))
    low, high = met >> 32, met & 0xFFFFFFFF
    known = np.concatenate([codes(state.a, state.b), state.settled])
    news = ~np.isin(codes(low, high), known)
    return state.add(low[news], high[news], _DERIVED) if news.any() else None


def hold_uneven(state: BlockState, parents: Parents) -> BlockState | None:
    """Cells of one class must be alike in size; those that are not are held."""
    kind, cell = state.kind, state.cells(parents.child, parents.parent, parents.role)
    size = np.bincount(cell)[cell]
    low, high = np.full(kind.max() + 1, len(size)), np.zeros(kind.max() + 1, np.int64)
    np.minimum.at(low, kind, size)
    np.maximum.at(high, kind, size)
    bad = (low != high)[kind]
    return state.hold(np.flatnonzero(bad)) if bad.any() else None


_ByParents = Callable[[BlockState, Parents], BlockState | None]
_BY_PARENTS: tuple[_ByParents, ...] = (hold_unfollowed, derive, hold_uneven)


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
