"""Layout: where the boxes of a layered graph lie, and how edges run between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipfx.hashing import Floats, Ints

PITCH, HEIGHT, GAP, LETTER = 0.44, 0.24, 0.22, 0.063


@dataclass(frozen=True)
class Box:
    """A node: its text, the names of the boxes it reads, and the numbers of its colours."""

    name: str
    label: str
    inputs: tuple[str, ...]
    colours: tuple[int, ...] = ()


# ------------------------------------------------------------------ layout
@dataclass(frozen=True)
class Layout:
    """Where points lie: the boxes, then the bends of edges that pass through ranks.

    x, y: (points,) inches, y downwards; width: (boxes,); lines: (lines, 2) the points that each
    line joins; source: (lines,) the box whose value it carries; ends: lines that end at a box.
    """

    x: Floats
    y: Floats
    width: Floats
    lines: Ints
    source: Ints
    ends: npt.NDArray[np.bool_]


def ranks(inputs: Sequence[Sequence[int]]) -> Ints:
    """The longest path from any box without inputs; those lie just above their first reader."""
    rank = np.zeros(len(inputs), np.int64)
    first = np.full(len(inputs), len(inputs), np.int64)
    for i, read in enumerate(inputs):
        rank[i] = max((rank[j] + 1 for j in read), default=0)
        for j in read:
            first[j] = min(first[j], rank[i])
    for i, read in enumerate(inputs):
        if not read and first[i] < len(inputs):
            rank[i] = first[i] - 1
    return rank


def layout(boxes: Sequence[Box], sweeps: int = 24) -> Layout:
    """Place the boxes; all edges that leave one box share their bends."""
    at = {box.name: i for i, box in enumerate(boxes)}
    inputs = [sorted({at[name] for name in box.inputs}) for box in boxes]
    rank = ranks(inputs).tolist()
    width = np.array([LETTER * len(box.label) + 0.16 for box in boxes])
    bends: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], int] = {}
    for v, read in enumerate(inputs):
        for u in read:
            before = u
            for r in range(rank[u] + 1, rank[v]):
                bend = bends.setdefault((u, r), len(boxes) + len(bends))
                lines[before, bend] = u
                before = bend
            lines[before, v] = u
    level = np.array([*rank, *(r for _, r in bends)], np.int64)
    wide = np.concatenate([width, np.full(len(bends), 0.06)])
    joined = np.array(list(lines), np.int64).reshape(-1, 2)
    x = _sweep(level, wide, joined, sweeps)
    source = np.array(list(lines.values()), np.int64)
    return Layout(
        x, PITCH * level.astype(np.float64), width, joined, source, joined[:, 1] < len(boxes)
    )


def _sweep(level: Ints, width: Floats, lines: Ints, sweeps: int) -> Floats:
    """Down and up, each point goes to the mean of its neighbours; in the end to that of all."""
    n = int(level.max(initial=-1)) + 1
    points = [np.flatnonzero(level == r) for r in range(n)]
    upper, lower = lines[:, 0], lines[:, 1]
    x = np.zeros(len(level))
    for here in points:
        x[here] = _apart(np.zeros(len(here)), width[here])
    for sweep in range(2 * sweeps):
        final, down = sweep >= sweeps, sweep % 2 == 0
        for r in range(n) if down else reversed(range(n)):
            here = points[r]
            wanted, count = x[here] * 1e-3, np.full(len(here), 1e-3)
            for ours, theirs, used in ((lower, upper, down), (upper, lower, not down)):
                if used or final:
                    mine = np.flatnonzero(level[ours] == r)
                    local = np.searchsorted(here, ours[mine])
                    np.add.at(wanted, local, x[theirs[mine]])
                    np.add.at(count, local, 1.0)
            wanted /= count
            order = np.argsort(x[here] if final else wanted, kind="stable")
            x[here[order]] = _apart(wanted[order], width[here[order]])
    moved: Floats = x - x.min(initial=0.0)
    return moved


def _apart(wanted: Floats, width: Floats) -> Floats:
    """The nearest places in this order that do not overlap (mean of two monotone bounds)."""
    offset = np.cumsum(width + GAP) - width / 2
    slack = wanted - offset
    below = np.maximum.accumulate(slack)
    above = np.minimum.accumulate(slack[::-1])[::-1]
    placed: Floats = (below + above) / 2 + offset
    return placed
