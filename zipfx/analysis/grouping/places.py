"""Places: the nodes of the graph at which the features of a space can be observed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from zipfx.analysis.grouping.grouping import Grouping
from zipfx.analysis.labels.facts import Facts, Heard
from zipfx.analysis.labels.labels import Kind, overlapping
from zipfx.analysis.spaces.values import Place
from zipfx.hashing import Ints


def find_places(graph: fx.Graph, facts: Facts, grouping: Grouping) -> dict[int, list[Place]]:
    """The nodes whose results carry each space."""
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    facts = facts.until(grouping.last)
    after = {i: nodes[j].name for j, i, _ in facts.rewritten if j <= grouping.last}
    # node -> spaces that some weight, or some head, reads from its result
    readers: dict[int, set[int]] = {i: set(range(len(grouping.sizes))) for i in grouping.crossing}
    for c in facts.constraints.contractions:
        if 0 <= c.node <= grouping.last:
            met = {s for x in c.x for s in grouping.spaces(x)}
            for source in nodes[c.node].all_input_nodes:
                readers.setdefault(at[source], set()).update(met)
    places: dict[int, dict[int, Place]] = {}
    for i, (node, fact) in enumerate(zip(nodes, facts.nodes, strict=True)):
        if i > grouping.last or not fact.is_tensor or node.op in ("output", "get_attr"):
            continue
        groups = overlapping(fact.values[0].features)
        moved = [(dims, _moved(grouping, slots)) for dims, slots in groups]
        moving = {d for dims, spaces in moved if spaces for d in dims}
        whole = {s for _, slots in groups for s, _ in grouping.tables(*slots)}
        partly = any(spaces - whole for _, spaces in moved)
        for dims, slots in groups:
            blurred = tuple(sorted(moving - set(dims)))
            own = {s for labels in slots for s in grouping.space[grouping.vertex[labels]].tolist()}
            for s, index in grouping.tables(*slots):
                place = Place(
                    node.name, dims, index, s in readers.get(i, ()), blurred, own=s in own,
                    mixed=partly or (index.shape[1] > 1 and grouping.mixes(s, *slots)),
                    sizes=tuple(fact.values[0].shape[d] for d in dims), after=after.get(i),
                    chosen=fact.chosen,
                )  # fmt: skip
                mine = places.setdefault(s, {})
                mine[i] = _joined(place, mine[i]) if i in mine else place
    for s, found in places.items():  # features of data are observed in data
        data = {i: place for i, place in found.items() if facts.nodes[i].kind == Kind.DATA}
        places[s] = data or found
    makers = {c.node for c in facts.constraints.contractions}
    weighted = makers | {i for i, fact in enumerate(facts.nodes) if "elementwise" in fact.traits}
    for found in places.values():
        reads = [i for i, place in found.items() if place.read and not place.blurred]
        if reads:
            sources = {_source(nodes, at, facts, found, weighted, reads[-1])}
        else:  # queries and keys, which meet one another
            sources = makers & set(found)
        for i in sources:
            found[i] = replace(found[i], source=True)
    ordinary = {s: list(found.values()) for s, found in places.items()}
    return {**_inner_places(nodes, facts, grouping), **ordinary}


def _joined(new: Place, old: Place) -> Place:
    """Two tables of a space in one value, such as its features as rows and as columns."""
    one, other = (new, old) if new.own else (old, new)
    return replace(one, also=(*one.also, (other.dims, other.index), *other.also))


def _moved(grouping: Grouping, slots: Sequence[Ints]) -> set[int]:
    """The spaces with features here, all of them or some."""
    return {s for labels in slots for s in grouping.spaces(labels)}


def _inner_places(nodes: list[fx.Node], facts: Facts, grouping: Grouping) -> dict[int, list[Place]]:
    """Where weights inside a node read or make the features.

    An address that is reached several times (a loop over time) must carry them at the same place
    each time; what a hidden-to-hidden weight reads does not, as it starts with a constant.
    """
    places: dict[int, list[Place]] = {}
    for node, fact in zip(nodes[: grouping.last + 1], facts.nodes):
        for address in dict.fromkeys(heard.address for heard in fact.inner):
            heard = [h for h in fact.inner if h.address == address]
            blurred = [_blurred(grouping, h) for h in heard]
            ways = {(h.axis, dims, h.data) for h, dims in zip(heard, blurred, strict=True)}
            if len(ways) > 1 or not heard[0].data:
                continue
            tables = [dict(grouping.tables(h.labels)) for h in heard]
            own = set(grouping.space[grouping.vertex[heard[0].labels]].tolist())
            for s, index in tables[0].items():
                if all(s in t and torch.equal(t[s], index) for t in tables):
                    made, axis = address[1], (heard[0].axis,)
                    mixed = index.shape[1] > 1 and grouping.mixes(s, heard[0].labels)
                    place = Place(
                        node.name, axis, index, not made, blurred[0], made, s in own, mixed,
                        inner=address, chosen=any(h.chosen for h in heard),
                    )  # fmt: skip
                    places.setdefault(s, []).append(place)
    return places


def _blurred(grouping: Grouping, heard: Heard) -> tuple[int, ...]:
    """The other dimensions along which features lie that may be moved."""
    moving = [dims for dims, labels in heard.others if grouping.spaces(labels)]
    return tuple(sorted({d for dims in moving for d in dims}))


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
