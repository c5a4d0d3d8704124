"""Classes: labels grouped into feature spaces.

Features are exchangeable when they occur in the same axes in the same way, inside blocks that are
themselves exchangeable.

A component of labels that are tied by edges is one feature, or one block (`occurrences`). Its
colour hashes the axes it lies on and every coordinate it has met; `find_blocks` finds from colours
and memberships what may be exchanged.  A space is a class of features: the inner features of all
attention heads of a layer, say, and the heads themselves are another.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from zipfx.analysis.grouping.block_system import BlockSystem, find_blocks
from zipfx.analysis.grouping.components import components, in_parts, occurrences, runs
from zipfx.analysis.grouping.grouping import Grouping
from zipfx.analysis.grouping.known import Known
from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.facts import Facts
from zipfx.analysis.labels.labels import overlapping
from zipfx.hashing import Flags, Hashes, Ints, as_they_come, hash64


def group(
    facts: Facts,
    last: int | None = None,
    held: Collection[int] = (),
    crossing: Sequence[int] = (),
) -> Grouping:
    """Group the labels by what the nodes up to index `last` (default: all) know.

    held: labels whose features stay where they are (found unsafe by `verify`, say); crossing: nodes
    whose values leave the trunk, so that only features which leave together share a space.
    """
    constraints = facts.constraints
    last = len(facts.nodes) - 1 if last is None else last
    facts = facts.until(last)
    leaving = [
        tuple(t.numpy() for t in torch.unique(slot, return_counts=True))
        for i in crossing
        for value in facts.nodes[i].values
        for slot in value.features
    ]
    known = Known.learn(constraints, last, leaving)
    component = components(constraints, last)
    turn, name, shape = occurrences(constraints, last, known.axis, known.colour, component)
    held_labels = np.array(sorted(held), np.int64)
    system = _block_system(constraints, last, known, component, held_labels, shape, name)
    vertex = system.vertex[component]
    turn = in_parts(turn, system.kind[vertex], system.part[component])
    n = len(system.kind)

    first = np.full(n, constraints.size, np.int64)
    real = np.flatnonzero(known.axis >= 0)
    np.minimum.at(first, vertex[real], real)
    np.minimum.at(first, system.ancestor, first[system.child])
    free = np.zeros(n, bool)
    for ids, node in constraints.alive:
        if node <= last:
            free[vertex[ids[ids > 0]]] = True
    inside = np.zeros(n, bool)
    inside[system.ancestor[free[system.child]]] = True
    free |= inside
    free &= first < constraints.size
    free[vertex[held_labels]] = False
    free[vertex[0]] = False
    free &= ~system.overlapping
    free &= np.bincount(system.cell)[system.cell] > 1
    rank = _rank(system, first)
    made = _number(last, known, vertex, turn, system, first, rank, free, inside, tuple(crossing))
    torn = _torn(facts, made) if made.moved_side.any() else set()
    if not torn:
        return made
    labels = np.flatnonzero(np.isin(made.space[made.vertex], sorted(torn)))
    return group(facts, last, {*held, *labels.tolist()}, crossing)


def _torn(facts: Facts, made: Grouping) -> set[int]:
    """Spaces with rows and columns of what is no whole square, on some axis or in some value."""
    axes = [np.arange(axis.start, axis.stop) for axis in facts.constraints.axes]
    values = [
        labels
        for node in facts.nodes[: made.last + 1]
        for value in node.values
        for _, slots in overlapping(value.features)
        for labels in slots
    ]
    return set().union(*(made.torn(labels) for labels in (*axes, *values)))


def _rank(system: BlockSystem, first: Ints) -> Ints:
    """The order of vertices by class, by their ancestors, then by first label, so that two blocks
    list what is inside them in the same order."""
    order = np.lexsort((first[system.ancestor], system.kind[system.ancestor], system.child))
    child, ancestor = system.child[order], system.ancestor[order]
    generation = np.arange(len(child)) - np.searchsorted(child, child)
    keys = [first]
    for g in range(int(generation.max(initial=-1)), -1, -1):
        key = np.zeros(len(first), np.int64)
        key[child[generation == g]] = first[ancestor[generation == g]]
        keys.append(key)
    rank = np.empty(len(first), np.int64)
    rank[np.lexsort((*keys, system.kind))] = np.arange(len(first))
    return rank


def _block_system(
    constraints: Constraints,
    last: int,
    known: Known,
    component: Ints,
    held: Ints,
    shape: Hashes,
    name: Hashes,
) -> BlockSystem:
    colour = shape.copy()
    lies_on = hash64(hash64(known.axis).view(np.int64) ^ 1)
    lies_on[known.axis < 0] = 0
    np.add.at(colour, component, lies_on + known.colour)
    colour[component[held]] += hash64(1)
    members = [m for m in constraints.members if m.node <= last]
    empty = [np.zeros(0, np.int64)]
    a, b = (np.concatenate([getattr(m, name) for m in members] or empty) for name in ("a", "b"))
    role = np.concatenate([m.role for m in members] or [np.zeros(0, np.uint64)])
    used = np.zeros(constraints.size, bool)
    for ids in (*(e.a for e in constraints.edges), *(e.b for e in constraints.edges), a, b):
        used[ids] = True
    for axis in constraints.axes:  # an axis that is also used as a whole ties its parts
        whole = np.arange(axis.base, axis.base + axis.size)
        if axis.by >= 0 and used[whole].any():
            a = np.concatenate([a, np.arange(axis.start, axis.stop)])
            b = np.concatenate([b, np.tile(whole, axis.parts)])
            role = np.concatenate([role, np.full(axis.stop - axis.start, hash64(2), np.uint64)])
    role = hash64(
        (role ^ hash64(name[a].view(np.int64)) ^ hash64(~name[b].view(np.int64))).view(np.int64)
    )
    # a block that became one with others stays a vertex of its own below them: what belongs to it
    # need not be like what belongs to the others
    blocks = np.unique(b)
    starts = np.cumsum([0, *(len(m.a) for m in members)])
    stays, again, before, of_both = _repeated(starts, component[a], b, role)
    blocks = blocks[(np.bincount(component)[component[blocks]] > 1) & (known.axis[blocks] < 0)]
    below = component.copy()
    below[blocks] = len(colour) + np.arange(len(blocks))
    found = find_blocks(
        np.concatenate([colour, known.colour[blocks] + hash64(3)]),
        np.concatenate([component[a[stays]], below[again], below[blocks]]),
        np.concatenate([below[b[stays]], below[before], component[blocks]]),
        np.concatenate([role[stays], of_both, hash64(name[blocks].view(np.int64)) + hash64(4)]),
    )
    return replace(found, vertex=found.vertex[: len(colour)])


def _repeated(
    starts: Ints, vertex: Ints, b: Ints, role: Hashes
) -> tuple[Flags, Ints, Ints, Hashes]:
    """Members that are told again: pairs of which the same vertices belong to other blocks in the
    same pattern, such as those of every norm on a residual stream. The blocks then meet those of
    the first time, which says as much in fewer pairs.

    Args:
        starts: where the pairs of each record begin, and the last ones end.
        vertex, b, role: of all pairs.

    Returns:
        Which pairs stay, and further pairs: blocks, those they meet, and roles.
    """
    stays = np.ones(len(vertex), bool)
    seen: dict[bytes, Ints] = {}
    again, before, told = [], [], []
    for i, (begin, stop) in enumerate(itertools.pairwise(starts)):
        order = begin + np.argsort(vertex[begin:stop])
        if (np.diff(vertex[order]) == 0).any():
            continue
        at, of = as_they_come(b[order])
        ways = as_they_come(role[order])[1]
        blocks = b[order][at]
        digest = hashlib.blake2b(np.concatenate([vertex[order], of, ways]).tobytes())
        first = seen.setdefault(digest.digest(), blocks)
        if first is not blocks:
            stays[begin:stop] = False
            again.append(blocks)
            before.append(first)
            told.append(
                np.full(len(blocks), hash64((hash64(i) ^ hash64(5)).view(np.int64)), np.uint64)
            )
    none = [np.zeros(0, np.int64)]
    return (
        stays,
        np.concatenate(again or none),
        np.concatenate(before or none),
        np.concatenate(told or [np.zeros(0, np.uint64)]),
    )


def _number(
    last: int,
    known: Known,
    vertex: Ints,
    turn: Ints,
    system: BlockSystem,
    first: Ints,
    rank: Ints,
    free: Flags,
    inside: Flags,
    crossing: tuple[int, ...],
) -> Grouping:
    """Number spaces and their members by their first labels, blocks before what is inside them."""
    n = len(system.kind)
    depth = np.bincount(system.child, minlength=n)
    members = np.flatnonzero(free)
    kind = system.kind[members]
    start = np.full(int(system.kind.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(start, kind, first[members])
    cell_start = np.full(int(system.cell.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(cell_start, system.cell[members], first[members])
    of_cell = cell_start[system.cell[members]]
    order = np.lexsort((first[members], of_cell, kind, depth[members], start[kind]))
    members, kind = members[order], kind[order]
    space, member = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    sizes, blocks, of_blocks = [], [], []
    for s, (_, begin, stop) in enumerate(runs(kind)):
        mine = members[begin:stop]
        space[mine], member[mine] = s, np.arange(stop - begin)
        cells = [b - a for _, a, b in runs(system.cell[mine])]
        sizes.append(stop - begin)
        blocks.append(tuple(cells) if len(cells) > 1 else ())
        of_blocks.append(bool(inside[mine].any()))
    moves = np.flatnonzero(space >= 0)
    child = np.concatenate([moves, system.child])
    parent = np.concatenate([moves, system.ancestor])
    side = np.concatenate([np.zeros(len(moves), np.int64), system.side])
    order = np.argsort(child, kind="stable")
    order = order[space[parent[order]] >= 0]
    child, parent, side = child[order], parent[order], side[order]
    starts = np.searchsorted(child, np.arange(n + 1))
    return Grouping(
        last, known, vertex, turn, system.kind, rank,
        space, member, starts, space[parent], member[parent], side, system.row, system.column,
        tuple(sizes), tuple(blocks), tuple(of_blocks), system.overlapping, crossing,
    )  # fmt: skip
