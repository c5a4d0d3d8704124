"""Cut: where the trunk ends and the heads begin, going by the name of a module."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection, Sequence

from torch import fx, nn

from zipfx.errors import ZipError
from zipfx.model.graph_module import plain
from zipfx.trace.nodes import module_paths


def last_node(module: fx.GraphModule, partial: str | None) -> int:
    """Index of the last node of the module named `partial` (None: of the whole graph); of a
    container that is not called itself, of what is in it.

    Raises:
        ZipError: no such module, or it is not used; names that are near in the graph are suggested.
    """
    nodes = list(module.graph.nodes)
    if partial is None:
        return len(nodes) - 1
    inside = [
        i
        for i, node in enumerate(nodes)
        if any(p == partial or p.startswith(f"{partial}.") for p in module_paths(node))
    ]
    if inside and partial:
        return inside[-1]
    known = list(dict.fromkeys(p for node in nodes for p in module_paths(node) if p))
    raise ZipError(f"partial={partial!r} {_not_a_cut(module, partial, known)}")


def first_name(module: fx.GraphModule, path: str) -> str:
    """The name by which the graph knows a module that may have several, or the path itself."""
    known = {p for node in module.graph.nodes for p in module_paths(node)}
    if not any(p == path or p.startswith(f"{path}.") for p in known):
        every: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
        for name in (name for name, m in every.items() if m is every.get(path)):
            if any(p == name or p.startswith(f"{name}.") for p in known):
                return name
    return path


def _not_a_cut(module: fx.GraphModule, partial: str, known: Sequence[str]) -> str:
    """Why a name is none of a module that runs, and which ones are near it."""
    leaves = [plain(str(n.target)) for n in module.graph.nodes if n.op == "call_module"]
    around = [leaf for leaf in leaves if partial.startswith(f"{leaf}.")]
    if around:
        kind = type(module.get_submodule(around[-1])).__name__
        return f"lies inside {around[-1]!r}, a {kind} that is one node of the graph: choose that"
    parts = partial.split(".")
    prefixes = (".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1))
    near = next(found for p in prefixes if (found := _children(known, p)))
    ranked = difflib.get_close_matches(partial, near, n=3, cutoff=0) or near[-3:]
    there = partial in dict(module.named_modules(remove_duplicate=False))
    what = "is a module that the model does not run" if there else "names no module"
    return f"{what}; near it in the graph are {sorted(ranked, key=near.index)}"


def _children(known: Sequence[str], prefix: str) -> list[str]:
    """The modules right inside one that run, in the order of the graph."""
    depth = prefix.count(".") + 2 if prefix else 1
    inside = (p for p in known if not prefix or p.startswith(f"{prefix}."))
    return list(dict.fromkeys(".".join(p.split(".")[:depth]) for p in inside))


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
