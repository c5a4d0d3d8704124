"""Heads: what each model does after the cut, and where its own features are restored.

The trunk hands merged features to the head.  As long as only operations follow that treat each
feature alike (activations, poolings, movement), they stay merged; the first weight that reads them
takes the unmerge matrix U into its columns.  Where something else meets them first (a residual
add, a norm with its own parameters) they are restored by an explicit index_select.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from zipfx.errors import ZipError
from zipfx.fuse import AxisMap, axis_map
from zipfx.group import Grouping
from zipfx.interpret import Facts, describe
from zipfx.labels import Ints, Kind, support, vector
from zipfx.matrices import Matching


@dataclass(frozen=True)
class Unmerge:
    """Restore one model's features: select `index` (d,) along `dims`, flattened in this order."""

    dims: tuple[int, ...]
    index: Tensor


@dataclass
class HeadPlan:
    """How the head of one model starts.

    nodes: indices of its nodes, weights it shares with the trunk included; fused: parameter ->
    axis maps that hold U; restored: (source node, reader or None for the output) -> unmerges
    needed on that edge; cloned: trunk nodes whose values the head would overwrite.
    """

    nodes: list[int] = field(default_factory=list)
    fused: dict[str, list[AxisMap]] = field(default_factory=dict)
    restored: dict[int, list[Unmerge]] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    edges: set[tuple[int, int]] = field(default_factory=set)
    cloned: set[int] = field(default_factory=set)


def plan_head(
    module: fx.GraphModule,
    facts: Facts,
    grouping: Grouping,
    matchings: Mapping[int, Matching],
    k: int,
) -> HeadPlan:
    """Decide for model k where U goes; matchings: by space index of the grouping."""
    return _Planner(module, facts, grouping, matchings, k).plan()


class _Planner:
    def __init__(
        self,
        module: fx.GraphModule,
        facts: Facts,
        grouping: Grouping,
        matchings: Mapping[int, Matching],
        k: int,
    ) -> None:
        self.module, self.facts, self.grouping = module, facts, grouping
        self.matchings, self.k = matchings, k
        self.nodes = list(module.graph.nodes)
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.last = grouping.last
        self.moves = {
            s for s, m in matchings.items() if not torch.equal(m.of(k), torch.arange(len(m.of(k))))
        }

    def plan(self) -> HeadPlan:
        refused: set[str] = set()
        while True:  # a weight that can not take U at every use takes it at none
            plan, conflicts = self._attempt(refused)
            if not conflicts:
                return plan
            refused |= conflicts

    def _attempt(self, refused: set[str]) -> tuple[HeadPlan, set[str]]:
        plan = HeadPlan(nodes=self._head_nodes())
        used: dict[str, set[bool]] = {}
        for i in plan.nodes:
            if i <= self.last:
                continue
            node = self.nodes[i]
            sources = [self.at[n] for n in node.all_input_nodes]
            merged = [j for j in sources if self._is_merged(j, plan)]
            maps = self._absorb(i, merged, plan, refused)
            for name in self._parameters(i):
                used.setdefault(name, set()).add(maps is not None and name in maps)
            if merged and maps is None:
                for j in merged:
                    self._restore(j, i, plan)
            elif merged and maps is not None:
                plan.fused.update(maps)
                if self._carries(i):
                    plan.merged.add(i)
            self._protect(i, sources, plan)
        return plan, {name for name, ways in used.items() if len(ways) > 1}

    def _head_nodes(self) -> list[int]:
        """All nodes after the cut, and the weights and constants from before it that they use."""
        nodes = set(range(self.last + 1, len(self.nodes)))
        stack = list(nodes)
        while stack:
            for source in self.nodes[stack.pop()].all_input_nodes:
                j = self.at[source]
                if j not in nodes and self.facts.nodes[j].kind in (Kind.WEIGHT, Kind.CONSTANT):
                    nodes.add(j)
                    stack.append(j)
        return sorted(nodes)

    def _moved(self, labels: Ints) -> set[int]:
        """The spaces of these labels that the merge has put in another order."""
        return self.grouping.spaces(labels) & self.moves

    def _carries(self, i: int) -> bool:
        return any(
            self._moved(slot.reshape(-1).numpy())
            for value in self.facts.nodes[i].values
            for slot in value.features
        )

    def _whole(self, i: int) -> bool:
        """Whether the results of node i hold moved spaces whole, so that U can come after it."""
        for value in self.facts.nodes[i].values:
            for slot in value.features:
                labels = vector(slot, *sorted(support(slot))).numpy()
                tables = {s for s, _ in self.grouping.tables(labels)}
                if not self._moved(labels) <= tables:
                    return False
        return True

    def _is_merged(self, j: int, plan: HeadPlan) -> bool:
        if j in plan.merged:
            return True
        crossing = j <= self.last and j not in plan.nodes
        return crossing and self.facts.nodes[j].kind == Kind.DATA and self._carries(j)

    def _parameters(self, i: int) -> list[str]:
        node = self.nodes[i]
        if node.op == "call_module":
            leaf = self.module.get_submodule(str(node.target))
            return [f"{node.target}.{name}" for name, _ in leaf.named_parameters()]
        return [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]

    def _absorb(
        self, i: int, merged: list[int], plan: HeadPlan, refused: set[str]
    ) -> dict[str, list[AxisMap]] | None:
        """Axis maps that let node i work on merged features; None where it can not."""
        node, fact = self.nodes[i], self.facts.nodes[i]
        if not merged or node.op == "output" or fact.traits & {"elementwise", "mixes"}:
            return None
        ledger = self.facts.ledger
        if any(e.node == i and e.weights_only for e in ledger.edges):
            return None
        for source in node.all_input_nodes:
            j = self.at[source]
            other = self.facts.nodes[j]
            if (
                j not in merged
                and other.kind == Kind.DATA
                and any(v.features for v in other.values)
            ):
                return None
            if other.kind == Kind.WEIGHT and source.op != "get_attr":
                return None
        maps: dict[str, list[AxisMap]] = {}
        for c in ledger.contractions:
            if c.node == i and self._moved(c.x):
                found = self._columns(c.w, c.x)
                if found is None or found[0] in refused:
                    return None
                maps.setdefault(found[0], []).append(found[1])
        return maps if self._whole(i) else None

    def _columns(
        self,
        w: Ints,
        x: Ints,
    ) -> tuple[str, AxisMap] | None:
        """The unmerge of the axis with labels w, which reads the features x."""
        for name, dim, start, size in self.facts.ledger.axes:
            if start <= w[0] < start + size:
                if len(w) != size or (w != np.arange(start, start + size)).any():
                    return None
                return name, self._unmerge_map(x, size, dim)
        return None

    def _unmerge_map(self, labels: Ints, size: int, dim: int) -> AxisMap:
        merges = [
            (index, self.matchings[s].of(self.k), None) for s, index in self.grouping.tables(labels)
        ]
        return axis_map(size, dim, merges)

    def _restore(self, j: int, i: int, plan: HeadPlan) -> None:
        fact = self.facts.nodes[j]
        if not fact.is_tensor:
            raise ZipError(
                f"{describe(self.nodes[j])} hands several tensors with merged features to "
                f"{describe(self.nodes[i])} across the cut; choose another module for partial="
            )
        unmerges = []
        for slot in fact.values[0].features:
            dims = tuple(sorted(support(slot)))
            labels = vector(slot, *dims).numpy()
            if self._moved(labels):
                target = self._unmerge_map(labels, len(labels), 0).target
                unmerges.append(Unmerge(dims, target))
        plan.restored[j] = unmerges
        plan.edges.add((j, i))

    def _protect(self, i: int, sources: list[int], plan: HeadPlan) -> None:
        """Values of the trunk are shared by all heads: an in-place head works on a copy."""
        overwritten = {o for o in self.facts.nodes[i].writes if o <= self.last}
        for j in range(self.last + 1):
            if overwritten & self.facts.nodes[j].owners and j not in plan.nodes:
                plan.cloned.add(j)
