"""Starts: a state that begins with zeros is seen at work only from the second step on.

A weight that reads the state has met nothing but zeros on sequences of one step, so its columns
belong to no feature, and permuting what it makes would be right for these sequences only.  Layers
of torch are run on from the state in which they end.  For others no one knows whether there ever is
a second step: what such a weight makes is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.inside import meetings
from zipfx.analysis.labels.labels import Kind, Labels, support
from zipfx.analysis.labels.records import Contraction
from zipfx.analysis.rules.call import Call
from zipfx.hashing import Ints
from zipfx.model.memory import storage_key

_REASON = "a weight that makes it meets only zeros on the example inputs, as a state begins with"
_LAYERS = {cls.forward for cls in (nn.RNN, nn.LSTM, nn.GRU)}
_CELLS = {cls.forward for cls in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)}
_FUNCTIONS = {  # as exported models have them
    getattr(torch.ops.aten, name).input for name in ("rnn_tanh", "rnn_relu", "gru", "lstm")
}
_PRODUCTS = {torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor}
_JOINS = {torch.ops.aten.cat.default}

Of = Callable[[Tensor], Labels]


def further(leaf: Any, args: Any, kwargs: Any, result: Any, of: Of) -> Any:
    """The arguments with which a recurrent layer goes on from the state in which it has ended: the
    same step again. None where it has gone on by itself, or is no such layer.

    A cell that was handed features for its state may be anything, as a gate between two values.

    Args:
        leaf: a module, or a function.
    """
    forward = getattr(type(leaf), "forward", None)
    if forward in _LAYERS:
        x = args[0] if args else kwargs["input"]
        first = leaf.batch_first and x[0].dim() == 2
        steps = len(x.batch_sizes) if isinstance(x, PackedSequence) else x.shape[int(first)]
        return (x, result[1]) if steps == 1 else None
    if forward in _CELLS:
        given = [*args, *(kwargs[name] for name in ("input", "hx") if name in kwargs)]
        x, states = given[0], given[1:]
        states = [t for t in tree_leaves(states) if isinstance(t, Tensor)]
        return None if any(_has_features(of(t)) for t in states) else (x, result)
    if isinstance(leaf, Hashable) and leaf in _FUNCTIONS and not kwargs:
        x, state, *rest = args
        ended = list(result[1:]) if isinstance(state, list | tuple) else result[1]
        return (x, ended, *rest) if x.shape[int(rest[-1])] == 1 else None
    return None


def _has_features(labels: Labels) -> bool:
    return labels.kind == Kind.DATA and bool(labels.features)


class Starts:
    """Which weights have met nothing but zeros so far, and what else they make or read."""

    def __init__(self, constraints: Constraints, of: Of) -> None:
        self.constraints, self.of = constraints, of
        self.idle: list[tuple[Ints, list[Tensor], int, str]] = []
        self.used: list[Ints] = []
        self.joined: dict[int, tuple[Any, int, tuple[int, int]]] = {}

    def see(self, call: Call, result: Tensor, reads: Sequence[Contraction]) -> None:
        """A call; reads: the contractions that it has recorded."""
        operands = call.tensors()
        if call.op in _JOINS:
            self._join(operands, int(call.arg("dim")), result)
        elif call.op in _PRODUCTS and len(operands) == 2:
            for weight, other in (operands, operands[::-1]):
                if self.of(weight).kind == Kind.WEIGHT:
                    self._multiplied(weight, other)
        elif reads:
            ids = np.unique(np.concatenate([c.w for c in reads]))
            self._read(call.op, operands, ids[ids > 0])

    def _read(self, op: Any, operands: Sequence[Tensor], ids: Ints) -> None:
        for meeting in meetings(op, operands):
            lab = self.of(meeting.weight)
            if lab.kind == Kind.WEIGHT and (span := self._zeros(meeting.other, meeting.axis)):
                whole = span[1] - span[0] == meeting.other.shape[meeting.axis]
                if not whole and len(ids) != meeting.other.shape[meeting.axis]:
                    continue  # a part of what, of several groups, is not asked
                idle = ids if whole else ids[slice(*span)]
                ids = np.setdiff1d(ids, idle)
                self._add(idle, [s for s in lab.features if not _any(s, idle)])
        self.used.append(ids)

    def _multiplied(self, weight: Tensor, other: Tensor) -> None:
        """A contraction as it may be written: the product of a matrix and the rows of zeros."""
        lab, ndim = self.of(weight), max(weight.ndim, other.ndim)
        at = [(s, {d - weight.ndim for d in support(s)}) for s in lab.features]
        along = {d for d in range(-ndim, 0) if other.ndim >= -d and other.shape[d] > 1}
        read = [s for s, dims in at if dims & along]
        made = [s for s, dims in at if not dims & along]
        ids = [np.unique(s.numpy()) for s in read]
        if read and made and self._zeros(other, -1):
            self._add(np.concatenate(ids), made)
        else:
            self.used += ids

    def _add(self, ids: Ints, made: list[Tensor]) -> None:
        if len(ids) and made:
            self.idle.append((ids, made, self.constraints.node, self.constraints.where))

    def _join(self, operands: Sequence[Tensor], dim: int, result: Tensor) -> None:
        """Zeros beside data, as a cell reads the state beside its input (padding is no join)."""
        axis, start = dim % result.ndim - result.ndim, 0
        for t in operands:
            stop = start + (t.shape[axis] if t.ndim == result.ndim else 0)
            if stop > start and self._zeros(t, axis):
                ref = StorageWeakRef(result.untyped_storage())
                self.joined[storage_key(result)] = ref, axis, (start, stop)
            start = stop

    def _zeros(self, t: Tensor, axis: int) -> tuple[int, int] | None:
        """Where along an axis, counted from the end, forward has put nothing but zeros."""
        if t.numel() < 2 or t.shape[axis] < 2:
            return None
        ref, dim, span = self.joined.get(storage_key(t), (None, 0, (0, 0)))
        if ref is not None and not ref.expired():
            same = dim == axis and span[1] <= t.shape[axis] and t.is_contiguous()
            return span if same and not t.narrow(axis, span[0], span[1] - span[0]).any() else None
        lab = self.of(t)
        along = axis % t.ndim
        told = lab.features or any(along in support(s) for s in lab.fixed)
        return None if told or bool(t.any()) else (0, t.shape[axis])

    def pin(self) -> list[str]:
        """Pin what weights make that have met nothing but zeros to the end; notes of it."""
        used = np.unique(np.concatenate(self.used)) if self.used else np.zeros(0, np.int64)
        notes = []
        for ids, made, node, where in self.idle:
            if not np.isin(ids, used).all():
                self.constraints.node = node
                self.constraints.pin(made, _REASON)
                notes.append(
                    f"{where}: a weight meets only zeros, as if a state began with them; what it "
                    "makes is left where it is: give example inputs with longer sequences"
                )
        return notes


def _any(slot: Tensor, ids: Ints) -> bool:
    return bool(np.isin(slot.numpy(), ids).any())
