"""Written: graphs that torch.export wrote, as the contract of fronts has them.

There every tensor inside of containers is an input and an output of its own, all weights are read
first, sizes and devices are asserted, and a device is a constant.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from zipfx.errors import ZipError
from zipfx.model.calls.arguments import Argument

aten = torch.ops.aten
#: nodes that check, and compute nothing
_CHECKS = (
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size",
)  # fmt: skip
AGAIN = re.compile(r"@\d+")  # of a module that is called once more
#: where a node says by which calls of modules it came to be, outermost first: {call: path}
CALL = "zipfx_call"


def is_written(graph: fx.Graph) -> bool:
    """Whether torch.export has written a graph, containers taken apart."""
    return getattr(graph._codegen, "pytree_info", None) is not None


def rewritten(
    module: fx.GraphModule, name: str, arguments: Sequence[Argument] | None = None
) -> fx.Graph:
    """The graph of a module that torch.export wrote, as the contract has it.

    name: of the model, for messages; arguments: those of its forward (None: those that it was
    exported with; then what looks at their sizes stays).

    Raises:
        ZipError: forward takes or returns containers that a graph can not hold, or branches on
            data in ways that a graph of aten calls can not follow.
    """
    graph = module.graph
    info: Any = graph._codegen.pytree_info  # type: ignore[attr-defined]
    flat = [node for node in graph.nodes if node.op == "placeholder"]
    args, kwargs = tree_unflatten(flat, info.in_spec)
    copied, seen = fx.Graph(), dict[fx.Node, Any]()
    own = arguments is None
    if arguments is None:
        whole = dict(zip(info.orig_args, args)) | dict(kwargs)
        if list(whole) != list(info.orig_args):
            raise ZipError(f"forward of {name} takes {info.orig_args}, and its graph {list(whole)}")
        arguments = [Argument(key) for key in whole]
        values = list(whole.values())
    else:
        by_place = iter(args)
        values = [kwargs[a.name] if a.by_name else next(by_place) for a in arguments]
    inputs = [
        copied.create_node("placeholder", a.name, a.default, type_expr=a.annotation)
        for a in arguments
    ]
    for a, whole_input, value in zip(arguments, inputs, values, strict=True):
        for leaf, path in _leaves(value, f"argument {a.name!r} of {name}"):
            node = whole_input
            for step in path:
                node = copied.call_function(operator.getitem, (node, step))
            seen[leaf] = node
    _Copying(copied, seen, name, guarded=own).all_of(module)
    (output,) = (node for node in graph.nodes if node.op == "output")
    found = [seen[x] if isinstance(x, fx.Node) else x for x in output.args[0]]
    copied.output(_built(copied, info.out_spec, iter(found), f"the output of {name}"))
    drop_unread(copied)
    return copied


def drop_unread(graph: fx.Graph) -> None:
    """Leave out what nobody reads, but for calls of modules, and what writes."""
    graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())


class _Copying:
    """Copies nodes: checks are left out, weights are read where they are used, and the device is
    that of the first input."""

    def __init__(
        self, graph: fx.Graph, seen: dict[fx.Node, Any], name: str, *, guarded: bool
    ) -> None:
        self.graph, self.seen, self.name, self.guarded = graph, seen, name, guarded
        tensors = [n for n, twin in seen.items() if isinstance(n.meta.get("val"), Tensor)]
        self.like = seen[tensors[0]] if tensors else None
        self.home = tensors[0].meta["val"].device if tensors else None

    def all_of(self, module: fx.GraphModule) -> Any:
        """Copy the nodes of a module; what its output becomes."""
        written = _written(module.graph)
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output") or _checks(node):
                continue
            if node.target == "_guards_fn" and not self.guarded:
                continue
            if node.op == "get_attr" and node not in written:
                continue  # read again wherever it is used
            if str(getattr(node.target, "namespace", "")) == "higher_order":
                self._inline(node, module)
            elif node.target is operator.getitem and isinstance(
                parts := self.seen.get(node.args[0]), (tuple, list)
            ):
                self.seen[node] = parts[node.args[1]]
            else:
                self.seen[node] = self._copied(node)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        for node in output.all_input_nodes:
            if node not in self.seen:
                self._read(node, output)
        return fx.node.map_arg(output.args[0], self.seen.__getitem__)

    def _inline(self, node: fx.Node, module: fx.GraphModule) -> None:
        """The nodes of a graph inside a graph, where it makes no difference that it is one: under
        another mode of autograd, or with autocast switched off.

        Raises:
            ZipError: it makes one.
        """
        name = getattr(node.target, "__name__", str(node.target))
        why = {
            "wrap_with_autocast": "forward enters torch.autocast, which a graph does not hold; "
            "leave autocast to who calls the model"
        }.get(name, "forward branches or loops on data, which can not be analysed")
        count = {"wrap_with_set_grad_enabled": 2, "wrap_with_autocast": 5}.get(name, 0)
        body = node.args[count - 1] if count else None
        if not isinstance(body, fx.Node) or (name == "wrap_with_autocast" and node.args[2]):
            raise ZipError(
                f"the graph that torch.export wrote of {self.name} holds {name} at node "
                f"{node.name!r}: {why}"
            )
        inner: Any = module.get_submodule(str(body.target))
        inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source is not body and source not in self.seen:
                self._read(source, node)
        for placeholder, given in zip(inputs, node.args[count:], strict=True):
            self.seen[placeholder] = self.seen[given] if isinstance(given, fx.Node) else given
        self.seen[node] = self.all_of(inner)

    def _copied(self, node: fx.Node) -> fx.Node:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in self.seen:
                self._read(source, node)
        twin = self.graph.node_copy(node, self.seen.__getitem__)
        for source in node.all_input_nodes:
            if source.op == "get_attr" and len(source.users) > 1 and not _written_to(source):
                self.seen.pop(source, None)
        twin.meta = _meta(node)
        if self.home is not None and self.home in tree_leaves((twin.args, twin.kwargs)):
            self._free(twin)
        return twin

    def _read(self, node: fx.Node, user: fx.Node) -> None:
        """Read a weight, in the module that uses it."""
        self.seen[node] = twin = self.graph.node_copy(node)
        twin.meta = _meta(user)

    def _free(self, node: fx.Node) -> None:
        """Ask for the device, which is wherever the first input is."""
        with self.graph.inserting_before(node):
            device = self.graph.call_function(getattr, (self.like, "device"))
        device.meta = dict(node.meta)
        swapped = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: device if a == self.home else a
        )
        node.args, node.kwargs = swapped


def _written(graph: fx.Graph) -> set[fx.Node]:
    return {node for node in graph.nodes if node.op == "get_attr" and _written_to(node)}


def _written_to(node: fx.Node) -> bool:
    """Whether a node writes to what another one reads."""
    return any(_writes(user, node) for user in node.users)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    first = bool(user.args) and user.args[0] is node
    return bool(schema is not None and schema.is_mutable and first)


def _checks(node: fx.Node) -> bool:
    name = str(getattr(getattr(node.target, "_schema", None), "name", "")).rpartition("::")[2]
    return (name or getattr(node.target, "__name__", "")) in _CHECKS


def _meta(node: fx.Node) -> dict[str, Any]:
    """What is kept of a node: the modules it came from, and by which calls of them."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    known = {
        key: (str(path), cls)
        for key, (path, cls) in stack.items()
        if not str(path).startswith("_empty_nn_module_stack")
    }
    if not known:
        return {}
    plain = {key: (AGAIN.sub("", path), cls) for key, (path, cls) in known.items()}
    calls = {(key, path): plain[key][0] for key, (path, _) in known.items()}  # one has the "@1"
    return {"nn_module_stack": plain, CALL: calls}


def _leaves(value: Any, what: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[fx.Node, Any]]:
    """The nodes in nested containers, and the keys that lead to them."""
    if isinstance(value, fx.Node):
        yield value, path
    elif type(value) in (dict, list, tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _leaves(entry, what, (*path, key))
    elif not isinstance(value, (bool, int, float, str, type(None))):
        raise _no_container(what, type(value))


def _no_container(what: str, kind: Any) -> ZipError:
    return ZipError(
        f"{what} holds a {kind.__name__}, which no graph can: export a module that takes and "
        "returns tensors, tuples, lists, dicts, named tuples, and dataclasses that torch.export "
        "knows"
    )


def _built(graph: fx.Graph, spec: TreeSpec, left: Iterator[Any], what: str) -> Any:
    """What forward returns, made of its leaves; classes are called with what they hold."""
    if spec.is_leaf():
        return next(left)
    kind: Any = spec.type
    parts = [_built(graph, child, left, what) for child in spec.children()]
    if kind in (tuple, list):
        return kind(parts)
    if kind is dict:
        return dict(zip(spec.context, parts, strict=True))
    if hasattr(spec.context, "_fields"):
        return spec.context(*parts)
    names = _names(spec)
    if names is None:
        raise _no_container(what, kind)
    return graph.call_function(kind, (), dict(zip(names, parts, strict=True)))


def _names(spec: TreeSpec) -> list[str] | None:
    """The names by which a class takes what it holds; None: it is not known how it is made."""
    context: Any = spec.context
    for names in (context, context[0] if isinstance(context, (list, tuple)) and context else None):
        if not isinstance(names, (list, tuple)) or len(names) != len(spec.children()):
            continue
        if not all(isinstance(n, str) and n.isidentifier() for n in names):
            continue
        blanks = [torch.zeros(()) for _ in range(spec.num_leaves)]
        left = iter(blanks)
        parts = [tree_unflatten([next(left) for _ in range(c.num_leaves)], c)
                 for c in spec.children()]  # fmt: skip
        try:
            again = tree_flatten(spec.type(**dict(zip(names, parts, strict=True))))[1]
        except Exception:  # a class of the caller's
            continue
        if again == spec:
            return list(names)
    return None
