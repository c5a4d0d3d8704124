"""Splice: the graph of a module while nodes of it are replaced by several, on the same memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from zipfx.merge import mark, origin_of
from zipfx.model.graph_module import NAMED, GraphModule, attribute, plain, tree_of
from zipfx.trace.nodes import only_looked_at, tensors_at


def title(node: fx.Node) -> str:
    """What messages call the layer of a node."""
    return origin_of(node).title or plain(str(node.target))


def with_graph(
    module: fx.GraphModule, graph: fx.Graph, made: Mapping[str, nn.Module | nn.Parameter]
) -> fx.GraphModule:
    """Another graph on the parts of a module, and on some of its own, by target."""
    used = {str(n.target) for n in graph.nodes if n.op in NAMED}
    parts = {plain(t): made[t] if t in made else attribute(module, t) for t in sorted(used)}
    return GraphModule(tree_of(parts), graph, type(module).__name__)


class Splice:
    """The graph of a module while nodes of it are replaced by several.

    made: the layers that were put in, by target; uses: how many nodes read a tensor, by its id.
    """

    def __init__(self, module: fx.GraphModule, to_write: bool) -> None:
        self.to_write = to_write
        self.module, self.graph = module, copy.deepcopy(module.graph)
        self.made: dict[str, nn.Module] = {}
        read = (n for n in module.graph.nodes if not only_looked_at(n))
        self.uses = Counter(id(t) for n in read for t in tensors_at(module, n))

    def alone(self, t: Tensor) -> bool:
        """Whether a single node has a tensor, or that does not matter."""
        return not self.to_write or self.uses[id(t)] == 1

    def owns(self, node: fx.Node) -> bool:
        """Whether no other node has the tensors of this one, or that does not matter."""
        return all(map(self.alone, tensors_at(self.module, node)))

    def add(self, path: str, layer: nn.Module) -> str:
        """Where a layer is put: not inside a module, which is the model's."""
        target = f"unfolded__{len(self.made)}__{path.replace('.', '__')}"
        self.made[target] = layer
        return target

    def call(
        self, node: fx.Node, name: str, target: str, args: tuple[Any, ...], kwargs: Any = None
    ) -> fx.Node:
        """A part of a node that applies a layer."""
        new = self.graph.call_module(target, args, kwargs)
        self.name(new, node, name)
        return new

    def becomes(self, node: fx.Node, path: str, layer: nn.Module, x: fx.Node) -> None:
        """A node applies a layer of its own, and nothing else."""
        mark(node, title=path)
        node.op, node.target = "call_module", self.add(path, layer)
        node.args, node.kwargs = (x,), {}

    def name(self, new: fx.Node, node: fx.Node, part: str) -> None:
        """Name a part after its node, in this graph and in that of the model it comes from."""
        new._rename(f"{node.name}__zipfx_{part}")
        origin = origin_of(node)
        source = None if origin.source is None else f"{origin.source}__zipfx_{part}"
        mark(new, head=origin.head, source=source)


def source_of(node: fx.Node) -> str:
    return origin_of(node).source or node.name


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def rows_of(t: Tensor, start: int, stop: int) -> nn.Parameter:
    return nn.Parameter(t.data[start:stop], requires_grad=False)


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer.eval()
