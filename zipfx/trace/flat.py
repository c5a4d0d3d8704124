"""Flat: graphs that take and give flat lists, and whose code packs them, as `torch.export` writes.

The graph of a merge is another one, so that this code would be lost: its inputs and outputs are the
arguments of forward, and what that returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils._pytree import tree_unflatten

from zipfx.errors import ZipError


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
