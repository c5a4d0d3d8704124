"""Order: layers are fitted once all that they read is final.

In the order of the graph, as long as every layer is applied once. A layer that is applied several
times is fitted to all of them together, so it waits for what comes before the last, and what it
feeds waits for it. Batches can not be brought past a layer that is yet to be fitted: where one lies
in the way, a step runs them from their inputs, and apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx
from torch import fx


def in_order(
    groups: Sequence[Sequence[fx.Node]], at: Mapping[fx.Node, int]
) -> list[tuple[int, bool]]:
    """The groups by the time at which they are fitted, and whether each runs apart.

    Args:
        groups: of each layer, the nodes that apply it.
        at: numbers of all nodes of the graph, in its order.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> one, two = (graph.call_module("shared", (x,)) for _ in range(2))
    >>> own = graph.call_module("own", (one,))
    >>> last = graph.call_module("last", (own,)), graph.call_module("last", (two,))
    >>> at = {node: i for i, node in enumerate(graph.nodes)}
    >>> in_order([[one, two], last, [own]], at)
    [(0, True), (2, False), (1, True)]
    """
    first = [min(map(at.__getitem__, nodes)) for nodes in groups]
    order = sorted(range(len(groups)), key=first.__getitem__)
    if any(len(nodes) > 1 for nodes in groups):
        graph = networkx.condensation(_feeds(groups, at))
        members = {c: sorted(m, key=first.__getitem__) for c, m in graph.nodes(data="members")}
        parts = networkx.lexicographical_topological_sort(graph, lambda c: first[members[c][0]])
        order = [g for c in parts for g in members[c]]
    found, left = [], len(at)
    for g in reversed(order):  # left: where the first of the layers lies that come later
        last = max(map(at.__getitem__, groups[g]))
        found.append((g, len(groups[g]) > 1 or left < last))
        left = min(left, first[g])
    return found[::-1]


def _feeds(groups: Sequence[Sequence[fx.Node]], at: Mapping[fx.Node, int]) -> networkx.DiGraph:
    """An edge between two groups where a node of one reads what comes of the other."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    group = {node: g for g, nodes in enumerate(groups) for node in nodes}
    fed: dict[fx.Node, int] = {}  # bit g: whether something of group g comes here
    for node in sorted(at, key=at.__getitem__):
        bits = 0
        for other in node.all_input_nodes:
            bits |= fed.get(other, 0)
        if node in group:
            own = group[node]
            graph.add_edges_from((g, own) for g in range(len(groups)) if bits >> g & 1)
            bits |= 1 << own
        fed[node] = bits
    return graph
