"""Assemble: carry out the plans; fused weights, heads and graph become one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.analyze import Analysis, run_analysis
from zipfx.correspond import counterparts, same_graph, tensors_at
from zipfx.errors import ZipError
from zipfx.fuse import Move, fuse, fuse_variance, plan
from zipfx.heads import HeadPlan, plan_head
from zipfx.labels import Kind
from zipfx.matrices import Merge, Pairs
from zipfx.rewrite import (
    HEADS,
    MergedModule,
    Tree,
    build,
    copy_head,
    copy_trunk,
    plant,
    plant_unused,
)
from zipfx.spaces import Axis, Space
from zipfx.trace import named_tensors


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
        tree = Tree(source, self._trunk_value())
        plant(tree, nodes)
        unused = plant_unused(tree, source, self._used(0))
        graph = fx.Graph()
        seen = copy_trunk(graph, nodes[:-1])
        graph.output(fx.node.map_arg(nodes[-1].args[0], seen.__getitem__))
        notes = [f"kept though the traced graph does not use it: {', '.join(unused)}"] * bool(
            unused
        )
        return build(tree.root, graph, type(source).__name__), [], notes

    def partial(self) -> tuple[MergedModule, list[HeadPlan], list[str]]:
        """Trunk up to the cut, one head per model after it."""
        last = self.analysis.grouping.last
        source = self.modules[0]
        trunk = self._trunk(list(source.graph.nodes)[: last + 1])
        self._check_state()
        plans = self._head_plans()
        tree = Tree(source, self._trunk_value())
        plant(tree, trunk)
        if HEADS in tree.root._modules:
            raise ZipError(
                f"the models have a module named {HEADS!r} before the cut, which is where zipfx "
                "puts the heads of a partial zip; rename it, or zip the heads of it one by one"
            )
        heads = nn.ModuleList([nn.Module() for _ in self.modules])
        tree.root.add_module(HEADS, heads)
        graph = fx.Graph()
        seen = copy_trunk(graph, trunk)
        copies = {i: seen[n] for i, n in enumerate(source.graph.nodes) if n in seen}
        outputs, notes = [], []
        for k, (module, plan_k) in enumerate(zip(self.modules, plans, strict=True)):
            nodes = list(module.graph.nodes)
            twig = Tree(module, head_value(plan_k), heads[k])
            mine = [nodes[i] for i in plan_k.nodes]
            plant(twig, mine)
            used = self._used(k)
            unused = plant_unused(twig, module, used)
            notes += [f"head {k} keeps what its graph does not use: {', '.join(unused)}"] * bool(
                unused
            )
            outputs.append(copy_head(graph, tree.root, nodes, copies, plan_k, k))
        graph.output(tuple(outputs))
        return build(tree.root, graph, type(source).__name__), plans, notes

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

    def _trunk(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Without weights that were fetched before the cut, but only for what comes after it."""
        facts, kept = self.analysis.facts.until(len(nodes) - 1).nodes, set(nodes)
        for i, node in reversed(list(enumerate(nodes))):
            idle = facts[i].kind in (Kind.WEIGHT, Kind.CONSTANT) and not kept & set(node.users)
            if idle:
                kept.discard(node)
        return [node for node in nodes if node in kept]

    def _used(self, k: int) -> set[int]:
        module = self.modules[k]
        return {id(t) for node in module.graph.nodes for t in tensors_at(module, node)}

    def _trunk_value(self) -> Callable[[str, Tensor], Tensor]:
        analysis, modules = self.analysis, self.modules
        corresponding = counterparts(modules, analysis.grouping.last)
        known = named_tensors(modules[0])
        named = {id(t): name for name, t in known.items()}
        shapes = {name: t.shape for name, t in known.items()}
        matchings = {name: matching for name, (matching, _) in self.matched.items()}
        maps = plan(list(analysis.spaces), matchings, shapes, len(modules))
        blank: list[list[Move]] = [[] for _ in modules]

        def value(path: str, t: Tensor) -> Tensor:
            tensors = corresponding.get(id(t), [t])
            if not t.is_floating_point() or len(tensors) == 1:
                return t.detach().clone()
            name = named.get(id(t), path)
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
            by_index = {i: self.matched[s.name][0] for i, s in enumerate(first.spaces)}
            if k == 0 or same_graph(self.modules[0], module):
                found, facts = first.grouping, first.facts
            else:  # a head of its own: its labels have their own numbers
                mine = run_analysis(module, self.inputs, verify=False).cut(first.grouping.last)
                facts = mine.facts
                by_index = self._translate(mine)
                found = mine.grouping
            plans.append(plan_head(module, facts, found, by_index, k))
        return plans

    def _translate(self, other: Analysis) -> dict[int, Merge]:
        """Matchings by the space indices of another model's analysis of the same trunk."""
        last = self.analysis.grouping.last
        names: dict[str, str] = {}
        graphs = [list(a.module.graph.nodes)[: last + 1] for a in (self.analysis, other)]
        for x, y in zip(*graphs, strict=True):
            names[str(x.target)] = str(y.target)
        found = {}
        for space in self.analysis.spaces:
            axis = space.axes[0]
            base = next(
                t
                for t in sorted(names, key=len, reverse=True)
                if axis.parameter == t or axis.parameter.startswith(t + ".")
            )
            name = names[base] + axis.parameter[len(base) :]
            for i, theirs in enumerate(other.spaces):
                if any(
                    (a.parameter, a.dim, a.by) == (name, axis.dim, axis.by)
                    and torch.equal(a.index, axis.index)
                    for a in theirs.axes
                ):
                    found[i] = self.matched[space.name][0]
        return found


def head_value(plan_k: HeadPlan) -> Callable[[str, Tensor], Tensor]:
    """The weights of a head: the model's own, with U where the plan puts it."""

    def value(path: str, t: Tensor) -> Tensor:
        maps = plan_k.fused.get(id(t))
        return fuse([t], [maps]) if maps else t.detach().clone()

    return value
