"""Heads: what each model does after the cut, and where its own features are restored.

The trunk hands merged features to the head.  As long as only operations follow that treat each
feature alike (activations, poolings, movement), they stay merged; the first weight that reads them
takes the unmerge matrix U into its columns.  Where something else meets them first (a residual
add, a norm with its own parameters) they are restored by an explicit index_select.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from zipfx.analysis import Facts, Grouping, Kind, NodeFacts, overlapping
from zipfx.errors import ZipError
from zipfx.hashing import Flags, Ints
from zipfx.match import AxisMap, Matching, Merge, Move, is_pattern, read_maps
from zipfx.model.tensors import named_tensors
from zipfx.trace.nodes import describe, tensors_at

T = TypeVar("T")


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


def _by_node(entries: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for node, entry in entries:
        found.setdefault(node, []).append(entry)
    return found


class _HeadPlanner:
    def __init__(
        self,
        module: fx.GraphModule,
        facts: Facts,
        grouping: Grouping,
        matchings: Mapping[int, Merge],
        k: int,
    ) -> None:
        self.module, self.grouping = module, grouping
        self.facts = facts.until(grouping.last)
        self.matchings, self.k = matchings, k
        self.nodes = list(module.graph.nodes)
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.last = grouping.last
        self.named = {name: id(t) for name, t in named_tensors(module).items()}
        constraints = facts.constraints
        self.colours = _by_node((c.node, c) for c in constraints.colours)
        self.edges = _by_node((e.node, e) for e in constraints.edges)
        self.contractions = _by_node((c.node, c) for c in constraints.contractions)
        self.members = _by_node((m.node, m) for m in constraints.members)
        self.produced = _by_node((node, ids) for ids, node in constraints.produced)
        # a head that writes in place, and reads what it wrote by its old name, does so on features
        # of its own
        late = [(j, i) for j, i, _ in facts.rewritten if j > self.last]
        self.restless = {i for pair in late for i in pair}
        self.moves = {s for s, merge in matchings.items() if not _in_place(merge, k)}

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
            maps = self._absorb(i, merged, refused)
            for t in self._parameters(i):
                used.setdefault(id(t), set()).add(maps is not None and id(t) in maps)
            if maps is None:
                for j in merged:
                    self._restore(j, i, plan)
            elif merged:
                plan.fused.update(maps)
                if self._passes_on(i)[0]:
                    plan.merged.add(i)
        # an in-place head changes what all readers of a storage see, so all must see one copy
        late = {
            o for j in plan.restored for o in overwritten
            if o in self.facts.nodes[j].owners and self._carries(o)
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
            for _, slots in overlapping(value.features):
                tables = {s for s, _ in self.grouping.tables(*slots)}
                if not {s for labels in slots for s in self._moved(labels)} <= tables:
                    return False
        return True

    def _passes_on(self, i: int) -> tuple[bool, bool]:
        """Whether node i hands on moved features of the trunk, and whether it makes such features
        with weights of its own (a module that runs on both sides of the cut)."""
        made = self.produced.get(i, [])
        own = np.concatenate(made) if made else np.zeros(0, np.int64)
        handed_on = makes = False
        for value in self.facts.nodes[i].values:
            for slot in value.features:
                labels = torch.unique(slot).numpy()
                if self._moved(labels):
                    mine = bool(np.isin(labels[labels > 0], own).all())
                    handed_on, makes = handed_on or not mine, makes or mine
        return handed_on, makes

    def _crosses(self, i: int) -> bool:
        """Whether node i brings together features that the trunk keeps apart: their unmerges differ
        (two branches that only the head adds up; a tensor and its own flip)."""
        vertex = self.grouping.vertex
        for e in (*self.edges.get(i, ()), *self.members.get(i, ())):
            apart = vertex[e.a] != vertex[e.b]
            if self._moved(e.a[apart]) and self._moved(e.b[apart]):
                return True
        return False

    def _treats_alike(self, i: int) -> bool:
        """Whether node i does the same to all features of a moved space: no constant that varies
        along them, no operation on some of them only."""
        vertex, kind = self.grouping.vertex, self.grouping.kind
        for c in self.colours.get(i, ()):
            met, where = np.unique(vertex[c.a], return_inverse=True)
            total = np.zeros(len(met), np.uint64)
            np.add.at(total, where, c.value)
            for one in np.unique(kind[met[self._is_moved(met)]]):
                mine = total[kind[met] == one]
                if len(mine) < np.count_nonzero(kind == one) or (mine != mine[0]).any():
                    return False
        return True

    def _is_moved(self, vertices: Ints) -> Flags:
        """Which vertices the merge moves."""
        starts, moved = self.grouping.starts, np.isin(self.grouping.moved_space, [*self.moves])
        total = np.concatenate([[0], np.cumsum(moved)])
        found: Flags = total[starts[vertices + 1]] > total[starts[vertices]]
        return found

    def _is_merged(self, j: int, plan: HeadPlan, early: set[int]) -> bool:
        if j in plan.merged:
            return True
        crossing = j <= self.last and j not in plan.nodes and j not in early
        return crossing and self.facts.nodes[j].kind == Kind.DATA and self._carries(j)

    def _seen(self, j: int, i: int) -> NodeFacts:
        """What node j holds by the time that node i reads it."""
        later = [fact for at, k, fact in self.facts.rewritten if k == j and at < i]
        return later[-1] if later else self.facts.nodes[j]

    def _parameters(self, i: int) -> list[Tensor]:
        node = self.nodes[i]
        nodes = [node, *(n for n in node.all_input_nodes if n.op == "get_attr")]
        return [t for n in nodes for t in tensors_at(self.module, n)]

    def _absorb(self, i: int, merged: list[int], refused: set[int]) -> dict[int, list[Move]] | None:
        """Axis maps that let node i work on merged features; None where it can not."""
        node, fact = self.nodes[i], self.facts.nodes[i]
        if not merged or node.op == "output" or self.restless & {i, *merged}:
            return None
        if fact.traits & {"elementwise", "mixes"}:
            return None
        if any(e.weights_only for e in self.edges.get(i, ())):
            return None
        for source in node.all_input_nodes:
            other = self._seen(self.at[source], i)
            plain = self.at[source] not in merged and other.kind == Kind.DATA
            if plain and any(v.features for v in other.values):
                return None
            if other.kind == Kind.WEIGHT and source.op != "get_attr":
                return None
        if all(self._passes_on(i)) or not self._whole(i):
            return None
        if self._crosses(i) or not self._treats_alike(i):
            return None
        maps: dict[int, list[Move]] = {}
        for c in self.contractions.get(i, ()):
            if any(self._moved(x) for x in c.x):
                found = self._columns(c.w, c.x)
                if found is None or found[0] in refused:
                    return None
                maps.setdefault(found[0], []).extend(found[1])
        return maps

    def _columns(self, w: Ints, x: Sequence[Ints]) -> tuple[int, list[Move]] | None:
        """The unmerge of the axis with labels w, which reads the features x: (weight id, maps)."""
        for axis in self.facts.constraints.axes:
            if axis.start <= w[0] < axis.stop:
                if (
                    len(w) != axis.stop - axis.start
                    or (w != np.arange(axis.start, axis.stop)).any()
                ):
                    return None
                found = self._unmerge(x, len(w), axis.dim, axis.by, axis.parts)
                part = torch.arange(len(w)) // axis.size
                blocks = [m.target // axis.size for m in found if isinstance(m, AxisMap)]
                if axis.by >= 0 and any(not torch.equal(b, part) for b in blocks):
                    return None  # whole groups have moved, but the rows of a head have not
                return self.named[axis.name], found
        return None

    def _unmerge(
        self, labels: Sequence[Ints], size: int, dim: int, by: int = -1, parts: int = 1
    ) -> list[Move]:
        reads = [(index, self.matchings[s]) for s, index in self.grouping.tables(*labels)]
        return read_maps(size, dim, reads, self.k, by, parts)

    def _restore(self, j: int, i: int, plan: HeadPlan) -> None:
        fact = self.facts.nodes[j]
        if not fact.is_tensor:
            raise ZipError(
                f"{describe(self.nodes[j])} hands several tensors with merged features to "
                f"{describe(self.nodes[i])} across the cut; choose another module for partial="
            )
        unmerges = []
        for dims, slots in overlapping(fact.values[0].features):
            if any(self._moved(labels) for labels in slots):
                moves = self._unmerge(slots, len(slots[0]), 1)
                unmerges.append(Unmerge(dims, _together(moves, len(slots[0]))))
        plan.restored[j] = unmerges
        plan.edges.add((j, i))


def _in_place(merge: Merge, k: int) -> bool:
    """Whether the features of model k stay where they are."""
    if not isinstance(merge, Matching) or not is_pattern(merge, read=True):
        return False
    return torch.equal(merge.of(k), torch.arange(merge.sizes[k]))


def _together(moves: Sequence[Move], size: int) -> Tensor:
    """Several maps of one axis as an index, or as a matrix where one of them is dense."""
    if len(moves) == 1 and isinstance(moves[0], AxisMap):
        return moves[0].target
    matrix = torch.eye(size, dtype=torch.float64)
    for move in moves:
        matrix = move.apply(matrix)
    return matrix
