"""Tidy: what is done to a graph once it is recorded, before anything is made of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from zipfx.model.calls.expect import (
    Expectation,
    expect_absent,
    expect_equal,
    expect_given,
    expect_parts,
    form,
)
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
        if isinstance(value, (dict, list, tuple)) and node.users:
            found.append(Expectation(name, expect_parts, (form(value, exact=False),)))
        if node in decisive and isinstance(value, (bool, int, float, str)):
            found.append(Expectation(name, expect_equal, (value,)))
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
