"""Recurrent: what `nn.LSTM`, `nn.GRU` and `nn.RNN` make of their inputs, as linear layers.

At every step such a layer computes W x_t + b and V h_{t-1} + c, all gates at once. The first is put
before it as a layer of its own, once for all steps. The layer follows as it was, with what has been
written to W and b by then; it does not read what that layer gives, which is there to be looked at.
V stays as it is: what is best for the states of the merge as it was is not for those that come of
it, and errors feed on themselves (on digits read row by row 2 to 25 points are lost that way; see
docs/repairs.md).

Letters: B batch, T time, C features of an input, H of a state, N gates times H.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.merge import mark
from zipfx.model.graph_module import attribute, plain
from zipfx.model.tensors import runs_as
from zipfx.repair.exposed.splice import Splice, erase_unread, linear, rows_of, source_of

KINDS: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
#: what a traced model calls in their place, and what the kind is told
CALLS: dict[Any, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    torch.ops.aten.lstm.input: (nn.LSTM, {}),
    torch.ops.aten.gru.input: (nn.GRU, {}),
    torch.ops.aten.rnn_tanh.input: (nn.RNN, {"nonlinearity": "tanh"}),
    torch.ops.aten.rnn_relu.input: (nn.RNN, {"nonlinearity": "relu"}),
}
_WAYS = ("", "_reverse")


class Run(nn.Module):
    """One layer of several, in all directions, (B, T, C) -> (B, T, H) or likewise, and its last
    state.

    Args:
        layer: that layer alone; number: which of several it is.
    """

    def __init__(self, layer: nn.RNNBase, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number

    def forward(self, x: Tensor, begin: Any, *made: Tensor) -> tuple[Tensor, Any]:
        """made: what was put before it, which has run by then."""
        ways = 2 if self.layer.bidirectional else 1
        found: tuple[Tensor, Any] = self.layer(x, _states(begin, self.number * ways, ways))
        return found


class Join(nn.Module):
    """What several layers give: the outputs of the last, and the last states of all.

    flat: the two of an LSTM are no tuple of their own.
    """

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *runs: tuple[Tensor, Any]) -> tuple[Any, ...]:
        states = [state if isinstance(state, tuple) else (state,) for _, state in runs]
        joined = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
        if self.flat or len(joined) == 1:
            return runs[-1][0], *joined
        return runs[-1][0], joined


def is_recurrent(leaf: nn.Module) -> bool:
    """Whether it is one of torch's, and runs as such."""
    return any(isinstance(leaf, kind) and runs_as(leaf, kind) for kind in KINDS)


def unroll(splice: Splice, node: fx.Node, leaf: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Put what a recurrent layer makes of its inputs before it, where these are plain tensors of
    three dimensions."""
    given = inspect.signature(leaf.forward).bind(*node.args, **node.kwargs).arguments
    x, begin = given["input"], given.get("hx")
    odd = leaf.proj_size or any(is_parametrized(m) for m in leaf.modules())
    if not odd and splice.owns(node) and _is_plain(x, shapes):
        _unroll(splice, node, leaf, plain(str(node.target)), x, begin)


def unroll_call(splice: Splice, node: fx.Node, shapes: Mapping[str, Sequence[int]]) -> None:
    """The same of a call of one of aten's functions with the weights of such a layer."""
    arguments: Any = node.args
    x, begin, given, biased, layers, _, _, both, batch_first = arguments
    paths = [str(w.target) for w in given if isinstance(w, fx.Node) and w.op == "get_attr"]
    path = paths[0].rpartition(".")[0] if paths else ""
    kind, more = CALLS[node.target]
    alone = all(splice.owns(w) and len(w.users) == 1 for w in given)
    if len(paths) < len(given) or not alone or not _is_plain(x, shapes):
        return
    weights = [attribute(splice.module, p) for p in paths]
    inputs, size = weights[0].shape[1], weights[1].shape[1]
    leaf = kind(
        inputs, size, layers, bias=biased, batch_first=batch_first, bidirectional=both,
        device="meta", **more,
    )  # fmt: skip
    names = [name for name, _ in leaf.named_parameters()]
    if [f"{path}.{name}".lstrip(".") for name in names] != [plain(p) for p in paths]:
        return
    if not all(isinstance(w, nn.Parameter) for w in weights):
        return
    for name, weight in zip(names, weights, strict=True):
        setattr(leaf, name, weight)
    _unroll(splice, node, leaf, plain(path), x, begin, flat=True)
    erase_unread(splice.graph, given)


def _is_plain(x: Any, shapes: Mapping[str, Sequence[int]]) -> bool:
    return isinstance(x, fx.Node) and len(shapes.get(x.name, ())) == 3


def _unroll(
    splice: Splice, node: fx.Node, leaf: Any, path: str, x: Any, begin: Any, *, flat: bool = False
) -> None:
    runs: list[fx.Node] = []
    ways = _WAYS[: 2 if leaf.bidirectional else 1]
    with splice.graph.inserting_before(node):
        for number in range(leaf.num_layers):
            ends = [f"l{number}{way}" for way in ways]
            made = [
                _made_of_inputs(splice, node, leaf, f"{path}.weight_ih_{end}", x) for end in ends
            ]
            target = splice.add(f"{path}.run", Run(_alone(leaf, number, ways), number))
            runs.append(splice.call(node, f"run{number}", target, (x, begin, *made)))
            mark(runs[-1], title=", ".join(f"{path}.weight_hh_{end}" for end in ends))
            x = splice.graph.call_function(getitem, (runs[-1], 0))
            splice.name(x, node, f"outputs{number}")
    node.op, node.target = "call_module", splice.add(f"{path}.join", Join(flat=flat))
    node.args, node.kwargs = tuple(runs), {}


def _states(begin: Any, start: int, count: int) -> Any:
    """Some of the states (layers, B, H); of an LSTM there are two."""
    if isinstance(begin, (tuple, list)):
        return tuple(_states(one, start, count) for one in begin)
    return None if begin is None else begin.narrow(0, start, count).contiguous()


def _made_of_inputs(splice: Splice, node: fx.Node, leaf: Any, path: str, x: Any) -> fx.Node:
    """The layer (.., C) -> (.., N) of one direction."""
    name = path.rpartition(".")[2]
    weight = getattr(leaf, name)
    bias = getattr(leaf, name.replace("weight", "bias")) if leaf.bias else None
    bias = None if bias is None else rows_of(bias, 0, len(bias))
    layer = linear(rows_of(weight, 0, len(weight)), bias)
    part = splice.call(node, name, splice.add(path, layer), (x,))
    mark(part, title=path, part=(source_of(node), path, 0, len(weight)))
    return part


def _alone(leaf: Any, number: int, ways: Sequence[str]) -> nn.RNNBase:
    """One layer of several, on the memory of its weights; those that another node has are no
    parameters here."""
    kind = next(kind for kind in KINDS if isinstance(leaf, kind))
    more = {"nonlinearity": leaf.nonlinearity} if kind is nn.RNN else {}
    inputs = getattr(leaf, f"weight_ih_l{number}").shape[1]
    alone = kind(
        inputs, leaf.hidden_size, bias=leaf.bias, batch_first=leaf.batch_first,
        bidirectional=len(ways) == 2, device="meta", **more,
    )  # fmt: skip
    for own, way in zip(_WAYS, ways):
        for name in [n for n, _ in alone.named_parameters() if n.endswith(f"_l0{own}")]:
            value = getattr(leaf, f"{name.removesuffix(f'_l0{own}')}_l{number}{way}")
            if name.startswith("weight_hh"):
                setattr(alone, name, rows_of(value, 0, len(value)))
            else:
                del alone._parameters[name]
                alone.register_buffer(name, value.data, persistent=False)
    alone._flat_weights = [getattr(alone, name) for name in alone._flat_weights_names]
    return alone.eval()
