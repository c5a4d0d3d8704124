"""Correspond: are the K traced models the same network, node by node, up to the cut?

Names may differ between models; order, operations, settings and shapes may not.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.interpret import describe
from zipfx.precision import inexact
from zipfx.spaces import Space
from zipfx.trace import clone_tensors, leaves, named_tensors


def module_paths(node: fx.Node) -> list[str]:
    """Qualified names of the modules a traced node lies in, outermost first."""
    return [str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values()]


def last_node(module: fx.GraphModule, partial: str | None) -> int:
    """Index of the last node of the module named `partial` (None: of the whole graph).

    Raises:
        ZipError: no such module, or it is not used; the nearest names are suggested.
    """
    nodes = list(module.graph.nodes)
    if partial is None:
        return len(nodes) - 1
    inside = [i for i, node in enumerate(nodes) if partial in module_paths(node)]
    if inside:
        return inside[-1]
    known = list(dict.fromkeys(path for node in nodes for path in module_paths(node)))
    near = difflib.get_close_matches(partial, known, n=3, cutoff=0.4) or known[:5]
    raise ZipError(
        f"partial={partial!r} names no module that the model runs; the nearest names are {near}"
    )


def unpacked(modules: Sequence[fx.GraphModule], last: int, tuples: Collection[int]) -> int:
    """The last node of the trunk, once it has taken apart the tuples it made (nn.LSTM's result).

    tuples: indices of the nodes whose result is no tensor; all models must take the same items.
    """
    graphs = [list(m.graph.nodes) for m in modules]
    at = [{node: i for i, node in enumerate(nodes)} for nodes in graphs]
    while last + 1 < min(map(len, graphs)):
        nodes = [nodes[last + 1] for nodes in graphs]
        if any(
            n.target is not operator.getitem or not isinstance(n.args[0], fx.Node) for n in nodes
        ):
            break
        items = [(at[k][n.args[0]], str(n.args[1])) for k, n in enumerate(nodes)]
        if len(set(items)) > 1 or items[0][0] not in tuples:
            break
        last += 1
    return last


def check_models(models: Any) -> None:
    """At least two modules, with everything on one device and in corresponding dtypes."""
    if not isinstance(models, Sequence) or len(models) < 2:
        count = len(models) if isinstance(models, Sequence) else f"a {type(models).__name__}"
        raise ZipError(f"pass a list of at least two models; got {count}")
    for k, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ZipError(f"model {k} is a {type(model).__name__}, not a torch.nn.Module")
        if hasattr(model, "_orig_mod"):
            raise ZipError(
                f"model {k} was compiled (torch.compile): pass the module itself, and compile what "
                "comes out"
            )
    _check_devices(models)


def _check_devices(models: Sequence[nn.Module]) -> None:
    """All parameters of all models lie on one device, and corresponding ones share a dtype."""
    kinds = []
    for model in models:
        tensors = [*model.parameters(), *model.buffers()]
        devices = sorted({str(t.device) for t in tensors})
        dtypes = sorted({str(t.dtype) for t in tensors if inexact(t)})
        kinds.append((devices, dtypes))
    for k, kind in enumerate(kinds):
        for what, ours, theirs in zip(("devices", "dtypes"), kinds[0], kind, strict=True):
            if ours != theirs:
                raise ZipError(
                    f"the models have different {what}: model 0 {ours}, model {k} {theirs}; move "
                    "them to one first (model.to(...))"
                )
        if len(kind[0]) > 1:
            raise ZipError(f"model {k} is spread over devices {kind[0]}; move it to one first")


def correspond(modules: Sequence[fx.GraphModule], last: int) -> None:
    """Check that nodes 0..last of all graphs do the same.

    Raises:
        ZipError: the first pair of nodes that differs, with both models' settings.
    """
    for k in range(1, len(modules)):
        _correspond(modules[0], modules[k], k, last)


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Whether two traced models correspond to the last node."""
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    try:
        _correspond(a, b, 1, len(a.graph.nodes) - 1)
    except ZipError:
        return False
    return True


def _correspond(a: fx.GraphModule, b: fx.GraphModule, k: int, last: int) -> None:
    nodes_a, nodes_b = list(a.graph.nodes), list(b.graph.nodes)
    names: dict[str, str] = {}
    owners: dict[int, int] = {}
    at_a = {n: i for i, n in enumerate(nodes_a)}
    at_b = {n: i for i, n in enumerate(nodes_b)}
    for i in range(last + 1):
        if i >= len(nodes_b):
            raise ZipError(
                f"models 0 and {k} do not correspond: model {k} ends before "
                f"{describe(nodes_a[i])} of model 0; zip a part with partial=... that both share"
            )
        x, y = nodes_a[i], nodes_b[i]
        left, right = _summary(a, x, at_a), _summary(b, y, at_b)
        if left != right:
            raise ZipError(
                f"models 0 and {k} do not correspond at {describe(x)} of model 0 and {describe(y)} "
                f"of model {k}: {_difference(left, right)}. Only models of one architecture can be "
                "zipped; if they differ only later, choose partial=... before this node"
            )
        if x.op in ("call_module", "get_attr"):
            if names.setdefault(str(x.target), str(y.target)) != y.target:
                raise ZipError(
                    f"models 0 and {k} share weights differently: {x.target!r} of model 0 is both "
                    f"{names[str(x.target)]!r} and {y.target!r} in model {k}"
                )
            for s, t in zip(tensors_at(a, x), tensors_at(b, y), strict=True):
                if owners.setdefault(id(s), id(t)) != id(t):
                    raise ZipError(
                        f"models 0 and {k} tie weights differently at {describe(x)}: a tensor that "
                        "is one in model 0 is two in the other; tie or untie them alike"
                    )


def tensors_at(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Parameters and buffers that a node owns: of its module, or the attribute it gets."""
    if node.op == "call_module":
        leaf = module.get_submodule(str(node.target))
        return [t for _, t in (*leaf.named_parameters(), *leaf.named_buffers())]
    if node.op == "get_attr":
        value = attribute(module, str(node.target))
        return [value] if isinstance(value, Tensor) else []
    return []


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    parent, _, name = path.rpartition(".")
    return getattr(module.get_submodule(parent), name)


def _summary(module: fx.GraphModule, node: fx.Node, at: dict[fx.Node, int]) -> dict[str, Any]:
    summary: dict[str, Any] = {"op": node.op}
    if node.op == "call_module":
        leaf = module.get_submodule(str(node.target))
        summary["layer"] = f"{type(leaf).__name__}({leaf.extra_repr()})"
        summary["settings"] = settings(leaf)
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


def settings(leaf: nn.Module) -> dict[str, str]:
    """The plain attributes of a module and its children: not all of them are in extra_repr."""
    plain = (bool, int, float, str, tuple, list, torch.dtype, type(None))
    return {
        f"{path}.{key}".lstrip("."): repr(value)
        for path, module in leaf.named_modules()
        for key, value in vars(module).items()
        if key != "training" and not key.startswith("_") and isinstance(value, plain)
    }


class _At(str):
    """A node as an argument: its position in the graph."""

    def __new__(cls, index: int) -> _At:
        return super().__new__(cls, f"node {index}")


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    for key in a:
        if isinstance(a[key], dict) and isinstance(b.get(key), dict):
            names = [n for n in {**a[key], **b[key]} if a[key].get(n) != b[key].get(n)]
            if names:
                n = names[0]
                return f"{n} is {a[key].get(n)} against {b[key].get(n)}"
        elif a[key] != b.get(key):
            return f"{key} {a[key]} against {b.get(key)}"
    return f"{a} against {b}"


def check_integers(modules: Sequence[fx.GraphModule], last: int) -> None:
    """Integer and boolean buffers of a trunk can not be averaged: they must be equal."""
    nodes = [list(m.graph.nodes)[: last + 1] for m in modules]
    for k in range(1, len(modules)):
        for node, other in zip(nodes[0], nodes[k], strict=True):
            ours, theirs = tensors_at(modules[0], node), tensors_at(modules[k], other)
            for s, t in zip(ours, theirs, strict=True):
                counts = s.ndim == 0  # num_batches_tracked
                if not inexact(s) and not counts and not torch.equal(s, t):
                    raise ZipError(
                        f"an integer buffer of {describe(node)} differs between models 0 and {k}: "
                        "it can not be averaged; zip a part before it with partial=..."
                    )


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


def check_finite(parameters: Mapping[str, Sequence[Tensor]], spaces: Iterable[Space]) -> None:
    """Check the parameters along which features lie, where no activations were looked at.

    Args:
        parameters: of all models, by name.
    """
    for name in sorted({axis.parameter for space in spaces for axis in space.axes}):
        for k, t in enumerate(parameters.get(name, ())):
            if not bool(t.isfinite().all()):
                raise ZipError(f"parameter {name!r} of model {k} holds NaN or Inf")


def check_outputs(modules: Sequence[fx.GraphModule], inputs: tuple[Any, ...]) -> None:
    """Check that all models give outputs of the same shapes, as a full zip averages them."""
    shapes = []
    for k, module in enumerate(modules):
        try:
            result = module(*clone_tensors(inputs))
        except Exception as error:
            raise ZipError(f"model {k} fails on the example inputs: {first_line(error)}") from error
        shapes.append([tuple(t.shape) for t in leaves(result) if isinstance(t, Tensor)])
        if shapes[k] != shapes[0]:
            raise ZipError(
                f"a full zip averages outputs, but model 0 gives shapes {shapes[0]} and model {k} "
                f"{shapes[k]}; keep a head for each model with partial=<the last shared module>"
            )
