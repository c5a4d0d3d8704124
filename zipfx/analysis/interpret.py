"""Interpret: run the traced graph once and write down which feature is where.

An `fx.Interpreter` walks the graph node by node; below it a `TorchDispatchMode` sees every aten
call and computes the labels of its results.  The outcome is a frozen `Facts`, from which every
later stage reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.facts import Facts, Heard, NodeFacts
from zipfx.analysis.labels.inside import Address, OwnedTensors, meetings
from zipfx.analysis.labels.labels import Kind, Labels, by_value, positions, trimmed
from zipfx.analysis.labels.storages import StorageLabels
from zipfx.analysis.rows import Origins, Rows
from zipfx.analysis.rules.algebra import paired
from zipfx.analysis.rules.call import RULES, Call, aten, made_of_others, opaque, rule_of
from zipfx.analysis.rules.movement import IDENTITY
from zipfx.analysis.rules.pointwise import join
from zipfx.analysis.rules.register import TAUGHT
from zipfx.analysis.starts import Starts, further
from zipfx.analysis.transfer import transfer
from zipfx.errors import ZipError
from zipfx.model.copies import alias
from zipfx.model.memory import partners, storage_key
from zipfx.model.running import Guard, declared, decomposed
from zipfx.model.tensors import (
    as_real,
    clone_tensors,
    constant_names,
    inexact,
    leaves,
    named_tensors,
)
from zipfx.modes import as_caller, as_library
from zipfx.trace import record_of
from zipfx.trace.nodes import spot

_NORMS = {op for op, function in RULES.items() if function is RULES[aten.native_batch_norm.default]}


class _Mode(TorchDispatchMode):
    def __init__(self, constraints: Constraints) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constraints = constraints
        self.storages = StorageLabels()
        self.origins = Origins()
        self.starts = Starts(constraints, self.of)
        self.notes: list[str] = []
        self.empty: dict[str, None] = {}
        self.begin(OwnedTensors(None, ()))

    def begin(self, weights: OwnedTensors) -> None:
        """A node begins, with these weights."""
        self.weights = weights
        self.writes: set[int] = set()
        self.inner: dict[Any, Heard] = {}

    def _use(self, t: Tensor) -> None:
        """Pin what must not be exchanged once this tensor is used (the index of a feature)."""
        labels = self.storages.get(t)
        if labels is not None and labels.pending:
            self.constraints.pin(labels.pending, "the index of a feature is used")

    def of(self, t: Tensor) -> Labels:
        labels = self.storages.get(t)
        if labels is None and t.is_complex() and (pairs := self.storages.get(as_real(t))):
            labels = paired(self.constraints, pairs)
            self.storages.tell(t, labels)
        if labels is None:
            base = self.storages.base(t)
            if base is not None:
                self.constraints.pin(base.features, "seen through another dtype")
            shape = tuple(t.shape)
            if t.numel() > 1:
                self.notes.append(f"{self.constraints.where}: a tensor {shape} of unknown origin")
            kind = Kind.CONSTANT if t.numel() <= 1 else Kind.DATA
            return Labels(shape, fixed=positions(shape), kind=kind)
        return labels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if made_of_others(func) and func not in TAUGHT and rule_of(func) is None:
            return self._see(func.decompose, *args, **kwargs)
        # a norm in eval mode may name its statistics as written although it leaves them alone
        written = [] if func in _NORMS else declared(func, args, kwargs)
        rows = self.origins.after(func, args, kwargs)
        result = func(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and not tree_leaves(result)[0].numel():
            self.empty[self.constraints.where] = None
        call = Call(func, args, kwargs, result, self.constraints, self.of, self._see)
        with as_library():
            return self._seen(call, written, rows)

    def _seen(self, call: Call, written: list[Tensor], rows: Rows) -> Any:
        """Labels for what a call has made, or written to; its result."""
        func, result, operands = call.op, call.result, call.tensors()
        for t in operands:
            self._use(t)
        known = {storage_key(t) for t in operands}
        fresh = [
            t for t in tree_leaves(result) if isinstance(t, Tensor) and storage_key(t) not in known
        ]
        if func in IDENTITY and not fresh:  # lift_fresh: a constant written in the source
            for t in operands:
                if not self.storages.knows(t):
                    self.storages.put(t, by_value(t), self.constraints.node)
        if not fresh and not written:
            if not any(isinstance(t, Tensor) for t in tree_leaves(result)):
                opaque(call)  # a number leaves for Python, where labels can not follow
            return result  # else a view: the same storage
        targets = [*fresh, *written]  # both: rrelu_with_noise writes what it drew
        before = len(self.constraints.contractions)
        for t, labels in zip(targets, transfer(call, operands, targets), strict=False):
            self.constraints.mark_alive(labels)
            self.origins.tell(t, rows)
            if any(t is other for other in written):
                owner = self.storages.owner(t)
                self.writes.update(() if owner is None else (owner,))
                self.storages.write(t, labels, self.constraints.node)
            else:
                self.storages.put(t, labels, self.constraints.node)
        self.starts.see(call, targets[0], self.constraints.contractions[before:])
        for meeting in meetings(func, operands) if fresh else ():
            key = self.weights.key(meeting.weight)
            if key is not None and self.of(meeting.weight).kind == Kind.WEIGHT:
                chosen = bool(self.origins.of([meeting.other]) & Rows.CHOSEN)
                self._hear((key, False), self.of(meeting.other), meeting.axis, chosen)
                self._hear((key, True), self.of(fresh[0]), meeting.axis, chosen)
        return result

    def _see(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def _hear(self, address: Address, labels: Labels, axis: int, chosen: bool) -> None:
        heard = Heard.of(address, labels, axis, chosen)
        others = tuple((dims, ids.tobytes()) for dims, ids in heard.others)
        self.inner[address, axis, heard.labels.tobytes(), others, heard.data] = heard


class _Interpreter(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph, mode: _Mode, guard: Guard) -> None:
        super().__init__(module, graph=graph)
        self.guard = guard
        self.mode = mode
        self.facts: list[NodeFacts] = []
        self.at: dict[fx.Node, int] = {}
        self.rewritten: list[tuple[int, int, NodeFacts]] = []

    def run_node(self, n: fx.Node) -> Any:
        mode, constraints = self.mode, self.mode.constraints
        constraints.node, constraints.where = len(self.facts), spot(n)
        args = self.fetch_args_kwargs_from_env(n)
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        mode.begin(OwnedTensors(leaf, args))
        # only here: label arithmetic is no part of it
        with decomposed(leaf), mode, self.guard, as_caller():
            value = super().run_node(n)
            call: Any = leaf or n.target
            if more := further(call, *args, value, mode.of):
                call(*more)
        tensors = [t for t in leaves(value) if isinstance(t, Tensor)]
        if n.op == "placeholder":
            for t in tensors:
                mode.storages.put(
                    t, Labels(tuple(t.shape), (), positions(tuple(t.shape))), constraints.node
                )
        fact = self._learn(
            value, frozenset(mode.writes), constraints.traits.get(constraints.node, ())
        )
        if n.op == "output":
            for lab in fact.values:
                constraints.pin((*lab.features, *lab.pending), "output of the network")
        self._reread(n, fact.writes)
        self.at[n] = len(self.facts)
        self.facts.append(replace(fact, inner=tuple(mode.inner.values())))
        return value

    def _learn(self, value: Any, writes: frozenset[int], traits: Iterable[str]) -> NodeFacts:
        tensors = [t for t in leaves(value) if isinstance(t, Tensor)]
        labels = tuple(replace(trimmed(self.mode.of(t)), fixed=()) for t in tensors)
        owners = (self.mode.storages.owner(t) for t in tensors)
        return NodeFacts(
            labels,
            max((lab.kind for lab in labels), default=None),
            isinstance(value, Tensor),
            frozenset(o for o in owners if o is not None),
            writes,
            frozenset(traits),
            chosen=bool(self.mode.origins.of(tensors) & Rows.CHOSEN),
        )

    def _reread(self, n: fx.Node, writes: frozenset[int]) -> None:
        """Look again at the values that node n has changed and that later nodes read."""
        dead = set(self.user_to_last_uses.get(n, ()))
        for node, value in self.env.items() if writes else ():
            old = self.facts[self.at[node]]
            if old.owners & writes and node not in dead:
                fact = self._learn(value, old.writes, old.traits)
                self.rewritten.append((len(self.facts), self.at[node], fact))


def _tied(named: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors that share elements. Their labels do so as well, but each is known by its own."""
    return [named[name] for family in partners(named) for name in family]


def interpret(module: fx.GraphModule, inputs: Sequence[Any]) -> Facts:
    """Run `module` on `inputs` (its positional arguments) and return what the labels say."""
    constraints = Constraints()
    mode = _Mode(constraints)
    given, constants = named_tensors(module), constant_names(module)
    twin = alias(module, {id(t): t.detach().clone() for t in _tied(given)})
    shared = StorageLabels()
    with torch.no_grad():
        named = named_tensors(twin)
        for i, (name, t) in enumerate(named.items()):
            learned = inexact(t) and name not in constants
            labels = constraints.parameter(name, t) if learned else by_value(t)
            mode.storages.put(t, labels, -1 - i)
            mode.origins.tell(t, Rows.LEARNED if learned else Rows.GIVEN)
            seen = shared.get(given[name])  # through another tensor, which has elements of this one
            both = join(constraints, [seen, labels], labels.shape) if learned and seen else labels
            shared.write(given[name], both, -1 - i)
        interpreter = _Interpreter(twin, module.graph, mode, Guard(named.values()))
        try:
            interpreter.run(*clone_tensors(tuple(inputs)))
        finally:
            interpreter.guard.restore()
    tied = {name for family in partners(given) for name in family}
    for name in tied & {
        n for n, t in named.items() if any(t is w for w in interpreter.guard.written)
    }:
        raise ZipError(
            f"forward writes to {name!r}, which shares memory with another parameter or buffer: "
            "make them one, or give them memory of their own"
        )
    notes = dict.fromkeys((*record_of(module).notes, *mode.notes, *mode.starts.pin()))
    notes |= dict.fromkeys(
        f"no row of the example inputs comes to what {where} chooses: give more of them"
        for where in mode.empty
    )
    nodes, again = tuple(interpreter.facts), tuple(interpreter.rewritten)
    return Facts(constraints, nodes, tuple(notes), tuple(named), again, tuple(mode.empty))
