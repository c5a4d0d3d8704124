"""Nodes: what is asked about the nodes of a traced graph.

How messages name them, which module they lie in, which tensors are theirs, and what they depend on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from zipfx.model.graph_module import attribute, plain

_WRITES = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


def name_of(target: Any) -> str:
    """Of a function or a method, without the overload of an aten call.

    >>> import torch
    >>> name_of(torch.relu), name_of("view"), name_of(torch.ops.aten.add_.Tensor)
    ('relu', 'view', 'add_')
    """
    target = getattr(target, "overloadpacket", target)
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def is_in_place(target: Any) -> bool:
    """Whether a function or a method writes to its first argument, going by its name."""
    name = name_of(target)
    return target in _WRITES or (name.endswith("_") and name[-2:-1] != "_")


def describe(node: fx.Node) -> str:
    """A node as messages name it: its name, and the module path or function it calls."""
    target = (
        plain(node.target)
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    path = module_path(node)
    place = f" in module {path!r}" if path not in ("", target) else ""
    return f"node {node.name!r} ({node.op} {target}{place})"


def spot(node: fx.Node) -> str:
    path = module_path(node)
    return f"node {node.name!r}" + (f" in module {path!r}" if path else "")


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost module that a traced node lies in ("": the model itself)."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def module_paths(node: fx.Node) -> list[str]:
    """Qualified names of the modules a traced node lies in, outermost first."""
    return [str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values()]


def tensors_at(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Parameters and buffers that a node owns: of its module, or the attribute it gets."""
    if node.op == "call_module":
        leaf = module.get_submodule(str(node.target))
        return [t for _, t in (*leaf.named_parameters(), *leaf.named_buffers())]
    if node.op == "get_attr":
        value = attribute(module, str(node.target))
        return [value] if isinstance(value, Tensor) else []
    return []


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads."""
    return node.all_input_nodes


def ancestors(
    nodes: Iterable[fx.Node], inputs: Callable[[fx.Node], Sequence[fx.Node]] = inputs_of
) -> list[fx.Node]:
    """All that some nodes depend on, each once; inputs: which nodes a node depends on directly.

    >>> graph = fx.symbolic_trace(lambda x, y: (x + 1).relu() * y).graph
    >>> [node.name for node in ancestors([node for node in graph.nodes if node.name == "relu"])]
    ['add', 'x']
    """
    found: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        new = [n for n in inputs(stack.pop()) if n not in found]
        found |= dict.fromkeys(new)
        stack += new
    return list(found)


_ASKED = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")


_ASKS = ("size", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "new_zeros")


_LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")  # of what they are given second


def looks(node: fx.Node, at: fx.Node) -> bool:
    """Whether a node asks for the shape, dtype or device of another one, and not for its values."""
    first, *others = node.args or (None,)
    if node.op == "call_method":
        asks, like = node.target in _ASKS, node.target in _LIKE
        return (asks and first is at) or (like and first is not at and at in others)
    return node.target is getattr and first is at and others[0] in _ASKED


def only_looked_at(node: fx.Node) -> bool:
    """Whether a node reads a tensor of the module, for whose values no other node asks."""
    read = node.op == "get_attr" and bool(node.users)
    return read and all(looks(user, node) for user in node.users)
