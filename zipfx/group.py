"""Group labels into feature spaces: features are exchangeable when they occur in the same axes in
the same way.

Unions of labels are edges, components come from scipy; each component is one feature.  Its
signature hashes the axes it lies on and every coordinate (colour) it has met; equal signatures
make a space.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx

from zipfx.interpret import Facts
from zipfx.labels import Hashes, Ints, Kind, Ledger, mix, support, vector
from zipfx.spaces import Axis, Pinned, Place, Role, Space, SpaceMap

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Labels:
    """What is known of every label: its axis, its component, its colour and its roles."""

    axis: Ints
    component: Ints
    colour: Hashes
    consumed: Ints
    produced: Ints


def components(ledger: Ledger, last: int, *, weights_only: bool = False) -> Ints:
    """Which feature each label belongs to, by what nodes up to `last` have shown."""
    edges = [e for e in ledger.edges if e.node <= last and (e.weights_only or not weights_only)]
    a = np.concatenate([e.a for e in edges] or [np.zeros(0, np.int64)])
    b = np.concatenate([e.b for e in edges] or [np.zeros(0, np.int64)])
    graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(ledger.size, ledger.size))
    found: Ints = connected_components(graph, directed=False)[1].astype(np.int64)
    return found


def _marked(ledger: Ledger, groups: Ints, labels: list[Ints]) -> Ints:
    mark = np.zeros(ledger.size, np.int64)
    for ids in labels:
        mark[ids] = 1
    mark[0] = 0
    hit = np.zeros(groups.max() + 1, np.int64)
    np.maximum.at(hit, groups, mark)
    hit[groups[0]] = 0
    return hit[groups]


def _learn(ledger: Ledger, last: int) -> _Labels:
    axis = np.full(ledger.size, -1, np.int64)
    for i, (_, _, start, size) in enumerate(ledger.axes):
        axis[start : start + size] = i
    colour = np.zeros(ledger.size, np.uint64)
    for c in ledger.colours:
        if c.node <= last:
            np.add.at(colour, c.a, c.value)
    weights = components(ledger, last, weights_only=True)
    consumed = [c.w for c in ledger.contractions if c.node <= last]
    produced = [ids for ids, node in ledger.produced if node <= last]
    return _Labels(
        axis,
        components(ledger, last),
        colour,
        _marked(ledger, weights, consumed),
        _marked(ledger, weights, produced),
    )


@dataclass(frozen=True)
class Grouping:
    """What the nodes up to `last` know: the component (feature) of every label, the space of every
    component (-1: pinned or not a feature), which feature of its space it is, and the nodes whose
    values leave for the heads."""

    last: int
    component: Ints
    space: Ints
    member: Ints
    sizes: tuple[int, ...]
    crossing: tuple[int, ...] = ()

    def tables(self, labels: Ints) -> list[tuple[int, Tensor]]:
        """For every space wholly present on an axis with these labels: (space, index table).

        labels: (n,) label per index of the axis, 0 for none. The table is (size, occurrences).
        """
        where = np.flatnonzero((labels > 0) & (self.space[self.component[labels]] >= 0))
        comp = self.component[labels[where]]
        order = np.lexsort((where, self.member[comp], self.space[comp]))
        where, comp = where[order], comp[order]
        found = []
        for s in np.unique(self.space[comp]).tolist():
            mine = self.space[comp] == s
            size, count = self.sizes[s], int(mine.sum())
            regular = np.repeat(np.arange(size), max(1, count // size))
            if len(regular) == count and (self.member[comp[mine]] == regular).all():
                found.append((s, torch.from_numpy(where[mine]).reshape(size, -1)))
        return found

    def spaces(self, labels: Ints) -> set[int]:
        """The spaces that any of these labels belongs to."""
        return set(self.space[self.component[labels[labels > 0]]].tolist()) - {-1}


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
    ledger = facts.ledger
    last = len(facts.nodes) - 1 if last is None else last
    facts = facts.until(last)
    known = _learn(ledger, last)
    for i in crossing:
        for slot in (slot for value in facts.nodes[i].values for slot in value.features):
            ids = torch.unique(slot).numpy()
            known.colour[ids] += mix(mix(-1 - i).view(np.int64))
    n = int(known.component.max()) + 1
    lies_on, has_met = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    np.add.at(lies_on, known.component[1:], mix(known.axis[1:]))
    np.add.at(has_met, known.component, known.colour)
    signature = mix(lies_on.view(np.int64)) + has_met
    free = _alive(ledger, known, last)
    free[known.component[sorted(held)]] = False
    _, kind, count = np.unique(signature[free], return_inverse=True, return_counts=True)
    several = count[kind] > 1
    members, kind = np.flatnonzero(free)[several], kind[several]
    # components are numbered by their first label: spaces and their members keep that order
    _, first, kind = np.unique(kind, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[kind] if len(first) else kind
    space, member = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    space[members] = rank
    order = np.argsort(rank, kind="stable")
    sizes = np.bincount(rank) if len(rank) else np.zeros(0, np.int64)
    member[members[order]] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Grouping(last, known.component, space, member, tuple(sizes.tolist()), tuple(crossing))


def _alive(ledger: Ledger, known: _Labels, last: int) -> Flags:
    alive = np.zeros(int(known.component.max()) + 1, bool)
    for ids, node in ledger.alive:
        if node <= last:
            alive[known.component[ids[ids > 0]]] = True
    alive[known.component[0]] = False
    return alive


def find_spaces(
    graph: fx.Graph, facts: Facts, grouping: Grouping, held: Mapping[int, str] | None = None
) -> SpaceMap:
    """The spaces of a grouping as values: their axes, their places in the graph, what is pinned.

    held: labels that were pinned from outside, and why.
    """
    ledger, last = facts.ledger, grouping.last
    known = _learn(ledger, last)
    places = _places(graph, facts, grouping)
    spaces = [
        replace(s, places=tuple(places.get(i, ())))
        for i, s in enumerate(_spaces(ledger, known, grouping))
    ]
    seen = _alive(ledger, known, last)
    for c in ledger.contractions:
        if c.node <= last:
            seen[known.component[c.w[c.w > 0]]] = True
    stay = seen & (grouping.space < 0)
    variances = frozenset(name for name, node in ledger.variances if node <= last)
    pinned = (*_pinned(ledger, known, stay, last, held or {}), *_ordered(ledger, known, last, stay))
    return SpaceMap(_named(spaces), pinned, facts.notes, variances)


def _spaces(ledger: Ledger, known: _Labels, grouping: Grouping) -> list[Space]:
    space_of, member, sizes = grouping.space, grouping.member, grouping.sizes
    labels = np.flatnonzero(space_of[known.component] >= 0)
    labels = labels[labels > 0]
    comp = known.component[labels]
    # occurrences of a feature on one axis are aligned by what they met, then by order
    order = np.lexsort(
        (labels, known.colour[labels], member[comp], known.axis[labels], space_of[comp])
    )
    labels, comp = labels[order], comp[order]
    space, axis = space_of[comp], known.axis[labels]
    cuts = np.flatnonzero((np.diff(space) != 0) | (np.diff(axis) != 0)) + 1
    found: dict[int, list[Axis]] = {}
    tied: set[int] = set()
    for run in np.split(np.arange(len(labels)), cuts):
        if not len(run):
            continue
        s = int(space[run[0]])
        name, dim, start, _ = ledger.axes[axis[run[0]]]
        consumed, produced = known.consumed[labels[run]], known.produced[labels[run]]
        if (consumed & produced).any():
            tied.add(s)
        role = (
            Role.PRODUCES
            if produced.all()
            else (Role.CONSUMES if consumed.all() else Role.ELEMENTWISE)
        )
        index = torch.from_numpy(labels[run] - start).reshape(sizes[s], -1)
        found.setdefault(s, []).append(Axis(name, dim, role, index))
    return [Space("", sizes[s], tuple(found[s]), tied=s in tied) for s in sorted(found)]


def _named(spaces: list[Space]) -> tuple[Space, ...]:
    named: dict[str, Space] = {}
    for space in spaces:
        makers = [a for a in space.axes if a.role == Role.PRODUCES] or list(space.axes)
        base = makers[0].parameter.removesuffix(".weight")
        name = next(
            n
            for i in range(len(spaces) + 1)
            if (n := base if i == 0 else f"{base}#{i + 1}") not in named
        )
        named[name] = replace(space, name=name)
    return tuple(named.values())


def _places(graph: fx.Graph, facts: Facts, grouping: Grouping) -> dict[int, list[Place]]:
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    facts = facts.until(grouping.last)
    after = {i: nodes[j].name for j, i, _ in facts.rewritten if j <= grouping.last}
    # node -> spaces that some weight, or some head, reads from its result
    readers: dict[int, set[int]] = {i: set(range(len(grouping.sizes))) for i in grouping.crossing}
    for c in facts.ledger.contractions:
        if 0 <= c.node <= grouping.last:
            met = set(grouping.space[grouping.component[c.x[c.x > 0]]].tolist())
            for source in nodes[c.node].all_input_nodes:
                readers.setdefault(at[source], set()).update(met)
    places: dict[int, dict[int, Place]] = {}
    for i, (node, fact) in enumerate(zip(nodes, facts.nodes, strict=True)):
        if i > grouping.last or not fact.is_tensor or fact.kind != Kind.DATA or node.op == "output":
            continue
        slots = fact.values[0].features
        for slot in slots:
            dims = tuple(sorted(support(slot)))
            others = {d for other in slots if other is not slot for d in support(other)}
            blurred = tuple(sorted(others - set(dims)))
            for s, index in grouping.tables(vector(slot, *dims).numpy()):
                read = s in readers.get(i, ())
                place = Place(node.name, dims, index, read, blurred, after=after.get(i))
                places.setdefault(s, {})[i] = place
    weighted = {c.node for c in facts.ledger.contractions}
    weighted |= {i for i, fact in enumerate(facts.nodes) if "elementwise" in fact.traits}
    for found in places.values():
        reads = [i for i, place in found.items() if place.read and not place.blurred]
        if reads:
            source = _source(nodes, at, facts, found, weighted, reads[-1])
            found[source] = replace(found[source], source=True)
    return {s: list(found.values()) for s, found in places.items()}


def _source(
    nodes: list[fx.Node],
    at: dict[fx.Node, int],
    facts: Facts,
    carries: Mapping[int, Place],
    weighted: set[int],
    read: int,
) -> int:
    """Walk back from a place where a space is read, past activations and poolings, to the node
    that made the values: one with weights, or a sum of several that carry the space."""
    i = read
    while i not in weighted:
        inputs = [at[n] for n in nodes[i].all_input_nodes if at[n] in carries]
        sizes = [math.prod(facts.nodes[j].values[0].shape) for j in inputs]
        if not inputs or (len(inputs) > 1 and (i != read or len(set(sizes)) == 1)):
            break
        i = inputs[sizes.index(max(sizes))]  # of a gated value: not the gate
    return i


def _pinned(
    ledger: Ledger, known: _Labels, stay: Flags, last: int, held: Mapping[int, str]
) -> list[Pinned]:
    why = {int(known.component[label]): reason for label, reason in held.items()}
    for c in ledger.colours:
        if c.reason and c.node <= last:
            for comp in np.unique(known.component[c.a]).tolist():
                why.setdefault(comp, c.reason)
    counts: dict[tuple[str, int, str], int] = {}
    for label in np.flatnonzero(stay[known.component]).tolist():
        if known.axis[label] >= 0:
            name, dim, _, _ = ledger.axes[known.axis[label]]
            reason = why.get(int(known.component[label]), _UNLIKE)
            counts[name, dim, reason] = counts.get((name, dim, reason), 0) + 1
    return [Pinned(name, dim, n, reason) for (name, dim, reason), n in counts.items()]


_UNLIKE = "unlike any other: it meets fixed coordinates (input channels, positions, constants)"


def _ordered(ledger: Ledger, known: _Labels, last: int, stay: Flags) -> list[Pinned]:
    """Axes whose features move, but only as whole blocks."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for ids, node, reason in ledger.blocks:
        if node <= last:
            for label in ids[ids > 0].tolist():
                if not stay[known.component[label]] and known.axis[label] >= 0:
                    name, dim, _, _ = ledger.axes[known.axis[label]]
                    found.setdefault((name, dim, reason), set()).add(label)
    return [Pinned(name, dim, len(ids), reason) for (name, dim, reason), ids in found.items()]
