"""Raised: the aten calls that a layer of torch came to become a call of that layer again.

torch.export looks into every module. What comes out of it for an `nn.Linear` is a call of linear
with two weights, for an LSTM dozens. With the layers back a merge has the layers of the model, and
is matched and repaired as one that torch.fx has traced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten_with_path

from zipfx.model.copies import alias
from zipfx.model.graph_module import attribute, reached
from zipfx.model.running import untouched
from zipfx.model.tensors import clone_tensors, close
from zipfx.modes import as_caller
from zipfx.trace.fronts.symbolic import OPENED
from zipfx.trace.fronts.written import CALL, drop_unread

#: modules that take sizes of their input to what they compute
_OF_ANY_SIZE = (nn.MultiheadAttention, nn.RNNBase)
_SIZES = (torch.ops.aten.sym_size.int,)
_LOOKED_INTO = (*OPENED, nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class _Call:
    """The nodes of one call of a module, what they read of others, and what others read of them.

    outputs: by node, the path to it in what the module returns (None: it is not known).
    """

    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    outputs: dict[fx.Node, tuple[Any, ...] | None] = field(default_factory=dict)

    def source(self, sizes: Collection[fx.Node] = ()) -> fx.Node | None:
        """The only value that comes from elsewhere; None: there are others, or none.

        sizes: nodes that are no values, but sizes of one.
        """
        own = {*self.nodes, *sizes}
        found = dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes)
        outside = [n for n in found if n not in own]
        return outside[0] if len(outside) == 1 and outside[0].op != "get_attr" else None

    def read(self) -> list[fx.Node]:
        """The nodes that others read."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]


def raise_calls(root: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Put calls of modules back into a graph, wherever they give what the nodes give on the inputs.

    Args:
        root: a graph of aten calls, whose nodes have `CALL` in their meta; changed in place.
        inputs: one value for each placeholder.
    """
    graph = root.graph
    sizes = _sizes(graph)
    calls = {}
    for call in _calls(graph, root, sizes):
        if not _owns_its_weights(root, call):
            continue
        open_to_sizes = isinstance(root.get_submodule(call.path), _OF_ANY_SIZE)
        if (source := call.source(sizes if open_to_sizes else ())) is not None:
            calls[source, call.nodes[0]] = call
    runner = _Runner(graph, root, calls)
    with untouched([*root.parameters(), *root.buffers()]), torch.no_grad(), as_caller():
        runner.run(*clone_tensors(tuple(inputs)))
    now: dict[fx.Node, fx.Node] = {}
    for (source, _), call in calls.items():
        if call.outputs and all(path is not None for path in call.outputs.values()):
            extra = _extra(root.get_submodule(call.path))
            now |= _replace(graph, call, now.get(source, source), extra)
    for node in graph.nodes:
        node.meta.pop(CALL, None)
    drop_unread(graph)
    root.recompile()


def _owns_its_weights(root: fx.GraphModule, call: _Call) -> bool:
    """Whether all tensors that are read in a call are the module's (no state that it is given)."""
    module = root.get_submodule(call.path)
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    read = [attribute(root, str(n.target)) for n in call.nodes if n.op == "get_attr"]
    return all(id(t) in own for t in read)


def _sizes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are sizes of tensors, and what is worked out of these alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sums = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
        made = sums and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        if node.target in _SIZES or made:
            found.add(node)
    return found


def _calls(graph: fx.Graph, root: nn.Module, sizes: Collection[fx.Node]) -> list[_Call]:
    """The calls of modules that torch.fx would not look into; sizes are not among their nodes."""
    found: dict[Any, _Call] = {}
    leaves = {path for path, module in root.named_modules(remove_duplicate=False)
              if path and _is_layer(module)}  # fmt: skip
    for node in graph.nodes:
        for call, path in node.meta.get(CALL, {}).items():
            if path in leaves and node not in sizes:
                found.setdefault(call, _Call(path)).nodes.append(node)
                break
    return list(found.values())


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one that torch.fx does not look into: of torch, and made of no others
    (those that are get their parts back)."""
    kind = type(module)
    return kind.__module__.startswith("torch.nn") and kind not in _LOOKED_INTO


def _steps(path: Sequence[Any]) -> tuple[int, ...]:
    """The indices that lead to a part of a tuple."""
    return tuple(key.idx for key in path)


def _extra(module: nn.Module) -> tuple[int, dict[str, Any]]:
    """How often a module takes its input, and what else it is given."""
    if isinstance(module, nn.MultiheadAttention):  # of itself, as in encoders
        return 3, {"need_weights": False}
    return 1, {}


class _Runner(fx.Interpreter):
    """Runs a graph, and every module beside its nodes."""

    def __init__(
        self, graph: fx.Graph, root: nn.Module, calls: Mapping[tuple[fx.Node, fx.Node], _Call]
    ) -> None:
        super().__init__(alias(root).eval(), graph=graph)
        self.first = {first: (source, call) for (source, first), call in calls.items()}
        self.of = {node: call for call in calls.values() for node in call.read()}
        self.given: dict[int, list[tuple[tuple[Any, ...], Tensor]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n in self.first:
            source, call = self.first[n]
            self.given[id(call)] = self._results(call.path, self.env[source])
        value = super().run_node(n)
        if n in self.of:
            call = self.of[n]
            call.outputs[n] = self._match(self.given[id(call)], value)
        return value

    def _results(self, path: str, x: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
        """The tensors that a module returns, and the paths to them."""
        module: nn.Module = self.module.get_submodule(path)
        times, kwargs = _extra(module)
        try:
            result = module(*[clone_tensors(x)] * times, **kwargs)
        except Exception:  # it is called otherwise
            return []
        flat, _ = tree_flatten_with_path(result)
        return [(_steps(path), t.clone()) for path, t in flat if isinstance(t, Tensor)]

    @staticmethod
    def _match(
        given: Sequence[tuple[tuple[Any, ...], Tensor]], value: Any
    ) -> tuple[Any, ...] | None:
        if not isinstance(value, Tensor):
            return None
        for path, t in given:
            if (t.shape, t.dtype) == (value.shape, value.dtype) and close(t, value):
                return path
        return None


def _replace(
    graph: fx.Graph, call: _Call, source: fx.Node, extra: tuple[int, dict[str, Any]]
) -> dict[fx.Node, fx.Node]:
    """The nodes of a call become one that calls the module, and those that take its result apart;
    what stands for the nodes that others have read."""
    times, kwargs = extra
    last = call.nodes[-1]
    with graph.inserting_after(last):
        made = graph.call_module(reached(call.path), (source,) * times, kwargs)
    made._rename(call.path.replace(".", "_"))
    made.meta = {"nn_module_stack": call.nodes[0].meta["nn_module_stack"]}
    at, now = made, dict[fx.Node, fx.Node]()
    for node, path in call.outputs.items():
        value = made
        for step in path or ():
            with graph.inserting_after(at):
                value = at = graph.call_function(getitem, (value, step))
            value.meta = dict(made.meta)
        node.replace_all_uses_with(value, lambda user: user not in call.nodes)
        now[node] = value
    for node in reversed(call.nodes):
        graph.erase_node(node)
    return now
