"""Known: what the nodes of a trunk know of every label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zipfx.analysis.grouping.components import components
from zipfx.analysis.labels.constraints import Constraints
from zipfx.hashing import Flags, Hashes, Ints, hash64


@dataclass(frozen=True)
class Known:
    """What the nodes up to `last` know of every label: its axis (-1: none), its colour, whether a
    weight that reads features, or one that makes them, has it."""

    axis: Ints
    colour: Hashes
    consumed: Flags
    produced: Flags

    @staticmethod
    def learn(
        constraints: Constraints, last: int, crossing: Sequence[tuple[Ints, ...]] = ()
    ) -> Known:
        """crossing: the labels that leave with each value that leaves the trunk, and how often."""
        axis = np.full(constraints.size, -1, np.int64)
        for i, a in enumerate(constraints.axes):
            axis[a.start : a.stop] = i
        colour = np.zeros(constraints.size, np.uint64)
        for c in constraints.colours:
            if c.node <= last:
                np.add.at(colour, c.a, c.value)
        for i, (ids, count) in enumerate(crossing):
            colour[ids] += hash64(hash64(-1 - i).view(np.int64) ^ count)
        for a in constraints.axes:
            if a.by >= 0:  # what an axis meets as a whole, all its parts meet
                whole = colour[a.base : a.base + a.size]
                colour[a.start : a.stop] += np.tile(hash64(whole.view(np.int64)), a.parts)
        weights = components(constraints, last, weights_only=True)
        consumed = [c.w for c in constraints.contractions if c.node <= last]
        produced = [ids for ids, node in constraints.produced if node <= last]
        return Known(axis, colour, _spread(weights, consumed), _spread(weights, produced))


def _spread(group: Ints, labels: Sequence[Ints]) -> Flags:
    """Whether any of these labels lies in the group of each label."""
    hit = np.zeros(group.max() + 1, bool)
    for ids in labels:
        hit[group[ids[ids > 0]]] = True
    return hit[group]
