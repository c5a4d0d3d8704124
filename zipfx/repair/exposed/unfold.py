"""Unfold: weights that a node keeps inside, or is given, become modules of their own.

A refit stops before each layer of a graph, to see what it reads. `nn.MultiheadAttention` is one
node with four projections in it, and `F.linear(x, weight)` is none that knows its weight. Here such
nodes become several, or a module, on the same memory: what is written there is written to the
model. A function that hands weights on to `F.linear` becomes pieces (`inner_linears`), with those
layers between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.merge import mark
from zipfx.model.graph_module import attribute, plain
from zipfx.model.running import shapes
from zipfx.model.tensors import runs_as
from zipfx.repair.exposed.inner_linears import Inner, Piece, arguments_of, inner_layers
from zipfx.repair.exposed.products import (
    PRODUCTS,
    layer_of_product,
    operands,
    unflattened,
    untransposed,
)
from zipfx.repair.exposed.recurrent import CALLS, is_recurrent, unroll, unroll_call
from zipfx.repair.exposed.splice import (
    Splice,
    erase_unread,
    linear,
    rows_of,
    source_of,
    title,
    with_graph,
)
from zipfx.trace.nodes import looks

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


def unfold(
    module: fx.GraphModule, inputs: Sequence[Any], *, to_write: bool = True
) -> fx.GraphModule:
    """The same graph with `nn.MultiheadAttention`, `F.linear`, `F.conv1d` to `conv3d`, products
    with parameters, functions that call `F.linear` and recurrent layers unfolded; nodes keep their
    names, tensors their memory.

    Args:
        module: a traced model, or a merged one.
        inputs: one value for each placeholder, to see what functions do.
        to_write: leave alone what shares its weights with another node. Else attention is unfolded
            wherever it is, so that its parts have values to read (as are recurrent layers), and
            `F.linear` and convolutions are not: their nodes have those anyway.

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
    splice = Splice(module, to_write)
    calls = [n for n in module.graph.nodes if n.op == "call_module"]
    asked = any(is_recurrent(module.get_submodule(str(n.target))) for n in calls)
    asked |= any(n.target in CALLS for n in module.graph.nodes)
    asked |= to_write and any(n.target in PRODUCTS for n in module.graph.nodes)
    sizes = {n.name: size for n, size in shapes(module, inputs).items()} if asked else {}
    inner = inner_layers(module, inputs)
    for node in list(splice.graph.nodes):
        if node.op == "call_module" and node.target not in splice.made:
            leaf = module.get_submodule(str(node.target))
            if _is_attention(leaf):
                _attention(splice, node, leaf)
            elif is_recurrent(leaf):
                unroll(splice, node, leaf, sizes)
        elif node.target in CALLS:
            unroll_call(splice, node, sizes)
        elif node.target in (*_LINEAR, *_CONVOLUTIONS) and to_write:
            _function(splice, node)
        elif node.target in PRODUCTS and to_write:
            _product(splice, node, sizes)
        elif node.name in inner:
            _pieces(splice, node, inner[node.name])
    return with_graph(module, splice.graph, splice.made)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args)), **node.kwargs}


def reads_as_weight(node: fx.Node, other: fx.Node) -> bool:
    """Whether another node's value is the weight or the bias of a layer that this one applies."""
    applies = node.target in (*_LINEAR, *_CONVOLUTIONS)
    given = _arguments(node) if applies else {}
    return any(given.get(name) is other for name in _ARGUMENTS[1:3])


def _is_attention(leaf: nn.Module) -> bool:
    return isinstance(leaf, nn.MultiheadAttention) and runs_as(leaf, nn.MultiheadAttention)


def _attention(splice: Splice, node: fx.Node, leaf: Any) -> None:
    """Four linear layers, and what mixes positions between them."""
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
    if odd or not outputs or len(read) < len(node.users) or not splice.owns(node):
        return
    with splice.graph.inserting_before(node):
        for i, name in enumerate(_PROJECTIONS):
            layer, owner, rows = _projection(leaf, i)
            target = splice.add(f"{path}.{name}", layer)
            part = splice.call(node, name, target, (given.arguments[name],))
            mark(part, title=f"{path}.{name}", part=(source_of(node), f"{path}.{owner}", *rows))
            given.arguments[name] = part
    node.target = splice.add(f"{path}.mixing", _core(leaf))
    node.args, node.kwargs = given.args, given.kwargs
    first, *others = outputs
    with splice.graph.inserting_before(first):
        mixed = splice.graph.call_function(getitem, (node, 0))
        splice.name(mixed, node, "mixed")
    splice.becomes(first, f"{path}.out_proj", leaf.out_proj, mixed)
    for other in others:
        other.replace_all_uses_with(first)
        splice.graph.erase_node(other)


def _projection(leaf: Any, i: int) -> tuple[nn.Linear, str, tuple[int, int]]:
    """The layer that projects to queries, keys or values, on the memory of the leaf; the name of
    its weight; the rows of that which it has."""
    width, packed = leaf.embed_dim, leaf._qkv_same_embed_dim
    owner = "in_proj_weight" if packed else f"{_PROJECTIONS[i][0]}_proj_weight"
    rows = (i * width, (i + 1) * width) if packed else (0, width)
    bias = leaf.in_proj_bias
    bias = None if bias is None else rows_of(bias, i * width, (i + 1) * width)
    return linear(rows_of(getattr(leaf, owner), *rows), bias), owner, rows


def _function(splice: Splice, node: fx.Node) -> None:
    """`F.linear` or a convolution, given parameters, is a layer."""
    given = _arguments(node)
    x, *weights = (given.pop(name, None) for name in _ARGUMENTS[:3])
    own = [w for w in weights if w is not None]
    if not isinstance(x, fx.Node) or not all(_is_own(splice, node, w) for w in own):
        return
    found: list[Any] = [None if w is None else attribute(splice.module, w.target) for w in weights]
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
    layer = linear(*found) if kind is None else _convolution(kind, *found, **given)
    splice.becomes(node, _path(weights[0]), layer, x)
    erase_unread(splice.graph, own)


def _product(splice: Splice, node: fx.Node, sizes: Mapping[str, Sequence[int]]) -> None:
    """The product of an input with a parameter is a linear layer."""
    given = operands(node)
    x, read, bias = (given.get(name) for name in _ARGUMENTS[:3])
    weight, transposed = untransposed(read)
    reader: Any = read if transposed else node
    turned = transposed ^ given.get("turned", False)
    if not isinstance(x, fx.Node) or not _is_own(splice, reader, weight):
        return
    if bias is not None and not _is_own(splice, node, bias):
        return
    found = [None if w is None else attribute(splice.module, w.target) for w in (weight, bias)]
    kernel, offset = found
    if (
        not all(t is None or isinstance(t, nn.Parameter) for t in found)
        or kernel is None
        or kernel.ndim != 2
        or (offset is not None and offset.shape != kernel.shape[0 if turned else 1 :][:1])
    ):
        return
    end, whole = unflattened(node, x, sizes)
    layer = layer_of_product(kernel, offset, turned=turned)
    splice.becomes(end, _path(weight), layer, whole)
    made = [node] if end is not node else []
    left = dict.fromkeys([*made, x, read, weight, bias])
    erase_unread(splice.graph, [n for n in left if isinstance(n, fx.Node)])


def _is_own(splice: Splice, node: fx.Node, w: Any) -> bool:
    """Whether a weight is a tensor of the module that this node alone reads."""
    if not isinstance(w, fx.Node) or w.op != "get_attr" or not splice.owns(w):
        return False
    return all(user is node or looks(user, w) for user in w.users)


def _pieces(splice: Splice, node: fx.Node, inner: Sequence[Inner]) -> None:
    """A function that calls `F.linear` becomes what it does before, between and after these."""
    arguments = arguments_of(node)
    assert arguments is not None
    names = {name for pair in inner for name in pair if name is not None}
    tensors = {name: attribute(splice.module, arguments[name].target) for name in names}
    shared = {name for name, t in tensors.items() if not splice.alone(t)}
    inner = [pair for pair in inner if shared.isdisjoint(pair)]
    if not inner:
        return
    own = {name: arguments.pop(name) for pair in inner for name in pair if name is not None}
    tensors = {name: tensors[name] for name in own}
    function: Any = node.target
    before, after = (Piece(function, inner, tensors, stops=stops) for stops in (True, False))
    up_to = splice.add(f"{node.name}.before", before)
    made: list[fx.Node] = []
    with splice.graph.inserting_before(node):
        for weight, bias in inner:
            path = plain(str(own[weight].target))
            x = splice.call(node, f"before_{weight}", up_to, tuple(made), arguments)
            layer = linear(tensors[weight], None if bias is None else tensors[bias])
            made.append(splice.call(node, weight, splice.add(path, layer), (x,)))
            part = (source_of(node), path, 0, len(tensors[weight]))
            mark(made[-1], title=_path(own[weight]), part=part)
    node.op, node.target = "call_module", splice.add(f"{node.name}.after", after)
    node.args, node.kwargs = tuple(made), arguments
    erase_unread(splice.graph, own.values())


def _path(weight: fx.Node) -> str:
    """Of the layer that a weight belongs to."""
    return title(weight).removesuffix(".weight")


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
