"""Assemble: carry out the plans; fused weights, heads and graph become one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.analysis import Analysis, Axis, Space, run_analysis
from zipfx.errors import ZipError
from zipfx.match import Merge, Move, Pairs, plan
from zipfx.merge.fuse import fuse, fuse_variance
from zipfx.merge.graph import copy_head, copy_trunk, needed_nodes
from zipfx.merge.heads import HeadPlan, plan_head
from zipfx.merge.module import MergedModule, Part, build, planted
from zipfx.model.graph_module import plain
from zipfx.model.tensors import constant_names, inexact, named_tensors
from zipfx.trace import ValueOf, counterparts, record_of, same_graph
from zipfx.trace.nodes import tensors_at


@dataclass(frozen=True)
class Assembly:
    """Everything that fusing and rewriting need."""

    modules: Sequence[fx.GraphModule]
    analysis: Analysis
    matched: Mapping[str, tuple[Merge, Pairs]]
    inputs: tuple[Any, ...]

    def full(self) -> tuple[MergedModule, list[HeadPlan], list[str]]:
        """Everything merged, structured as model 0."""
        source = self.modules[0]
        nodes = list(source.graph.nodes)
        root, unused = self._planted(nodes, [])
        graph = fx.Graph()
        seen = copy_trunk(graph, nodes[:-1], record_of(source).expects)
        graph.output(fx.node.map_arg(nodes[-1].args[0], seen.__getitem__))
        notes = [
            f"kept though the traced graph does not use it: {', '.join(names)}"
            for names in unused.values()
            if names
        ]
        return build(root, graph, type(source).__name__), [], notes

    def partial(self) -> tuple[MergedModule, list[HeadPlan], list[str]]:
        """Trunk up to the cut, one head per model after it."""
        last = self.analysis.grouping.last
        source = self.modules[0]
        trunk = needed_nodes(list(source.graph.nodes)[: last + 1], self.analysis.facts)
        self._check_state()
        plans = self._head_plans()
        nodes = [list(module.graph.nodes) for module in self.modules]
        root, unused = self._planted(trunk, plans)
        graph = fx.Graph()
        seen = copy_trunk(graph, trunk, record_of(source).expects)
        copies = {i: seen[n] for i, n in enumerate(nodes[0]) if n in seen}
        graph.output(
            tuple(copy_head(graph, root, nodes[k], copies, p, k) for k, p in enumerate(plans))
        )
        notes = [
            f"head {k} keeps what its graph does not use: {', '.join(names)}"
            for k, names in unused.items()
            if names
        ]
        return build(root, graph, type(source).__name__), plans, notes

    def _planted(
        self, trunk: Sequence[fx.Node], plans: Sequence[HeadPlan]
    ) -> tuple[nn.Module, dict[int, list[str]]]:
        nodes: dict[Part, Sequence[fx.Node]] = {None: trunk}
        values: dict[Part, ValueOf] = {None: self._trunk_value()}
        for k, plan_k in enumerate(plans):
            mine = list(self.modules[k].graph.nodes)
            nodes[k] = [mine[i] for i in plan_k.nodes]
            values[k] = head_value(plan_k)
        return planted(dict(enumerate(self.modules)), nodes, values)

    def _check_state(self) -> None:
        """What forward writes before the cut and reads after it can not be in both places."""
        module, last = self.modules[0], self.analysis.grouping.last
        written = self.analysis.facts.written(last)
        nodes = list(module.graph.nodes)[last + 1 :]
        sources = [n for node in nodes for n in (node, *node.all_input_nodes)]
        read = {id(t) for node in sources for t in tensors_at(module, node)}
        both = [n for n, t in named_tensors(module).items() if n in written and id(t) in read]
        if both:
            raise ZipError(
                f"forward writes {both[0]!r} before the cut and uses it after it; choose another "
                "module for partial="
            )

    def _trunk_value(self) -> ValueOf:
        analysis, modules = self.analysis, self.modules
        corresponding = counterparts(modules, analysis.grouping.last)
        known = named_tensors(modules[0])
        named = {id(t): name for name, t in known.items()}
        learned = set(known) - constant_names(modules[0])
        shapes = {name: t.shape for name, t in known.items()}
        matchings = {name: matching for name, (matching, _) in self.matched.items()}
        maps = plan(list(analysis.spaces), matchings, shapes, len(modules))
        blank: list[list[Move]] = [[] for _ in modules]

        def value(path: str, t: Tensor) -> Tensor:
            tensors, name = corresponding.get(id(t), [t]), named.get(id(t), path)
            if not inexact(t) or len(tensors) == 1 or name not in learned:
                return t.detach().clone()
            if name in analysis.spaces.variances:
                return fuse_variance(tensors, self._parts(name))
            return fuse(tensors, maps.get(name, blank))

        return value

    def _parts(self, name: str) -> list[tuple[Space, Axis, Merge, Pairs]]:
        return [
            (s, axis, *self.matched[s.name])
            for s in self.analysis.spaces
            for axis in s.axes
            if axis.parameter == name
        ]

    def _head_plans(self) -> list[HeadPlan]:
        first = self.analysis
        plans = []
        for k, module in enumerate(self.modules):
            named = named_tensors(module).keys() == named_tensors(self.modules[0]).keys()
            if k == 0 or (named and same_graph(self.modules[0], module)):
                mine, names = first, {i: s.name for i, s in enumerate(first.spaces)}
            else:  # a head, or names, of its own: its labels have their own numbers
                mine = run_analysis(module, self.inputs, verify=False).cut(first.grouping.last)
                names = _corresponding_spaces(first, mine)
            merges = {i: self.matched[name][0] for i, name in names.items()}
            plans.append(plan_head(module, mine.facts, mine.grouping, merges, k))
        return plans


def _corresponding_spaces(first: Analysis, other: Analysis) -> dict[int, str]:
    """The space of the first model (its name) that each space of another one is, by index; both
    are analyses of the same trunk."""
    last = first.grouping.last
    names: dict[str, str] = {}
    graphs = [list(a.module.graph.nodes)[: last + 1] for a in (first, other)]
    for x, y in zip(*graphs, strict=True):
        names[plain(str(x.target))] = plain(str(y.target))
    found = {}
    for space in first.spaces:
        axis = space.axes[0]
        name = _renamed(axis.parameter, names)
        for i, theirs in enumerate(other.spaces):
            if any(
                (a.parameter, a.dim, a.by) == (name, axis.dim, axis.by)
                and torch.equal(a.index, axis.index)
                for a in theirs.axes
            ):
                found[i] = space.name
    return found


def _renamed(parameter: str, names: Mapping[str, str]) -> str:
    """The parameter under the names of another model; names: of modules and tensors."""
    base = next(
        t
        for t in sorted(names, key=len, reverse=True)
        if parameter == t or parameter.startswith(t + ".")
    )
    return names[base] + parameter[len(base) :]


def head_value(plan_k: HeadPlan) -> ValueOf:
    """The weights of a head: the model's own, with U where the plan puts it."""

    def value(path: str, t: Tensor) -> Tensor:
        maps = plan_k.fused.get(id(t))
        return fuse([t], [maps]) if maps else t.detach().clone()

    return value
