"""Facts: what one interpretation says of every node of a graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.inside import Address
from zipfx.analysis.labels.labels import Kind, Labels, overlapping, support, vector
from zipfx.hashing import Ints


@dataclass(frozen=True)
class Heard:
    """What was met at an address inside a node: the labels along `axis` (counted from the end).

    others: labels that lie along other dimensions, and these; data: whether it depends on the
    input; chosen: whether its rows are others in every model.
    """

    address: Address
    axis: int
    labels: Ints
    others: tuple[tuple[tuple[int, ...], Ints], ...]
    data: bool
    chosen: bool = False

    @staticmethod
    def of(address: Address, labels: Labels, axis: int, chosen: bool) -> Heard:
        """Of the labels of what was met; none are known where the axis has several slots."""
        ndim = len(labels.shape)
        along = [s for s in labels.features if support(s) == {axis % max(1, ndim)}]
        ids = vector(along[0], axis).numpy() if len(along) == 1 else np.zeros(0, np.int64)
        others = [
            (tuple(d - ndim for d in dims if d - ndim != axis), ids)
            for dims, slots in overlapping(labels.features)
            for ids in slots
        ]
        others = [(dims, ids) for dims, ids in others if dims]
        data = labels.kind == Kind.DATA
        return Heard(address, axis, ids, tuple(others), data, chosen)


@dataclass(frozen=True)
class NodeFacts:
    """What one graph node computed.

    values: features of the tensors in its result, in pytree order; kind: the largest of theirs
    (None where there is no tensor); owners: the nodes that made their storages; writes: the nodes
    whose storages this one changed in place; traits: see `Constraints.trait`; inner: what weights
    read and make inside it; chosen: whether its rows are others in every model (see `rows`).
    """

    values: tuple[Labels, ...]
    kind: Kind | None
    is_tensor: bool
    owners: frozenset[int]
    writes: frozenset[int]
    traits: frozenset[str]
    inner: tuple[Heard, ...] = ()
    chosen: bool = False


@dataclass(frozen=True)
class Facts:
    """The outcome of one interpretation; node i of the graph has `nodes[i]`.

    state: names of the parameters and buffers; their storages have the owners -1, -2, ...
    rewritten: (j, i, facts) where node j wrote in place to what node i had computed, and node i is
    read again: what it says from then on; empty: where data chooses rows, and has chosen none, so
    that what follows was not seen at work.
    """

    constraints: Constraints
    nodes: tuple[NodeFacts, ...]
    notes: tuple[str, ...]
    state: tuple[str, ...] = ()
    rewritten: tuple[tuple[int, int, NodeFacts], ...] = ()
    empty: tuple[str, ...] = ()

    def until(self, last: int) -> Facts:
        """The same facts, the values being as node `last` leaves them."""
        nodes = list(self.nodes)
        for j, i, fact in self.rewritten:
            if j <= last:
                nodes[i] = fact
        return replace(self, nodes=tuple(nodes))

    def written(self, last: int) -> set[str]:
        """Parameters and buffers that the nodes up to index `last` write to."""
        owners = {o for fact in self.nodes[: last + 1] for o in fact.writes if o < 0}
        return {self.state[-1 - o] for o in owners}
