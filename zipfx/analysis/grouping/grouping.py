"""Grouping: which features are exchangeable, as the stages that follow ask it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zipfx.analysis.grouping.known import Known
from zipfx.analysis.grouping.squares import Square
from zipfx.hashing import Flags, Ints


@dataclass(frozen=True)
class Grouping:
    """What the nodes up to `last` know of features and blocks, the *vertices*.

    vertex: of every label; turn: the order of several labels of a vertex on one axis; kind: the
    class of every vertex; rank: the order of vertices that move together; space: of every vertex
    that is a feature of one (else -1), member: its number in it. A vertex moves with each entry
    (moved space, member) from starts[v] to starts[v + 1]: its own and those of the blocks it
    belongs to, moved side being 1 for those of its column (see `squares`); row, column: of every
    vertex that is the entry of a square (else -1). sizes, blocks: of the spaces; of_blocks: whether
    their members are blocks of features that reach data. crossing: the nodes whose values leave for
    the heads.
    """

    last: int
    known: Known
    vertex: Ints
    turn: Ints
    kind: Ints
    rank: Ints
    space: Ints
    member: Ints
    starts: Ints
    moved_space: Ints
    moved_member: Ints
    moved_side: Ints
    row: Ints
    column: Ints
    sizes: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    of_blocks: tuple[bool, ...]
    overlapping: Flags
    crossing: tuple[int, ...] = ()

    def entries(self, labels: Ints) -> tuple[Ints, Ints, Ints]:
        """For all that moves these labels: (index into labels, space, member)."""
        index, entry = self._entries(labels)
        return index, self.moved_space[entry], self.moved_member[entry]

    def _entries(self, labels: Ints) -> tuple[Ints, Ints]:
        v = self.vertex[labels]
        count = np.where(labels > 0, self.starts[v + 1] - self.starts[v], 0)
        index = np.repeat(np.arange(len(v)), count)
        within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        return index, self.starts[v][index] + within

    def tables(self, *slots: Ints) -> list[tuple[int, Tensor]]:
        """For every space wholly present on an axis with these labels: (space, index table).

        slots: (n,) labels per index of the axis, 0 for none. The table is (size, occurrences);
        blocks come before what is inside them. A space has two tables, to be followed one after the
        other, where its features are the rows and the columns of what lies on the axis.
        """
        found: dict[int, list[Tensor]] = {}
        for labels in slots:
            for s, table in self._tables(labels):
                known = found.setdefault(s, [])
                rows = table.sort(dim=1)[0]
                if all(not torch.equal(rows, other.sort(dim=1)[0]) for other in known):
                    known.append(table)
        return [(s, table) for s in sorted(found) for table in found[s]]

    def _tables(self, labels: Ints) -> list[tuple[int, Tensor]]:
        index, entry = self._entries(labels)
        if not len(index):
            return []
        space, member, side = (
            moved[entry] for moved in (self.moved_space, self.moved_member, self.moved_side)
        )
        vertex = self.vertex[labels[index]]
        across = along = np.zeros(len(index), np.int64)
        if side.any():
            square = Square.of(vertex, self.row, self.column, index, space, member, side)
            index, space, member, side, vertex = square.entries
            across, along = (self.rank[v] for v in (square.across, square.along))
        rank, turn = self.rank[vertex], self.turn[labels[index]]
        key = 2 * space + side
        order = np.lexsort((index, turn, rank, along, across, member, key))
        index, key, member = index[order], key[order], member[order]
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        count = np.diff(starts, append=len(key))
        size = self._sizes[key[starts] // 2]
        within = np.arange(len(key)) - np.repeat(starts, count)
        regular = member == within // np.repeat(np.maximum(count // size, 1), count)
        whole = np.logical_and.reduceat(regular, starts) & (count % size == 0)
        table = torch.from_numpy(index)
        return [
            (k // 2, table[start : start + length].reshape(n, -1))
            for k, n, start, length in np.stack([key[starts], size, starts, count], 1)[
                whole
            ].tolist()
        ]

    def torn(self, labels: Ints) -> set[int]:
        """The spaces whose features are rows and columns on an axis with these labels, but not of a
        whole square."""
        index, entry = self._entries(labels)
        space, member, side = (
            moved[entry] for moved in (self.moved_space, self.moved_member, self.moved_side)
        )
        if not side.any():
            return set()
        vertex = self.vertex[labels[index]]
        return Square.of(vertex, self.row, self.column, index, space, member, side).torn

    @functools.cached_property
    def _sizes(self) -> Ints:
        return np.array(self.sizes, np.int64)

    def spaces(self, labels: Ints) -> set[int]:
        """The spaces that move any of these labels."""
        return set(np.unique(self.entries(np.unique(labels))[1]).tolist())

    def mixes(self, space: int, *slots: Ints) -> bool:
        """Whether features of a space lie here together with others of it, or with those of a space
        that it does not lie in, so that the occurrences of a feature may have another order in
        another model."""
        found = [self.entries(labels)[:2] for labels in slots]
        index, spaces = (np.concatenate(parts) for parts in zip(*found, strict=True))
        own = index[spaces == space]
        here = np.isin(index, own)
        return len(np.unique(own)) < len(own) or bool(
            set(spaces[here].tolist()) - {space, *(s for s, _ in self.parents(space))}
        )

    def parents(self, space: int) -> list[tuple[int, Tensor]]:
        """The spaces of the blocks that a space lies in, outermost first, with index tables into
        the features of the space."""
        return self._nested[space]

    @functools.cached_property
    def _nested(self) -> list[list[tuple[int, Tensor]]]:
        """`parents` of every space."""
        found = []
        for space in range(len(self.sizes)):
            own = np.flatnonzero(self.space == space)
            own = own[np.argsort(self.member[own])]
            found.append([(s, t) for s, t in self.tables(self._label[own]) if s != space])
        return found

    @functools.cached_property
    def _label(self) -> Ints:
        """Some label of every vertex."""
        found = np.zeros(len(self.kind), np.int64)
        found[self.vertex[::-1]] = np.arange(len(self.vertex))[::-1]
        return found
