"""Components: which features labels are, and the order of the labels of a feature on one axis.

Unions of labels are edges, components come from scipy; each component is one feature, or one block.
It may lie on an axis several times: features that `y.flip(1) + y` ties do so twice.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zipfx.analysis.labels.constraints import Constraints
from zipfx.hashing import Flags, Hashes, Ints, hash64


def components(constraints: Constraints, last: int, *, weights_only: bool = False) -> Ints:
    """Which feature each label belongs to, by what nodes up to `last` have shown."""
    a, b, _ = _edges(constraints, last, weights_only)
    graph = coo_array(
        (np.ones(len(a), np.int8), (a, b)), shape=(constraints.size, constraints.size)
    )
    found: Ints = connected_components(graph, directed=False)[1].astype(np.int64)
    return found


def _edges(
    constraints: Constraints, last: int, weights_only: bool = False
) -> tuple[Ints, Ints, Ints]:
    """Both ends of all edges that nodes up to `last` have shown, and the node of each."""
    edges = [
        e for e in constraints.edges if e.node <= last and (e.weights_only or not weights_only)
    ]
    none = [np.zeros(0, np.int64)]
    a, b = (np.concatenate([getattr(e, end) for e in edges] or none) for end in "ab")
    return a, b, np.repeat([e.node for e in edges], [len(e.a) for e in edges])


def occurrences(
    constraints: Constraints, last: int, axis: Ints, colour: Hashes, component: Ints
) -> tuple[Ints, Hashes, Hashes]:
    """The order of the labels of a feature on one axis, and what is to be alike in it.

    Labels are told apart by colour, and by the colours of those they are tied with. Where that is
    not enough, they are tied in a way of their own (a cycle, for y * y.roll(1)): they are numbered
    by walking along the edges, and the numbered edges are part of what features must have in
    common.

    Args:
        axis, colour: (labels,) of every label, see `group.Known`.

    Returns (labels,) int64, (labels,) hashes that name labels within their feature, and a hash for
    every component.
    """
    shape = np.zeros(int(component.max()) + 1, np.uint64)
    several = _repeated(component, axis)
    a, b, node = _edges(constraints, last)
    tied = np.flatnonzero(several[component[a]])
    tied = tied[np.argsort(component[a[tied]], kind="stable")]
    a, b, node = a[tied], b[tied], node[tied]
    # the colours of a feature need not say which of its labels are tied with which
    met, told = _refined(a, b, node, hash64((hash64(axis) ^ colour).view(np.int64)))
    colour = colour.copy()
    colour[met] = told
    np.add.at(shape, component[met], told)
    # axes in order, then blocks, which lie on none
    order = np.lexsort((colour, axis.view(np.uint64)))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    turn = rank.copy()
    name = hash64((hash64(axis) ^ colour).view(np.int64))
    unclear = _repeated(component, axis, colour.view(np.int64))[component[a]]
    a, b, node = a[unclear], b[unclear], node[unclear]
    if found := runs(component[a]):
        walks = [_walk(a[i:j], b[i:j], node[i:j], rank, colour) for _, i, j in found]
        shape[[c for c, _, _ in found]] += hash64([form for _, form in walks])
        met = np.concatenate([labels for labels, _ in walks])
        turn[met] = np.concatenate([np.arange(len(labels)) for labels, _ in walks])
        name[met] = hash64(name[met].view(np.int64) ^ (1 + turn[met]))
    return turn, name, shape


def runs(values: Ints) -> list[tuple[int, int, int]]:
    """(value, start, stop) of every run of equal values."""
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values)) + 1
    starts = [0, *cuts.tolist()]
    return list(zip(values[starts].tolist(), starts, [*starts[1:], len(values)], strict=True))


def _repeated(component: Ints, *keys: Ints) -> Flags:
    """Of every component, whether two of its labels are alike in all keys."""
    table = np.stack((component, *keys))
    table = table[:, np.lexsort(table[::-1])]
    found = np.zeros(int(component.max()) + 1, bool)
    found[table[0, 1:][(np.diff(table, axis=1) == 0).all(0)]] = True
    return found


def _refined(a: Ints, b: Ints, node: Ints, colour: Hashes) -> tuple[Ints, Hashes]:
    """Labels with edges, and their colours once they know whom they are tied with."""
    met, where = np.unique(np.concatenate([a, b]), return_inverse=True)
    a, b = where[: len(a)], where[len(a) :]
    there, back = hash64(2 * node), hash64(2 * node + 1)
    told, count = colour[met], 0
    while (now := len(np.unique(told))) > count:
        count = now
        seen = np.zeros(len(met), np.uint64)
        np.add.at(seen, a, hash64((told[b] ^ there).view(np.int64)))
        np.add.at(seen, b, hash64((told[a] ^ back).view(np.int64)))
        told = hash64((told + hash64(seen.view(np.int64))).view(np.int64))
    return met, told


def _walk(a: Ints, b: Ints, node: Ints, rank: Ints, colour: Hashes) -> tuple[list[int], int]:
    """The labels of one feature, as they are met along its edges; a hash of the numbered edges."""
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for x, y, n, of_x, of_y in np.stack([a, b, node, rank[a], rank[b]], 1).tolist():
        steps.setdefault(x, []).append((2 * n, of_y, y))
        steps.setdefault(y, []).append((2 * n + 1, of_x, x))
    seen = {min(steps, key=rank.__getitem__): 0}
    queue = list(seen)
    for x in queue:
        for _, _, y in sorted(steps[x]):
            if y not in seen:
                seen[y] = len(seen)
                queue.append(y)
    numbered = sorted((seen[x], way, seen[y]) for x in steps for way, _, y in steps[x])
    return queue, hash((*numbered, *colour[queue].tolist()))


def in_parts(turn: Ints, kind: Ints, part: Hashes) -> Ints:
    """The order of labels once features and blocks that go one to one are joined.

    A feature that `y.flip(1) + y` ties with its mirror image has two labels, and each of the two a
    mean over positions: what they were joined from tells the means apart, and its order has to be
    the same for all features of a class.
    """
    joined = np.flatnonzero(part)
    where = hash64((part[joined] ^ hash64(kind[joined])).view(np.int64))
    _, first, group = np.unique(where, return_index=True, return_inverse=True)
    found = turn.copy()
    found[joined[np.lexsort((turn[joined], first[group]))]] = np.arange(len(joined))
    return found
