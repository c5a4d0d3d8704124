"""Graph: the nodes of the trunk and of the heads, copied into the graph of a merge."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from zipfx.analysis import Facts, Kind, NodeFacts, mix, select
from zipfx.merge.heads import HeadPlan
from zipfx.merge.module import HEADS
from zipfx.merge.origin import mark
from zipfx.model.calls.expect import Expectation
from zipfx.model.graph_module import NAMED, plain
from zipfx.model.tensors import clone_tensors

_MADE = (Kind.WEIGHT, Kind.CONSTANT)


def needed_nodes(nodes: Sequence[fx.Node], facts: Facts) -> list[fx.Node]:
    """The trunk without weights and constants that were made before the cut, but only for what
    comes after it; of those that are needed, what writes to them in place is needed, too.

    nodes: those up to the cut.
    """
    found = facts.until(len(nodes) - 1).nodes[: len(nodes)]
    at = {node: i for i, node in enumerate(nodes)}
    writers: dict[int, list[int]] = {}
    for i, fact in enumerate(found):
        for owner in fact.writes:
            writers.setdefault(owner, []).append(i)

    stack = [i for i in range(len(nodes)) if not _only_makes(i, found)]
    needed = set(stack)
    while stack:
        for source in nodes[stack.pop()].all_input_nodes:
            j = at[source]
            new = {j, *(w for owner in found[j].owners for w in writers.get(owner, ()))}
            stack += new - needed
            needed |= new
    return [node for i, node in enumerate(nodes) if i in needed]


def _only_makes(i: int, facts: Sequence[NodeFacts]) -> bool:
    """Whether node i does nothing but make weights and constants."""
    kinds = [facts[o].kind if o >= 0 else Kind.DATA for o in facts[i].writes]
    return all(kind in _MADE for kind in kinds or [facts[i].kind])


def copy_trunk(
    graph: fx.Graph, nodes: Sequence[fx.Node], expects: Sequence[Expectation] = ()
) -> dict[fx.Node, fx.Node]:
    """Copy nodes with their names and targets; checks of what is expected of the inputs come behind
    these."""
    seen: dict[fx.Node, fx.Node] = {}
    left = list(expects)
    for node in nodes:
        if node.op != "placeholder":
            inputs = {str(n.target): copied for n, copied in seen.items() if n.op == "placeholder"}
            for e in left:
                graph.call_function(e.check, e.arguments(inputs))
            left = []
        seen[node] = graph.node_copy(node, seen.__getitem__)
        mark(seen[node], head=None, source=node.name)
    return seen


def copy_head(
    graph: fx.Graph,
    root: nn.Module,
    nodes: Sequence[fx.Node],
    trunk: Mapping[int, fx.Node],
    plan: HeadPlan,
    k: int,
) -> Any:
    """Copy the head of model k behind the trunk; return its output value.

    nodes: all nodes of model k; trunk: the copies of those up to the cut, by index.
    """
    at = {n: i for i, n in enumerate(nodes)}
    home = root.get_submodule(f"{HEADS}.{k}")
    made: dict[int, fx.Node] = {}
    restored: dict[int, fx.Node] = {}
    own = set(plan.nodes)

    def add(kind: str, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        node = graph.create_node(kind, target, args, {}, name=name)
        mark(node, head=k)
        return node

    def value(j: int) -> fx.Node:
        if j in own or j in made:
            return made[j]
        if j in plan.cloned:
            how = torch.clone if plan.cloned[j] else clone_tensors
            made[j] = add("call_function", how, (trunk[j],), f"copy{k}_{nodes[j].name}")
            return made[j]
        return trunk[j]

    def source(j: int, i: int) -> fx.Node:
        j = plan.same.get(j, j)
        if (j, i) not in plan.edges or not plan.restored[j]:
            return value(j)
        if j not in restored:
            node = value(j)
            for unmerge in plan.restored[j]:
                name = next(n for i in itertools.count() if not hasattr(home, n := f"unmerge_{i}"))
                home.register_buffer(name, unmerge.by)
                by = add("get_attr", f"{HEADS}.{k}.{name}", (), f"head{k}_{name}")
                one = len(unmerge.dims) == 1 and unmerge.by.ndim == 1
                how = torch.index_select if one else select if unmerge.by.ndim == 1 else mix
                args = (node, unmerge.dims[0] if one else unmerge.dims, by)
                node = add("call_function", how, args, f"head{k}_features")
            restored[j] = node
        return restored[j]

    result: Any = None
    for i in plan.nodes:
        node = nodes[i]
        if node.op == "output":
            result = fx.node.map_arg(node.args[0], lambda n: source(at[n], i))  # noqa: B023
            continue
        own_path = node.op in NAMED
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: source(at[n], i))  # noqa: B023
        made[i] = graph.create_node(
            node.op,
            f"{HEADS}.{k}.{plain(str(node.target))}" if own_path else node.target,
            args,
            kwargs,
            name=f"head{k}_{node.name.lstrip('_')}",
            type_expr=node.type,
        )
        made[i].meta = dict(node.meta)
        mark(made[i], head=k, source=node.name)
    return result
