"""Unfold: weights that a node keeps inside, or is given, become modules of their own.

A refit stops before each layer of a graph, to see what it reads. `nn.MultiheadAttention` is one
node with four projections in it, and `F.linear(x, weight)` is none that knows its weight. Here such
nodes become several, or a module, on the same memory: what is written there is written to the
model.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.correspond import attribute, tensors_at
from zipfx.rewrite import HEAD_KEY, SOURCE_KEY

#: meta key of a node that was unfolded: (name of the source it was part of, path of a parameter,
#: first and last of the rows that it applies)
PART_KEY = "zipfx_part"

_PROJECTIONS = ("query", "key", "value")
_CONVOLUTIONS: dict[Any, type[nn.modules.conv._ConvNd]] = {
    F.conv1d: nn.Conv1d,
    F.conv2d: nn.Conv2d,
    F.conv3d: nn.Conv3d,
}


def unfold(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with `nn.MultiheadAttention`, `F.linear` and `F.conv1d` to `conv3d` unfolded,
    where no other node shares their weights; nodes keep their names, tensors their memory.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = nn.MultiheadAttention(8, 2)
    ...     def forward(self, x):
    ...         return self.attention(x, x, x)[0]
    >>> wide = unfold(fx.symbolic_trace(Net()))
    >>> [node.target.split(".")[-1] for node in wide.graph.nodes if node.op == "call_module"]
    ['query', 'key', 'value', 'mixing', 'out_proj']
    """
    return _Unfolding(module).result()


class _Unfolding:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, copy.deepcopy(module.graph)
        self.made: dict[str, nn.Module] = {}
        self.uses = Counter(id(t) for n in module.graph.nodes for t in tensors_at(module, n))

    def result(self) -> fx.GraphModule:
        for node in list(self.graph.nodes):
            if node.op == "call_module":
                leaf = self.module.get_submodule(str(node.target))
                if type(leaf).forward is nn.MultiheadAttention.forward:
                    self._attention(node, leaf)
            elif node.op == "call_function" and node.target in (F.linear, *_CONVOLUTIONS):
                self._function(node)
        used = {str(n.target) for n in self.graph.nodes if n.op in ("call_module", "get_attr")}
        parts = {t: self.made.get(t) or attribute(self.module, t) for t in used}
        return fx.GraphModule(parts, self.graph, type(self.module).__name__)

    def _own(self, node: fx.Node) -> bool:
        """Whether no other node has the tensors of this one."""
        return all(self.uses[id(t)] == 1 for t in tensors_at(self.module, node))

    def _attention(self, node: fx.Node, leaf: Any) -> None:
        path = str(node.target)
        given = inspect.signature(leaf.forward).bind(*node.args, **node.kwargs)
        read = {u: u.args[1] for u in node.users if u.target is getitem}
        outputs = [u for u, i in read.items() if i == 0]
        odd = (
            leaf.bias_k is not None
            or leaf.add_zero_attn
            or any(is_parametrized(m) for m in leaf.modules())
            or type(leaf.out_proj).forward is not nn.Linear.forward
        )
        if odd or not outputs or len(read) < len(node.users) or not self._own(node):
            return
        width, packed = leaf.embed_dim, leaf._qkv_same_embed_dim
        with self.graph.inserting_before(node):
            for i, name in enumerate(_PROJECTIONS):
                weight = leaf.in_proj_weight if packed else getattr(leaf, f"{name[0]}_proj_weight")
                rows = (i * width, (i + 1) * width) if packed else (0, width)
                bias, target = leaf.in_proj_bias, f"{path}.{name}"
                self.made[target] = _linear(
                    _view(weight, *rows),
                    None if bias is None else _view(bias, i * width, (i + 1) * width),
                )
                part = self.graph.call_module(target, (given.arguments[name],))
                self._name(part, node, name)
                owner = f"{path}.in_proj_weight" if packed else f"{path}.{name[0]}_proj_weight"
                part.meta[PART_KEY] = (self._source(node), owner, *rows)
                given.arguments[name] = part
        node.target, node.args, node.kwargs = f"{path}.mixing", given.args, given.kwargs
        self.made[f"{path}.mixing"] = _core(leaf)
        first, *others = outputs
        with self.graph.inserting_before(first):
            mixed = self.graph.call_function(getitem, (node, 0))
            self._name(mixed, node, "mixed")
        self.made[f"{path}.out_proj"] = leaf.out_proj
        _becomes(first, f"{path}.out_proj", mixed)
        for other in others:
            other.replace_all_uses_with(first)
            self.graph.erase_node(other)

    def _function(self, node: fx.Node) -> None:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given: dict[str, Any] = {**dict(zip(names, node.args)), **node.kwargs}
        x, *weights = (given.pop(name, None) for name in names[:3])
        own = [w for w in weights if w is not None]
        if not isinstance(x, fx.Node) or any(
            not isinstance(w, fx.Node) or w.op != "get_attr" or len(w.users) > 1 or not self._own(w)
            for w in own
        ):
            return
        found: list[Any] = [
            None if w is None else attribute(self.module, w.target) for w in weights
        ]
        numbers = [n for v in given.values() for n in (v if isinstance(v, (tuple, list)) else [v])]
        if not all(t is None or isinstance(t, nn.Parameter) for t in found) or not all(
            isinstance(n, (int, str)) for n in numbers
        ):
            return
        path = str(weights[0].target)
        kind = _CONVOLUTIONS.get(node.target)
        self.made[path] = _linear(*found) if kind is None else _convolution(kind, *found, **given)
        _becomes(node, path, x)
        for w in own:
            self.graph.erase_node(w)

    def _source(self, node: fx.Node) -> str:
        found: str = node.meta.get(SOURCE_KEY, node.name)
        return found

    def _name(self, new: fx.Node, node: fx.Node, part: str) -> None:
        """Named after the node, in its graph and in that of the model it comes from."""
        new._rename(f"{node.name}__{part}")
        if SOURCE_KEY in node.meta:
            new.meta[SOURCE_KEY] = f"{node.meta[SOURCE_KEY]}__{part}"
        if HEAD_KEY in node.meta:
            new.meta[HEAD_KEY] = node.meta[HEAD_KEY]


def _becomes(node: fx.Node, target: str, x: fx.Node) -> None:
    node.op, node.target, node.args, node.kwargs = "call_module", target, (x,), {}


def _view(t: Tensor, start: int, stop: int) -> nn.Parameter:
    return nn.Parameter(t.data[start:stop], requires_grad=False)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer.eval()


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
    like: Mapping[str, Any] = {
        "dtype": leaf.out_proj.weight.dtype,
        "device": leaf.out_proj.weight.device,
    }
    width = leaf.embed_dim
    core = nn.MultiheadAttention(
        width, leaf.num_heads, bias=False, batch_first=leaf.batch_first, device="meta"
    )
    same = torch.eye(width, **like)
    for owner, name, value in (
        (core, "in_proj_weight", same.repeat(3, 1)),
        (core.out_proj, "weight", same),
    ):
        del owner._parameters[name]  # these are none to refit
        owner.register_buffer(name, value)
    return core.eval()
