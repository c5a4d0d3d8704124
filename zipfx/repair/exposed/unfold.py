"""Unfold: weights that a node keeps inside, or is given, become modules of their own.

A refit stops before each layer of a graph, to see what it reads. `nn.MultiheadAttention` is one
node with four projections in it, and `F.linear(x, weight)` is none that knows its weight. Here such
nodes become several, or a module, on the same memory: what is written there is written to the
model. A function that hands weights on to `F.linear` becomes pieces (`opaque`), with those layers
between them.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.merge import HEAD_KEY, SOURCE_KEY
from zipfx.model.graph_module import NAMED, GraphModule, attribute, plain, tree_of
from zipfx.model.tensors import runs_as
from zipfx.repair.exposed.inner_linears import Inner, Piece, arguments_of, inner_layers
from zipfx.trace.nodes import looks, only_looked_at, tensors_at

#: meta key of a node that was unfolded: (name of the source it was part of, path of a parameter,
#: first and last of the rows that it applies)
PART_KEY = "zipfx_part"
#: meta key of a node that was unfolded: what to call it
TITLE_KEY = "zipfx_title"

_PROJECTIONS = ("query", "key", "value")
_LINEAR = F.linear, torch.ops.aten.linear.default
_CONVOLUTIONS: dict[Any, type[nn.modules.conv._ConvNd]] = {
    torch.ops.aten.conv1d.default: nn.Conv1d,
    torch.ops.aten.conv2d.default: nn.Conv2d,
    torch.ops.aten.conv3d.default: nn.Conv3d,
    F.conv1d: nn.Conv1d,
    F.conv2d: nn.Conv2d,
    F.conv3d: nn.Conv3d,
}

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def title(node: fx.Node) -> str:
    """What messages call the layer of a node."""
    found: str = node.meta.get(TITLE_KEY, plain(str(node.target)))
    return found


def unfold(
    module: fx.GraphModule, inputs: Sequence[Any], *, to_write: bool = True
) -> fx.GraphModule:
    """The same graph with `nn.MultiheadAttention`, `F.linear`, `F.conv1d` to `conv3d`, and
    functions that call `F.linear` unfolded; nodes keep their names, tensors their memory.

    Args:
        module: a traced model, or a merged one.
        inputs: one value for each placeholder, to see what functions do.
        to_write: leave alone what shares its weights with another node. Else attention is unfolded
            wherever it is, so that its parts have values to read, and `F.linear` and convolutions
            are not: their nodes have those anyway.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = nn.MultiheadAttention(8, 2)
    ...     def forward(self, x):
    ...         return self.attention(x, x, x)[0]
    >>> wide = unfold(fx.symbolic_trace(Net()), [torch.zeros(3, 1, 8)])
    >>> [title(node) for node in wide.graph.nodes if node.op == "call_module"][:3]
    ['attention.query', 'attention.key', 'attention.value']
    """
    return _Unfolding(module, inputs, to_write).result()


def with_graph(
    module: fx.GraphModule, graph: fx.Graph, made: Mapping[str, nn.Module | nn.Parameter]
) -> fx.GraphModule:
    """Another graph on the parts of a module, and on some of its own, by target."""
    used = {str(n.target) for n in graph.nodes if n.op in NAMED}
    parts = {plain(t): made[t] if t in made else attribute(module, t) for t in sorted(used)}
    return GraphModule(tree_of(parts), graph, type(module).__name__)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args)), **node.kwargs}


def reads_as_weight(node: fx.Node, other: fx.Node) -> bool:
    """Whether another node's value is the weight or the bias of a layer that this one applies."""
    applies = node.target in (*_LINEAR, *_CONVOLUTIONS)
    given = _arguments(node) if applies else {}
    return any(given.get(name) is other for name in _ARGUMENTS[1:3])


class _Unfolding:
    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], to_write: bool) -> None:
        self.to_write = to_write
        self.inner = inner_layers(module, inputs)
        self.module, self.graph = module, copy.deepcopy(module.graph)
        self.made: dict[str, nn.Module] = {}
        read = (n for n in module.graph.nodes if not only_looked_at(n))
        self.uses = Counter(id(t) for n in read for t in tensors_at(module, n))

    def result(self) -> fx.GraphModule:
        for node in list(self.graph.nodes):
            if node.op == "call_module" and node.target not in self.made:
                leaf = self.module.get_submodule(str(node.target))
                own = isinstance(leaf, nn.MultiheadAttention)
                if own and runs_as(leaf, nn.MultiheadAttention):
                    self._attention(node, leaf)
            elif node.target in (*_LINEAR, *_CONVOLUTIONS) and self.to_write:
                self._function(node)
            elif node.name in self.inner:
                self._pieces(node, self.inner[node.name])
        return with_graph(self.module, self.graph, self.made)

    def _alone(self, t: Tensor) -> bool:
        """Whether a single node has a tensor, or that does not matter."""
        return not self.to_write or self.uses[id(t)] == 1

    def _own(self, node: fx.Node) -> bool:
        """Whether no other node has the tensors of this one, or that does not matter."""
        return all(map(self._alone, tensors_at(self.module, node)))

    def _attention(self, node: fx.Node, leaf: Any) -> None:
        path = plain(str(node.target))
        given = inspect.signature(leaf.forward).bind(*node.args, **node.kwargs)
        read = {u: u.args[1] for u in node.users if u.target is getitem}
        outputs = [u for u, i in read.items() if i == 0]
        odd = (
            leaf.bias_k is not None
            or leaf.add_zero_attn
            or any(is_parametrized(m) for m in leaf.modules())
            or not runs_as(leaf.out_proj, nn.Linear)
        )
        if odd or not outputs or len(read) < len(node.users) or not self._own(node):
            return
        width, packed = leaf.embed_dim, leaf._qkv_same_embed_dim
        with self.graph.inserting_before(node):
            for i, name in enumerate(_PROJECTIONS):
                weight = leaf.in_proj_weight if packed else getattr(leaf, f"{name[0]}_proj_weight")
                rows = (i * width, (i + 1) * width) if packed else (0, width)
                bias = leaf.in_proj_bias
                bias = None if bias is None else _view(bias, i * width, (i + 1) * width)
                target = self._add(f"{path}.{name}", _linear(_view(weight, *rows), bias))
                part = self.graph.call_module(target, (given.arguments[name],))
                self._name(part, node, name)
                part.meta[TITLE_KEY] = f"{path}.{name}"
                owner = f"{path}.in_proj_weight" if packed else f"{path}.{name[0]}_proj_weight"
                part.meta[PART_KEY] = (self._source(node), owner, *rows)
                given.arguments[name] = part
        node.target = self._add(f"{path}.mixing", _core(leaf))
        node.args, node.kwargs = given.args, given.kwargs
        first, *others = outputs
        with self.graph.inserting_before(first):
            mixed = self.graph.call_function(getitem, (node, 0))
            self._name(mixed, node, "mixed")
        self._becomes(first, f"{path}.out_proj", leaf.out_proj, mixed)
        for other in others:
            other.replace_all_uses_with(first)
            self.graph.erase_node(other)

    def _function(self, node: fx.Node) -> None:
        given = _arguments(node)
        x, *weights = (given.pop(name, None) for name in _ARGUMENTS[:3])
        own = [w for w in weights if w is not None]
        if not isinstance(x, fx.Node) or any(
            not isinstance(w, fx.Node)
            or w.op != "get_attr"
            or not self._own(w)
            or any(user is not node and not looks(user, w) for user in w.users)
            for w in own
        ):
            return
        found: list[Any] = [
            None if w is None else attribute(self.module, w.target) for w in weights
        ]
        numbers = [n for v in given.values() for n in (v if isinstance(v, (tuple, list)) else [v])]
        weight, bias = found
        if (
            not all(t is None or isinstance(t, nn.Parameter) for t in found)
            or not all(isinstance(n, (int, str)) for n in numbers)
            or weight.ndim < 2
            or (bias is not None and bias.shape != weight.shape[:1])
        ):
            return
        kind = _CONVOLUTIONS.get(node.target)
        layer = _linear(*found) if kind is None else _convolution(kind, *found, **given)
        self._becomes(node, title(weights[0]), layer, x)
        for w in own:
            if not w.users:
                self.graph.erase_node(w)

    def _pieces(self, node: fx.Node, inner: Sequence[Inner]) -> None:
        arguments = arguments_of(node)
        assert arguments is not None
        names = {name for pair in inner for name in pair if name is not None}
        tensors = {name: attribute(self.module, arguments[name].target) for name in names}
        shared = {name for name, t in tensors.items() if not self._alone(t)}
        inner = [pair for pair in inner if shared.isdisjoint(pair)]
        if not inner:
            return
        own = {name: arguments.pop(name) for pair in inner for name in pair if name is not None}
        tensors = {name: tensors[name] for name in own}
        function: Any = node.target
        before, after = (Piece(function, inner, tensors, stops=stops) for stops in (True, False))
        up_to = self._add(f"{node.name}.before", before)
        made: list[fx.Node] = []
        with self.graph.inserting_before(node):
            for weight, bias in inner:
                path = plain(str(own[weight].target))
                x = self.graph.call_module(up_to, tuple(made), arguments)
                self._name(x, node, f"before_{weight}")
                layer = _linear(tensors[weight], None if bias is None else tensors[bias])
                made.append(self.graph.call_module(self._add(path, layer), (x,)))
                self._name(made[-1], node, weight)
                made[-1].meta[TITLE_KEY] = path.removesuffix(".weight")
                made[-1].meta[PART_KEY] = self._source(node), path, 0, len(tensors[weight])
        node.op, node.target = "call_module", self._add(f"{node.name}.after", after)
        node.args, node.kwargs = tuple(made), arguments
        for get in own.values():
            if not get.users:
                self.graph.erase_node(get)

    def _add(self, path: str, layer: nn.Module) -> str:
        """Where the layer is put: not inside a module, which is the model's."""
        target = f"unfolded__{len(self.made)}__{path.replace('.', '__')}"
        self.made[target] = layer
        return target

    def _becomes(self, node: fx.Node, path: str, layer: nn.Module, x: fx.Node) -> None:
        node.meta[TITLE_KEY] = path
        node.op, node.target = "call_module", self._add(path, layer)
        node.args, node.kwargs = (x,), {}

    def _source(self, node: fx.Node) -> str:
        found: str = node.meta.get(SOURCE_KEY, node.name)
        return found

    def _name(self, new: fx.Node, node: fx.Node, part: str) -> None:
        """Named after the node, in its graph and in that of the model it comes from."""
        new._rename(f"{node.name}__zipfx_{part}")
        if SOURCE_KEY in node.meta:
            new.meta[SOURCE_KEY] = f"{node.meta[SOURCE_KEY]}__zipfx_{part}"
        if HEAD_KEY in node.meta:
            new.meta[HEAD_KEY] = node.meta[HEAD_KEY]


def _view(t: Tensor, start: int, stop: int) -> nn.Parameter:
    return nn.Parameter(t.data[start:stop], requires_grad=False)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer.eval()


def _convolution(
    kind: Callable[..., nn.modules.conv._ConvNd],
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    **settings: Any,
) -> nn.Module:
    inputs = weight.shape[1] * settings.get("groups", 1)
    kernel = tuple(weight.shape[2:])
    layer = kind(inputs, weight.shape[0], kernel, bias=bias is not None, device="meta", **settings)
    layer.weight, layer.bias = weight, bias
    return layer.eval()


def _core(leaf: nn.MultiheadAttention) -> nn.Module:
    """What is left of attention once its inputs are projected, and before its output is."""
    core = nn.MultiheadAttention(
        leaf.embed_dim, leaf.num_heads, bias=False, batch_first=leaf.batch_first, device="meta"
    )
    same = torch.eye(leaf.embed_dim).to(leaf.out_proj.weight)
    for owner, name, value in (
        (core, "in_proj_weight", same.repeat(3, 1)),
        (core.out_proj, "weight", same),
    ):
        del owner._parameters[name]  # these are none to refit
        owner.register_buffer(name, value)
    return core.eval()
