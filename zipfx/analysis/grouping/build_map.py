"""Build map: the spaces of a grouping as values: axes, places in the graph, what is pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from zipfx.analysis.grouping.grouping import Grouping
from zipfx.analysis.grouping.places import find_places
from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.facts import Facts
from zipfx.analysis.spaces.space_map import SpaceMap
from zipfx.analysis.spaces.values import Axis, Block, Pinned, Role, Space
from zipfx.hashing import Flags

_UNLIKE = "unlike any other: it meets fixed coordinates (input channels, positions, constants)"
_OVERLAP = "blocks of features overlap without nesting"


def find_spaces(
    graph: fx.Graph, facts: Facts, grouping: Grouping, held: Mapping[int, str] | None = None
) -> SpaceMap:
    """The spaces of a grouping as values: their axes, their places in the graph, what is pinned.

    held: labels that were pinned from outside, and why.
    """
    constraints, last, known = facts.constraints, grouping.last, grouping.known
    axes: dict[int, list[Axis]] = {}
    tied: set[int] = set()
    for axis in constraints.axes:
        labels = np.arange(axis.start, axis.stop)
        tables = grouping.tables(labels)
        numbers = [s for s, _ in tables]
        tied |= {s for s in numbers if numbers.count(s) > 1}  # they are its rows and its columns
        for s, index in tables:
            run = axis.start + index.numpy()
            consumed, produced = known.consumed[run], known.produced[run]
            if (consumed & produced).any():
                tied.add(s)
            role = (
                Role.PRODUCES
                if produced.all()
                else (Role.CONSUMES if consumed.all() else Role.ELEMENTWISE)
            )
            implied = axis.by >= 0 and any(
                (a.parameter, a.dim) == (axis.name, axis.dim) for a in axes.get(s, ())
            )
            found = Axis(axis.name, axis.dim, role, index, axis.by, axis.parts, implied)
            axes.setdefault(s, []).append(_as_a_whole(found, axis.size))
    for ids, node in constraints.bilinear:
        if node <= last:
            tied |= set(grouping.space[grouping.vertex[ids[ids > 0]]].tolist())
    places = find_places(graph, facts, grouping)
    names = _names([axes[s] for s in range(len(grouping.sizes))], grouping.of_blocks)
    spaces = tuple(
        Space(
            names[s],
            size,
            tuple(axes[s]),
            tuple(places.get(s, ())),
            s in tied,
            grouping.blocks[s],
            tuple(Block(names[p], index) for p, index in grouping.parents(s)),
            grouping.of_blocks[s],
        )
        for s, size in enumerate(grouping.sizes)
    )
    variances = frozenset(name for name, node in constraints.variances if node <= last)
    return SpaceMap(spaces, _pinned(constraints, grouping, held or {}), facts.notes, variances)


def _as_a_whole(axis: Axis, length: int) -> Axis:
    """An axis on which every part of the rows moves in the same way needs no parts (a stack of
    matrices, one for each frequency, that all read the same features)."""
    if axis.by < 0 or axis.implied or axis.index.shape[1] % axis.parts:
        return axis
    part, order = (axis.index // length).sort(dim=1, stable=True)
    at = (axis.index % length).gather(1, order)
    every = at[:, : axis.index.shape[1] // axis.parts]
    numbers = torch.arange(axis.parts).repeat_interleave(every.shape[1])
    if bool((part != numbers).any()) or bool((at != every.repeat(1, axis.parts)).any()):
        return axis
    return replace(axis, index=every, by=-1, parts=1)


def _names(axes: list[list[Axis]], of_blocks: tuple[bool, ...]) -> list[str]:
    """After the weight that makes the features; blocks with a mark, repeated names numbered."""
    names: list[str] = []
    for mine, blocks in zip(axes, of_blocks, strict=True):
        makers = [a for a in mine if a.role == Role.PRODUCES] or mine
        base = makers[0].parameter.removesuffix(".weight") + (" blocks" if blocks else "")
        several = (f"{base}#{i}" for i in range(2, len(axes) + 2))
        names.append(next(n for n in (base, *several) if n not in names))
    return names


def _pinned(
    constraints: Constraints, grouping: Grouping, held: Mapping[int, str]
) -> tuple[Pinned, ...]:
    last, vertex, known = grouping.last, grouping.vertex, grouping.known
    seen = np.zeros(len(grouping.kind), bool)
    for ids, node in (*constraints.alive, *((c.w, c.node) for c in constraints.contractions)):
        if node <= last:
            seen[vertex[ids[ids > 0]]] = True
    still = grouping.starts[1:] == grouping.starts[:-1]
    stay = seen & still
    why = {int(vertex[label]): reason for label, reason in held.items()}
    for c in constraints.colours:
        if c.reason and c.node <= last:
            for v in np.unique(vertex[c.a]).tolist():
                why.setdefault(v, c.reason)
    counts: dict[tuple[str, int, str], int] = {}
    for label in np.flatnonzero(stay[vertex] & (known.axis >= 0)).tolist():
        axis, v = constraints.axes[known.axis[label]], int(vertex[label])
        reason = why.get(v, _OVERLAP if grouping.overlapping[v] else _UNLIKE)
        key = axis.name, axis.dim, reason
        counts[key] = counts.get(key, 0) + 1
    pinned = [Pinned(name, dim, n, reason) for (name, dim, reason), n in counts.items()]
    return (*pinned, *_ordered(constraints, grouping, stay))


def _ordered(constraints: Constraints, grouping: Grouping, stay: Flags) -> list[Pinned]:
    """Axes whose features move, but only as whole blocks."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for ids, node, reason in constraints.blocks:
        if node <= grouping.last:
            for label in ids[ids > 0].tolist():
                axis_of = grouping.known.axis[label]
                if not stay[grouping.vertex[label]] and axis_of >= 0:
                    axis = constraints.axes[axis_of]
                    found.setdefault((axis.name, axis.dim, reason), set()).add(label)
    return [Pinned(name, dim, len(ids), reason) for (name, dim, reason), ids in found.items()]
