"""Bake: weights that forward computes from parameters, as parameters of their own.

`F.linear(x, w + b @ a)` can be refitted only as the one weight that it has in the end. So that is
what a refit gets to see (`with_plain_weights`); where it has changed one, the merge has this in
place of what computed it (`bake`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.merge import BAKED, HEADS, mark, origin_of
from zipfx.model.graph_module import NAMED, attribute
from zipfx.model.memory import is_dense, span, storage_key
from zipfx.model.running import Noting
from zipfx.modes import fixed_randomness
from zipfx.repair.exposed.splice import with_graph
from zipfx.repair.exposed.unfold import reads_as_weight
from zipfx.trace.nodes import ancestors, is_in_place, module_paths


@dataclass(frozen=True, eq=False)
class Bakeable:
    """A weight that forward computes: name of its node in the merge; what to call its layer; name
    of the parameter that may take its place; that; what it was at first. A view is on the memory of
    a parameter of the merge, so that what is written there needs no place."""

    node: str
    layer: str
    target: str
    parameter: nn.Parameter
    before: Tensor
    is_view: bool


def with_plain_weights(
    merged: fx.GraphModule, inputs: Sequence[Any], written: Sequence[Tensor] = ()
) -> tuple[fx.GraphModule, list[Bakeable]]:
    """The same graph on the same tensors, but for parameters in place of weights that it computes
    from nothing else than its own tensors, always the same.

    Args:
        inputs: one value for each placeholder.
        written: what forward writes to.
    """
    changing = [span(t) for t in written]
    wanted = [node for node in merged.graph.nodes if _computes_weight(merged, node, changing)]
    if not wanted:
        return merged, []
    first, again = (_Values(merged, wanted).seeded(inputs, seed) for seed in (0, 1))
    own = {storage_key(t) for t in merged.parameters()}
    numbers: dict[str, Iterator[int]] = {}
    found = []
    for node in wanted:
        if node not in first or node not in again:
            continue
        value, before = first[node]
        if not torch.equal(before, again[node][1]):
            continue  # it is never the same twice
        head = origin_of(node).head
        home = "" if head is None else f"{HEADS}.{head}"
        holder = merged.get_submodule(home)
        count = numbers.setdefault(home, itertools.count())
        name = next(name for n in count if not hasattr(holder, name := f"{BAKED}_{n}"))
        inside = [p for p in module_paths(node) if p]
        layer = f"{home}.{inside[-1]}".lstrip(".") if inside else node.name
        target = f"{home}.{name}".lstrip(".")
        is_view = storage_key(value) in own and is_dense(value) and not value.is_neg()
        parameter = nn.Parameter(value.detach() if is_view else value.clone())
        found.append(Bakeable(node.name, layer, target, parameter, before, is_view))
    graph = copy.deepcopy(merged.graph)
    named = {node.name: node for node in graph.nodes}
    for one in found:
        _replace(graph, named[one.node], one)
    return with_graph(merged, graph, {one.target: one.parameter for one in found}), found


class _Values(Noting):
    """Notes what some nodes compute, if that is real numbers, and nothing writes to it."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.wanted = set(wanted)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted and isinstance(value, Tensor) and value.is_floating_point():
            self.found[n] = value, value.detach().clone()
        return value

    def seeded(self, inputs: Sequence[Any], seed: int) -> dict[fx.Node, tuple[Tensor, Tensor]]:
        """The values, and copies of them."""
        with fixed_randomness(seed):
            found = self.noted(inputs)
        return {node: both for node, both in found.items() if torch.equal(*both)}


def bake(merged: fx.GraphModule, found: Sequence[Bakeable]) -> list[str]:
    """Put those of the parameters that have changed into a merge; a note of it."""
    named = {node.name: node for node in merged.graph.nodes}
    done = [one for one in found if not (one.is_view or torch.equal(one.parameter, one.before))]
    if not done:
        return []
    gone: list[str] = []
    for one in done:
        home, _, name = one.target.rpartition(".")
        merged.get_submodule(home).register_parameter(name, one.parameter)
        gone += _replace(merged.graph, named[one.node], one)
    _remove(merged, gone)
    merged.recompile()
    names = ", ".join(f"{one.layer} (now {one.target})" for one in done)
    return [f"weights that forward computed, plain parameters since they were refitted: {names}"]


def _replace(graph: fx.Graph, node: fx.Node, one: Bakeable) -> list[str]:
    """Let a node read the parameter, and erase what nobody reads then; the modules and tensors that
    this had used."""
    above = set(ancestors([node]))
    node.op, node.target, node.args, node.kwargs = "get_attr", one.target, (), {}
    mark(node, baked=True, title=one.layer)
    gone = []
    for other in reversed([n for n in graph.nodes if n in above]):
        if not other.users and other.op != "placeholder":
            graph.erase_node(other)
            gone += [str(other.target)] if other.op in NAMED else []
    return gone


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes of which more than dtype and device matters for what a node computes."""
    if node.target is getattr and node.args[1] in ("dtype", "device"):
        return []
    cast = node.op == "call_method" and node.target in ("to", "type_as")
    return [n for n in node.all_input_nodes if not cast or n is node.args[0]]


def _remove(merged: fx.GraphModule, gone: Collection[str]) -> None:
    """Remove the tensors of these that nothing else in the graph uses."""
    read = [str(n.target) for n in merged.graph.nodes if n.op in NAMED]
    kept = {id(part) for path in read for part in _parts(attribute(merged, path))}
    parts = {id(part): part for path in gone for part in _parts(attribute(merged, path))}
    unused = parts.keys() - kept
    for module in list(merged.modules()):
        for own in (module._parameters, module._buffers, module._modules):
            for name in [name for name, value in own.items() if id(value) in unused]:
                del own[name]


def _parts(value: Any) -> list[Any]:
    """A tensor, or a module and all that is in it."""
    if not isinstance(value, nn.Module):
        return [value]
    return [*value.modules(), *value.parameters(), *value.buffers()]


def _computes_weight(
    merged: fx.GraphModule, node: fx.Node, changing: Sequence[tuple[int, int]]
) -> bool:
    """Whether a node computes a weight for the part of a merge that it is in, from parameters of
    that part, and nothing but tensors that never change."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    computes = node.op not in ("get_attr", "placeholder", "output")
    if reader is None or not (computes and reads_as_weight(reader, node)):
        return False
    part = origin_of(reader).head
    tensors: list[Tensor] = []
    for one in (node, *ancestors([node], _inputs)):
        origin = origin_of(one)
        foreign = origin.source is None or origin.head != part
        if foreign or one.op == "placeholder" or is_in_place(one.target):
            return False
        if any(is_in_place(user.target) and user.args[0] is one for user in one.users):
            return False
        if one.op in NAMED:
            parts = _parts(attribute(merged, str(one.target)))
            tensors += [t for t in parts if isinstance(t, Tensor)]
    steady = not any(
        start < stop and begin < end
        for begin, stop in map(span, tensors)
        for start, end in changing
    )
    return steady and any(isinstance(t, nn.Parameter) for t in tensors)
