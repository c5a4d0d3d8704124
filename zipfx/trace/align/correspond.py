"""Correspond: are the K traced models the same network, node by node, up to the cut?

Names may differ between models; order, operations, settings and shapes may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.model.contents import attributes
from zipfx.model.copies import alias
from zipfx.model.graph_module import NAMED, attribute
from zipfx.model.running import untouched
from zipfx.model.tensors import clone_tensors, constant_names, inexact, leaves, named_tensors
from zipfx.modes import as_caller
from zipfx.trace.nodes import describe, tensors_at


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Whether two traced models correspond to the last node."""
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    return mismatch(a, b, len(a.graph.nodes) - 1) is None


def mismatch(a: fx.GraphModule, b: fx.GraphModule, last: int) -> str | None:
    """The first difference of two graphs up to the node of index `last`, node by node: other
    operations or settings, shapes, or weights that are shared otherwise (None: there is none)."""
    nodes_a, nodes_b = list(a.graph.nodes), list(b.graph.nodes)
    at = _positions(a), _positions(b)
    names: dict[str, str] = {}
    owners: dict[int, int] = {}
    for i in range(last + 1):
        if i >= len(nodes_b):
            return f"it ends before {describe(nodes_a[i])}"
        x, y = nodes_a[i], nodes_b[i]
        found = _difference(_summary(a, x, at[0]), _summary(b, y, at[1]))
        if found is not None:
            return f"{describe(x)} and {describe(y)}: {found}"
        if x.op in NAMED:
            if names.setdefault(str(x.target), str(y.target)) != y.target:
                return (
                    f"weights are shared differently: {x.target!r} of model 0 is both "
                    f"{names[str(x.target)]!r} and {y.target!r} in the other"
                )
            for s, t in zip(tensors_at(a, x), tensors_at(b, y), strict=True):
                if owners.setdefault(id(s), id(t)) != id(t):
                    return (
                        f"weights are tied differently at {describe(x)}: a tensor that is one in "
                        "model 0 is two in the other"
                    )
    return None


def differing(a: fx.GraphModule, x: fx.Node, b: fx.GraphModule, y: fx.Node) -> str | None:
    """In what a node of one model differs from a node of another one (None: they do the same)."""
    return _difference(_summary(a, x, _positions(a)), _summary(b, y, _positions(b)))


def _positions(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(module.graph.nodes)}


def _summary(module: fx.GraphModule, node: fx.Node, at: dict[fx.Node, int]) -> dict[str, Any]:
    summary: dict[str, Any] = {"op": node.op}
    if node.op == "call_module":
        leaf = module.get_submodule(str(node.target))
        summary["layer"] = f"{type(leaf).__name__}({leaf.extra_repr()})"
        summary["settings"] = attributes(leaf)
    elif node.op not in ("get_attr", "output", "placeholder"):
        summary["function"] = str(node.target)
    if node.op == "get_attr" and isinstance(attribute(module, str(node.target)), Tensor):
        summary["tensor"] = tuple(attribute(module, str(node.target)).shape)
    summary["shapes"] = [(tuple(t.shape), t.dtype) for t in tensors_at(module, node)]
    if node.op == "placeholder":
        summary["default"] = str(node.args)
    else:
        summary["arguments"] = str(fx.node.map_arg((node.args, node.kwargs), lambda n: _At(at[n])))
    return summary


class _At(str):
    """A node as an argument: its position in the graph."""

    def __new__(cls, index: int) -> _At:
        return super().__new__(cls, f"node {index}")


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    if a == b:
        return None
    for key in a:
        if isinstance(a[key], dict) and isinstance(b.get(key), dict):
            names = [n for n in {**a[key], **b[key]} if a[key].get(n) != b[key].get(n)]
            if names:
                n = names[0]
                return f"{n} is {a[key].get(n)} against {b[key].get(n)}"
        elif a[key] != b.get(key):
            return f"{key} {a[key]} against {b.get(key)}"
    return f"{a} against {b}"


def check_constants(modules: Sequence[fx.GraphModule], last: int) -> None:
    """What a trunk holds besides weights can not be averaged, so it must be equal: integer and
    boolean buffers, buffers that are not persistent, and tensors that are neither."""
    nodes = [list(m.graph.nodes)[: last + 1] for m in modules]
    constants = constant_names(modules[0])
    learned = {id(t) for name, t in named_tensors(modules[0]).items() if name not in constants}
    for k in range(1, len(modules)):
        for node, other in zip(nodes[0], nodes[k], strict=True):
            ours, theirs = tensors_at(modules[0], node), tensors_at(modules[k], other)
            counted = batches_tracked(modules[0], node)
            for s, t in zip(ours, theirs, strict=True):
                fixed = id(s) not in learned or not inexact(s)
                if fixed and not any(s is c for c in counted) and not _same(s, t):
                    kind = "a constant" if inexact(s) else "an integer buffer"
                    raise ZipError(
                        f"{kind} of {describe(node)}, {tuple(s.shape)}, differs between models 0 "
                        f"and {k}: it can not be averaged (only parameters and persistent buffers "
                        "of real numbers can); zip a part before it with partial=..."
                    )


def batches_tracked(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """The counters of the BatchNorms inside a node."""
    leaf = module.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()
    return [b for name, b in leaf.named_buffers() if name.endswith("num_batches_tracked")]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def counterparts(modules: Sequence[fx.GraphModule], last: int) -> dict[int, list[Tensor]]:
    """id of each tensor of model 0's trunk -> the corresponding tensors of all models.

    For a whole network, parameters that the graph does not use are found by their names.
    """
    found: dict[int, list[Tensor]] = {}
    graphs = [list(m.graph.nodes)[: last + 1] for m in modules]
    for nodes in zip(*graphs, strict=True):
        groups = [tensors_at(m, n) for m, n in zip(modules, nodes, strict=True)]
        for tensors in zip(*groups, strict=True):
            found.setdefault(id(tensors[0]), list(tensors))
    if last == len(modules[0].graph.nodes) - 1:
        states = [named_tensors(m) for m in modules]
        for name, t in states[0].items():
            others = [s[name] for s in states if name in s and s[name].shape == t.shape]
            if len(others) == len(states):
                found.setdefault(id(t), others)
    return found


def check_outputs(modules: Sequence[fx.GraphModule], inputs: tuple[Any, ...]) -> None:
    """Check that all models give outputs of the same shapes, as a full zip averages them."""
    shapes = []
    for k, module in enumerate(modules):
        try:
            twin = alias(module).eval()  # what forward keeps in attributes stays there
            with untouched([*twin.parameters(), *twin.buffers()]), as_caller():
                result = fx.Interpreter(twin, graph=module.graph).run(*clone_tensors(inputs))
        except Exception as error:
            raise ZipError(f"model {k} fails on the example inputs: {first_line(error)}") from error
        shapes.append([tuple(t.shape) for t in leaves(result) if isinstance(t, Tensor)])
        if shapes[k] != shapes[0]:
            raise ZipError(
                f"a full zip averages outputs, but model 0 gives shapes {shapes[0]} and model {k} "
                f"{shapes[k]}; keep a head for each model with partial=<the last shared module>"
            )
