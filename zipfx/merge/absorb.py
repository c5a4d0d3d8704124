"""Absorb: which nodes of a head can work on merged features, and the weights that take U there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx

from zipfx.analysis import Facts, Kind, NodeFacts
from zipfx.hashing import Ints
from zipfx.match import AxisMap, Move
from zipfx.merge.moved import Moved
from zipfx.model.tensors import named_tensors

T = TypeVar("T")

_LAYERS, _PRODUCTS = "linear conv1d conv2d conv3d".split(), "addmm mm matmul".split()
#: functions that apply a layer whose weights they are given, and do nothing else with them
APPLY = frozenset((
    operator.matmul,
    *(getattr(F, name) for name in _LAYERS),
    *(getattr(torch, name) for name in _PRODUCTS),
    *(getattr(torch.ops.aten, name).default for name in (*_LAYERS, *_PRODUCTS)),
))  # fmt: skip


def _by_node(entries: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for node, entry in entries:
        found.setdefault(node, []).append(entry)
    return found


class Absorber:
    """Decides node by node; facts: as the last node of the trunk leaves them."""

    def __init__(self, module: fx.GraphModule, facts: Facts, moved: Moved) -> None:
        self.facts, self.moved = facts, moved
        self.nodes = list(module.graph.nodes)
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.named = {name: id(t) for name, t in named_tensors(module).items()}
        constraints = facts.constraints
        self.colours = _by_node((c.node, c) for c in constraints.colours)
        self.edges = _by_node((e.node, e) for e in constraints.edges)
        self.contractions = _by_node((c.node, c) for c in constraints.contractions)
        self.members = _by_node((m.node, m) for m in constraints.members)
        self.produced = _by_node((node, ids) for ids, node in constraints.produced)
        # values aliased by an in-place write after the cut are unmerged first
        late = [(j, i) for j, i, _ in facts.rewritten if j > moved.grouping.last]
        self.aliased = {i for pair in late for i in pair}

    def maps(self, i: int, merged: list[int], refused: set[int]) -> dict[int, list[Move]] | None:
        """Axis maps (by id of the weight) that let node i work on merged features; None where it
        can not.

        merged: the sources of the node that hold such features; refused: weights that take no U.
        """
        if not merged or not self._can_stay_merged(i, merged):
            return None
        maps: dict[int, list[Move]] = {}
        seen: set[tuple[bytes, ...]] = set()  # a product of complex numbers is several real ones
        for c in self.contractions.get(i, ()):
            if any(self.moved.among(x) for x in c.x):
                if (key := (c.w.tobytes(), *(x.tobytes() for x in c.x))) in seen:
                    continue
                seen.add(key)
                found = self._columns(c.w, c.x)
                if found is None or found[0] in refused or self._gives(i, c.w):
                    return None
                maps.setdefault(found[0], []).extend(found[1])
        return maps

    def passes_on(self, i: int) -> tuple[bool, bool]:
        """Whether node i hands on moved features of the trunk, and whether it makes such features
        with weights of its own (a module that runs on both sides of the cut)."""
        made = self.produced.get(i, [])
        own = np.concatenate(made) if made else np.zeros(0, np.int64)
        handed_on = makes = False
        for value in self.facts.nodes[i].values:
            for slot in value.features:
                labels = torch.unique(slot).numpy()
                if self.moved.among(labels):
                    mine = bool(np.isin(labels[labels > 0], own).all())
                    handed_on, makes = handed_on or not mine, makes or mine
        return handed_on, makes

    def _can_stay_merged(self, i: int, merged: list[int]) -> bool:
        """Whether node i can work on merged features if the weights that read them take U."""
        node, fact = self.nodes[i], self.facts.nodes[i]
        if node.op == "output" or self.aliased & {i, *merged}:
            return False
        if fact.traits & {"elementwise", "mixes"}:
            return False
        if any(e.weights_only for e in self.edges.get(i, ())):
            return False
        if any(self._is_unmerged(source, i, merged) for source in node.all_input_nodes):
            return False
        if all(self.passes_on(i)) or not self.moved.is_whole_in(fact):
            return False
        return not self._crosses(i) and self._treats_alike(i)

    def _is_unmerged(self, source: fx.Node, i: int, merged: list[int]) -> bool:
        """Whether node i reads features of model k itself from a source: data of its head, or a
        weight that the graph computes."""
        j = self.at[source]
        seen = self._seen(j, i)
        if j not in merged and seen.kind == Kind.DATA and any(v.features for v in seen.values):
            return True
        return seen.kind == Kind.WEIGHT and source.op != "get_attr"

    def _seen(self, j: int, i: int) -> NodeFacts:
        """What node j holds by the time that node i reads it."""
        later = [fact for at, k, fact in self.facts.rewritten if k == j and at < i]
        return later[-1] if later else self.facts.nodes[j]

    def _crosses(self, i: int) -> bool:
        """Whether node i brings together features that the trunk keeps apart: their unmerges differ
        (two branches that only the head adds up; a tensor and its own flip)."""
        vertex = self.moved.grouping.vertex
        for e in (*self.edges.get(i, ()), *self.members.get(i, ())):
            apart = vertex[e.a] != vertex[e.b]
            if self.moved.among(e.a[apart]) and self.moved.among(e.b[apart]):
                return True
        return False

    def _treats_alike(self, i: int) -> bool:
        """Whether node i does the same to all features of a moved space: no constant that varies
        along them, no operation on some of them only."""
        vertex, kind = self.moved.grouping.vertex, self.moved.grouping.kind
        for c in self.colours.get(i, ()):
            met, where = np.unique(vertex[c.a], return_inverse=True)
            total = np.zeros(len(met), np.uint64)
            np.add.at(total, where, c.value)
            for one in np.unique(kind[met[self.moved.vertices(met)]]):
                mine = total[kind[met] == one]
                if len(mine) < np.count_nonzero(kind == one) or (mine != mine[0]).any():
                    return False
        return True

    def _gives(self, i: int, w: Ints) -> bool:
        """Whether node i hands on features along the axis that takes U, too: it reads a weight and
        its transpose."""
        slots = (slot for value in self.facts.nodes[i].values for slot in value.features)
        return any(bool(np.isin(slot.reshape(-1).numpy(), w).any()) for slot in slots)

    def _columns(self, w: Ints, x: Sequence[Ints]) -> tuple[int, list[Move]] | None:
        """The unmerge of the axis with labels w, which reads the features x: (weight id, maps)."""
        axes = self.facts.constraints.axes
        axis = next((a for a in axes if a.start <= w[0] < a.stop), None)
        if axis is None or not np.array_equal(w, np.arange(axis.start, axis.stop)):
            return None
        found = self.moved.unmerge(x, len(w), axis.dim, axis.by, axis.parts)
        part = torch.arange(len(w)) // axis.size
        blocks = [m.target // axis.size for m in found if isinstance(m, AxisMap)]
        if axis.by >= 0 and any(not torch.equal(b, part) for b in blocks):
            return None  # whole groups have moved, but the rows of a head have not
        return self.named[axis.name], found
