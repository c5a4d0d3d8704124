"""Heads: what each model does after the cut, and where its own features are restored.

The trunk hands merged features to the head.  As long as only operations follow that treat each
feature alike (activations, poolings, movement), they stay merged; the first weight that reads them
takes the unmerge matrix U into its columns.  Where something else meets them first (a residual
add, a norm with its own parameters) they are restored by an explicit index_select.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from zipfx.analysis import Facts, Grouping, Kind, overlapping
from zipfx.errors import ZipError
from zipfx.match import AxisMap, Merge, Move
from zipfx.merge.absorb import APPLY, Absorber
from zipfx.merge.moved import Moved
from zipfx.trace.nodes import describe, tensors_at


@dataclass(frozen=True)
class Unmerge:
    """Restore one model's features along `dims`, flattened in this order.

    by: (d,) int64, the merged feature that each one is; or (d, d) float64, a matrix to multiply by.
    """

    dims: tuple[int, ...]
    by: Tensor


@dataclass
class HeadPlan:
    """How the head of one model starts.

    nodes: indices of its nodes, weights it shares with the trunk included; fused: id of a weight ->
    axis maps that hold U; restored: source node -> its unmerges, needed on the edges (source,
    reader); merged: nodes of the head that still work on merged features; cloned: trunk nodes whose
    values the head overwrites, and whether they are a tensor each; same: trunk nodes that are one
    tensor with another one; chosen: names of the nodes whose rows are others in every model.
    """

    nodes: list[int] = field(default_factory=list)
    fused: dict[int, list[Move]] = field(default_factory=dict)
    restored: dict[int, list[Unmerge]] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    edges: set[tuple[int, int]] = field(default_factory=set)
    cloned: dict[int, bool] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()


def plan_head(
    module: fx.GraphModule,
    facts: Facts,
    grouping: Grouping,
    matchings: Mapping[int, Merge],
    k: int,
) -> HeadPlan:
    """Decide for model k where U goes; matchings: by space index of the grouping."""
    return _HeadPlanner(module, facts, grouping, matchings, k).plan()


class _HeadPlanner:
    def __init__(
        self,
        module: fx.GraphModule,
        facts: Facts,
        grouping: Grouping,
        matchings: Mapping[int, Merge],
        k: int,
    ) -> None:
        self.module, self.last = module, grouping.last
        self.facts = facts.until(grouping.last)
        self.moved = Moved(grouping, matchings, k)
        self.absorber = Absorber(module, self.facts, self.moved)
        self.nodes, self.at = self.absorber.nodes, self.absorber.at

    def plan(self) -> HeadPlan:
        refused: set[int] = set()  # weights that can not take U at every use take it at none
        early: set[int] = set()  # values that are restored at once, for all their readers
        while True:
            plan, conflicts, late = self._attempt(refused, early)
            if conflicts <= refused and late <= early:
                return plan
            refused |= conflicts
            early |= late

    def _attempt(self, refused: set[int], early: set[int]) -> tuple[HeadPlan, set[int], set[int]]:
        facts = zip(self.nodes, self.facts.nodes, strict=True)
        plan = HeadPlan(chosen=frozenset(node.name for node, fact in facts if fact.chosen))
        overwritten = self._head_nodes(plan)
        plan.cloned = {j: self.facts.nodes[j].is_tensor for j in overwritten - early}
        used: dict[int, set[bool]] = {}
        for i in plan.nodes:
            fact = self.facts.nodes[i]
            if i <= self.last and fact.kind != Kind.DATA:
                continue
            sources = [plan.same.get(self.at[n], self.at[n]) for n in self.nodes[i].all_input_nodes]
            for j in early & set(sources):
                self._restore(j, i, plan)
            merged = [j for j in sources if self._is_merged(j, plan, early)]
            maps = self.absorber.maps(i, merged, refused)
            for t in self._parameters(i):
                used.setdefault(id(t), set()).add(maps is not None and id(t) in maps)
            if maps is None:
                for j in merged:
                    self._restore(j, i, plan)
            elif merged:
                plan.fused.update(maps)
                if self.absorber.passes_on(i)[0]:
                    plan.merged.add(i)
        # an in-place head changes what all readers of a storage see, so all must see one copy
        late = {
            o for j in plan.restored for o in overwritten
            if o in self.facts.nodes[j].owners and self.moved.lies_in(self.facts.nodes[o])
        }  # fmt: skip
        return plan, {key for key, ways in used.items() if len(ways) > 1}, late

    def _head_nodes(self, plan: HeadPlan) -> set[int]:
        """Set the nodes of the head: all after the cut, and from before it the weights and
        constants they use, and every alias of a value that the head overwrites.

        Returns the trunk nodes that own these values.
        """
        nodes = set(range(self.last + 1, len(self.nodes)))
        overwritten = {o for i in nodes for o in self.facts.nodes[i].writes if 0 <= o <= self.last}
        stack = list(nodes)
        while stack:
            for source in self.nodes[stack.pop()].all_input_nodes:
                j = self.at[source]
                fact = self.facts.nodes[j]
                if j in nodes or j in plan.same:
                    continue
                alias = fact.owners & overwritten - {j}
                if alias and fact.writes:
                    plan.same[j] = self._written_through(j, *alias)
                elif alias or fact.kind in (Kind.WEIGHT, Kind.CONSTANT):
                    writers = {w for w, i, _ in self.facts.rewritten if i == j and w <= self.last}
                    stack += {j, *writers} - nodes
                    nodes |= {j, *writers}
        plan.nodes = sorted(nodes)
        return overwritten

    def _written_through(self, j: int, owner: int) -> int:
        """The owner of a storage stands for the result of an in-place operation on all of it."""
        if self.facts.nodes[j].values[0].shape != self.facts.nodes[owner].values[0].shape:
            raise ZipError(
                f"{describe(self.nodes[j])} writes to a part of {describe(self.nodes[owner])}, "
                "which is overwritten again after the cut; choose another module for partial="
            )
        return owner

    def _is_merged(self, j: int, plan: HeadPlan, early: set[int]) -> bool:
        if j in plan.merged:
            return True
        crossing = j <= self.last and j not in plan.nodes and j not in early
        fact = self.facts.nodes[j]
        return crossing and fact.kind == Kind.DATA and self.moved.lies_in(fact)

    def _parameters(self, i: int) -> list[Tensor]:
        """The weights that node i uses; for those who apply a layer, to read one is not to use it
        (a function of the model's own may do anything with it)."""
        node = self.nodes[i]
        if node.op == "get_attr" and all(user.target in APPLY for user in node.users):
            return []
        nodes = [node, *(n for n in node.all_input_nodes if n.op == "get_attr")]
        return [t for n in nodes for t in tensors_at(self.module, n)]

    def _restore(self, j: int, i: int, plan: HeadPlan) -> None:
        fact = self.facts.nodes[j]
        if not fact.is_tensor:
            raise ZipError(
                f"{describe(self.nodes[j])} hands several tensors with merged features to "
                f"{describe(self.nodes[i])} across the cut; choose another module for partial="
            )
        unmerges = []
        for dims, slots in overlapping(fact.values[0].features):
            if any(self.moved.among(labels) for labels in slots):
                moves = self.moved.unmerge(slots, len(slots[0]), 1)
                unmerges.append(Unmerge(dims, _together(moves, len(slots[0]))))
        plan.restored[j] = unmerges
        plan.edges.add((j, i))


def _together(moves: Sequence[Move], size: int) -> Tensor:
    """Several maps of one axis as an index, or as a matrix where one of them is dense."""
    if len(moves) == 1 and isinstance(moves[0], AxisMap):
        return moves[0].target
    matrix = torch.eye(size, dtype=torch.float64)
    for move in moves:
        matrix = move.apply(matrix)
    return matrix
