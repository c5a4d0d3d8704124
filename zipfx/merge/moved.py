"""Moved: the features that a merge holds in another order than a model, and their unmerge."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zipfx.analysis import Grouping, NodeFacts, overlapping
from zipfx.hashing import Flags, Ints
from zipfx.match import Matching, Merge, Move, is_pattern, read_maps


@dataclass(frozen=True, eq=False)
class Moved:
    """Which spaces the merge has put in another order than model k has; matchings: by space index
    of the grouping."""

    grouping: Grouping
    matchings: Mapping[int, Merge]
    k: int

    @functools.cached_property
    def spaces(self) -> frozenset[int]:
        return frozenset(s for s, merge in self.matchings.items() if not _in_place(merge, self.k))

    def among(self, labels: Ints) -> set[int]:
        """The moved spaces of these labels."""
        return self.grouping.spaces(labels) & self.spaces

    def vertices(self, vertices: Ints) -> Flags:
        """Which of these vertices the merge moves."""
        starts, before = self.grouping.starts, self._moved_before
        found: Flags = before[starts[vertices + 1]] > before[starts[vertices]]
        return found

    @functools.cached_property
    def _moved_before(self) -> Ints:
        """How many of the grouping's entries before each one are of moved spaces."""
        moved = np.isin(self.grouping.moved_space, [*self.spaces])
        return np.concatenate([[0], np.cumsum(moved)])

    def lies_in(self, fact: NodeFacts) -> bool:
        """Whether the results of a node hold moved features."""
        slots = (slot for value in fact.values for slot in value.features)
        return any(self.among(slot.reshape(-1).numpy()) for slot in slots)

    def is_whole_in(self, fact: NodeFacts) -> bool:
        """Whether the results of a node hold moved spaces whole, so that U can come after it."""
        for value in fact.values:
            for _, slots in overlapping(value.features):
                tables = {s for s, _ in self.grouping.tables(*slots)}
                if not {s for labels in slots for s in self.among(labels)} <= tables:
                    return False
        return True

    def unmerge(
        self, labels: Sequence[Ints], size: int, dim: int, by: int = -1, parts: int = 1
    ) -> list[Move]:
        """What restores the features with these labels along an axis."""
        reads = [(index, self.matchings[s]) for s, index in self.grouping.tables(*labels)]
        return read_maps(size, dim, reads, self.k, by, parts)


def _in_place(merge: Merge, k: int) -> bool:
    """Whether the features of model k stay where they are."""
    if not isinstance(merge, Matching) or not is_pattern(merge, read=True):
        return False
    return torch.equal(merge.of(k), torch.arange(merge.sizes[k]))
