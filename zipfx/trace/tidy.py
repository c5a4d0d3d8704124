"""Tidy: what is done to a graph once it is recorded, before anything is made of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import fx
from torch.utils._pytree import tree_unflatten

from zipfx.errors import ZipError
from zipfx.model.calls import Expectation, expect_absent, expect_equal, expect_given
from zipfx.trace.nodes import ancestors, is_in_place


def written_in_place(graph: fx.Graph) -> set[str]:
    """The parameters and buffers that nodes write to by their own names."""
    writers = (n for n in graph.nodes if is_in_place(n.target) and n.all_input_nodes)
    return {str(first.target) for n in writers if (first := n.all_input_nodes[0]).op == "get_attr"}


def drop_answered(graph: fx.Graph, asked: set[fx.Node]) -> None:
    """Erase what was computed only to answer a question of Python."""
    asked = set(asked)
    for node in reversed(list(graph.nodes)):
        function = getattr(node.target, "__name__", "")
        pure = (node.op == "call_method" and node.target in ("size", "dim", "numel")) or (
            node.op == "call_function"
            and (node.target is getattr or node.target is getattr(operator, function, None))
            and not function.startswith("i")  # iadd and the like write
            and node.target is not operator.setitem
        )
        if node in asked and pure and not node.users:
            asked.update(node.all_input_nodes)
            graph.erase_node(node)


def expectations(
    graph: fx.Graph, inputs: Sequence[Any], asked: Collection[fx.Node]
) -> list[Expectation]:
    """What a graph that was traced with these inputs takes for granted of others: what was None, or
    was not, and settings that Python went by."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs):  # a tracer of the caller's has others
        return []
    decisive = {*asked, *ancestors(asked)}
    found = []
    for node, value in zip(placeholders, inputs, strict=True):
        name = str(node.target)
        if value is None and not node.users:
            found.append(Expectation(name, expect_absent))
        elif value is not None and node.args == (None,) and node.users:
            found.append(Expectation(name, expect_given))
        if node in decisive and isinstance(value, (bool, int, float, str)):
            found.append(Expectation(name, expect_equal, value))
    return found


def give_defaults(graph: fx.Graph) -> None:
    """Arguments that must be named may come in any order; those of a graph have defaults last."""
    optional = False
    for node in graph.nodes:
        if node.op == "placeholder" and not str(node.target).startswith("*"):
            if optional and not node.args:
                node.args = (None,)
            optional |= bool(node.args)


_RESHAPED = {"unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "t_", "resize_", "resize_as_"}


def sink_shapes(graph: fx.Graph) -> None:
    """Move nodes that only look at shapes next to their first user.

    A segmenter asks for the size of its input first and uses it last; between models with the same
    trunk such a node must not make a difference, nor lie in the trunk when only a head needs it.
    """
    shapes: set[fx.Node] = set()
    for node in graph.nodes:
        of = node.all_input_nodes
        looks = (node.op == "call_method" and node.target in ("size", "dim", "numel")) or (
            node.target is getattr and node.args[1] in ("shape", "dtype", "device", "ndim")
        )
        steady = all(user.target not in _RESHAPED for n in of for user in n.users)
        plain = node.op == "call_function" and of and all(n in shapes for n in of)
        if (looks and steady) or plain:
            shapes.add(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed([n for n in graph.nodes if n in shapes and n.users]):
        min(node.users, key=order.__getitem__).prepend(node)
        order = {n: i for i, n in enumerate(graph.nodes)}


def packed(graph: fx.Graph, name: str) -> fx.Graph:
    """The graph with one placeholder for each argument, and what forward returns as its output.

    name: of the model, for messages.

    Raises:
        ZipError: forward takes or returns containers that a graph can not hold.
    """
    info = getattr(graph._codegen, "pytree_info", None)
    if info is None:
        return graph
    *nodes, output = graph.nodes
    flat = [node for node in nodes if node.op == "placeholder"]
    copied = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    args, kwargs = tree_unflatten(flat, info.in_spec)
    given = dict(zip(info.orig_args, args)) | dict(kwargs)
    if list(given) != list(info.orig_args):
        raise ZipError(f"forward of {name} takes {info.orig_args}, and its graph {list(given)}")
    whole = {key: copied.placeholder(key) for key in given}
    for key, value in given.items():
        for leaf, path in _leaves(value, f"argument {key!r} of {name}"):
            node = whole[key]
            for step in path:
                node = copied.call_function(operator.getitem, (node, step))
            node.meta |= leaf.meta
            seen[leaf] = node
    for node in nodes:
        if node.op != "placeholder":
            seen[node] = copied.node_copy(node, seen.__getitem__)
    found: Any = output.args[0]
    result = tree_unflatten(list(found), info.out_spec)
    list(_leaves(result, f"the output of {name}"))  # checks its containers
    copied.output(fx.node.map_arg(result, seen.__getitem__))
    return copied


def _leaves(value: Any, what: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[fx.Node, Any]]:
    """The nodes in nested containers, and the keys that lead to them."""
    if isinstance(value, fx.Node):
        yield value, path
    elif type(value) in (dict, list, tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _leaves(entry, what, (*path, key))
    elif not isinstance(value, (bool, int, float, str, type(None))):
        raise ZipError(
            f"{what} holds a {type(value).__name__}, which no graph can: export a module that "
            "takes and returns tensors, tuples, lists and dicts"
        )
