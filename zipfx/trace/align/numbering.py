"""Numbering: what every value of a graph is computed as, whatever the code looks like.

As compilers number values: two values have one number if the same operations, with the same
settings, made them of the same inputs.  Here a number belongs to every element of every storage, so
that views and writes in place need no care, and what only changes the shape or the layout changes
nothing.  Operations are those of aten, in eval mode: a module or a function, in place or not, makes
no difference, nor do dropout or an identity, which are none there.  A weight is known by its first
use: the weights of two models that are used alike correspond.  Several whose first uses are of one
kind (gate and value, or query, key and value) are told apart by ranks; by default those of their
order (`likeness` finds better ones).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.hashing import Hashes, hash64
from zipfx.model.copies import alias
from zipfx.model.memory import storage_key
from zipfx.model.running import Guard, decomposed
from zipfx.model.tensors import clone_tensors, constant_names, leaves, named_tensors
from zipfx.modes import as_caller, as_library
from zipfx.trace.align.elements import Elements, Value
from zipfx.trace.align.spelling import SAME, AtenCall

Window = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset
#: by kind of a first use, the rank of each (name of a tensor, window into it)
Ranks = Mapping[int, Mapping[tuple[str, Window], int]]


@dataclass(frozen=True)
class Use:
    """The first use of a part of a tensor of the model: the window into it, the number of the use,
    the index of the node; of which kind it is, and its rank among those of that kind."""

    name: str
    window: Window
    number: int
    node: int
    kind: int
    rank: int

    @property
    def part(self) -> tuple[str, Window]:
        return self.name, self.window


@dataclass
class Numbers:
    """What one run of a graph has numbered.

    gives: by index of a node, what it computes, as it is when it has run; left: as it is after the
    last node that was run; reads: what each node reads of others (by their index), as it is then;
    uses: of the model's tensors, in order; eps: of the BatchNorms, by name of a running variance.
    """

    gives: list[Value] = field(default_factory=list)
    left: dict[int, Value] = field(default_factory=dict)
    reads: list[dict[int, Value]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    eps: dict[str, tuple[float, str | None]] = field(default_factory=dict)


def number(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    last: int | None = None,
    ranks: Ranks | None = None,
) -> Numbers:
    """Number the values of a traced model up to node `last` (default: all).

    ranks: of weights whose first uses are of one kind; others are ranked by their order.

    >>> from torch import nn
    >>> one, other = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.Linear(3, 2)
    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f = other
    ...     def forward(self, x):
    ...         return torch.relu_(self.f(x))
    >>> x = torch.randn(4, 3)
    >>> found = [number(fx.symbolic_trace(m), [x]) for m in (one, Two())]
    >>> found[0].gives[-1] == found[1].gives[-1]
    True
    >>> [u.name for u in found[0].uses], [u.name for u in found[1].uses]
    (['0.bias', '0.weight'], ['f.bias', 'f.weight'])
    """
    twin = alias(module)
    mode = _Mode(named_tensors(twin), constant_names(module), ranks or {})
    guard = Guard(named_tensors(twin).values())
    runner = _Runner(twin, module.graph, mode, guard, last)
    try:
        with torch.no_grad():
            runner.run(*clone_tensors(tuple(inputs)))
    except _Stopped:
        pass
    finally:
        guard.restore()
    return runner.numbers


class _Stopped(Exception):  # noqa: N818
    """The last node that is wanted has run."""


class _Runner(fx.Interpreter):
    def __init__(
        self, twin: Any, graph: fx.Graph, mode: _Mode, guard: Guard, last: int | None
    ) -> None:
        super().__init__(twin, graph=graph)
        self.extra_traceback = False
        self.mode, self.guard, self.last = mode, guard, last
        self.numbers, self.elements = mode.numbers, mode.elements
        self.at = {node: i for i, node in enumerate(graph.nodes)}
        self.inputs = 0

    def run_node(self, n: fx.Node) -> Any:
        with as_library():
            self.numbers.reads.append(
                {self.at[a]: self.elements.value(self.env[a]) for a in n.all_input_nodes}
            )
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        with decomposed(leaf), self.mode, self.guard, as_caller():
            result = super().run_node(n)
        with as_library():
            if n.op == "placeholder":
                for t in (t for t in leaves(result) if isinstance(t, Tensor)):
                    self.inputs += 1
                    self.elements.fill(t, _hash(-self.inputs))
            self.numbers.gives.append(self.elements.value(result))
            if self.at[n] == self.last:
                env = {**self.env, n: result}
                self.numbers.left = {self.at[m]: self.elements.value(v) for m, v in env.items()}
                raise _Stopped
        return result


class _About(NamedTuple):
    """What is known of a call before it writes to anything.

    number: of the call; constant: whether all that it reads are constants; first: the numbers of
    its first tensor, where the result may be the same.
    """

    number: int
    constant: bool
    first: Hashes | None


class _Mode(TorchDispatchMode):
    """Numbers every element of every storage while operations run."""

    def __init__(self, named: Mapping[str, Tensor], constants: Iterable[str], ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = ranks
        self.numbers, self.elements = Numbers(), Elements()
        self.owners = {storage_key(t): name for name, t in named.items()}
        self.offsets = {name: int(t.storage_offset()) for name, t in named.items()}
        self.taken: dict[int, set[int]] = {}  # ranks, by kind
        for name, t in named.items():
            if name in constants or not (t.is_floating_point() or t.is_complex()):
                self.elements.by_value(t)
            else:
                self.elements.add(t)

    # ---------------------------------------------------------------- operations
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with as_library():
            call = AtenCall.of(func, args, kwargs)
            about = self._about(call)
        result = func(*args, **kwargs)
        with as_library():
            self._number(call, result, about)
        return result

    def _about(self, call: AtenCall) -> _About:
        self._note_eps(call)
        constant = all(map(self.elements.is_constant, call.tensors))
        self._use_weights(call)
        number = _hash(call.name, call.settings, self._operands(call))
        copies = call.name in (*SAME, "_to_copy") and call.tensors
        first = self.elements.window(call.tensors[0]) if copies else None
        return _About(number, constant, None if first is None else first.copy())

    def _operands(self, call: AtenCall) -> tuple[Any, ...]:
        plain, digest = call.is_plain, self.elements.digest
        found: list[Any] = [
            digest(t) if plain else (digest(t), tuple(t.shape)) for t in call.operands
        ]
        return tuple(sorted(found, key=str) if call.commutes else found)

    def _number(self, call: AtenCall, result: Any, about: _About) -> None:
        """Number what a call has made, and what it has written to."""
        storages = {storage_key(t) for t in call.tensors}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in made if storage_key(t) not in storages]
        to_same = call.name == "_to_copy" and fresh and fresh[0].dtype == call.tensors[0].dtype
        for i, t in enumerate([*fresh, *call.written]):
            self.elements.constant.discard(storage_key(t))
            if about.constant and not call.is_random:
                self.elements.by_value(t)
            elif call.name == "copy" and len(call.tensors) > 1:
                source = self.elements.window(call.tensors[1])
                assert source is not None
                self.elements.put(t, np.broadcast_to(source, t.shape))
            elif (call.name in SAME or to_same) and about.first is not None:
                self.elements.put(t, about.first)
            else:
                self.elements.fill(t, _hash(about.number, i))

    # ---------------------------------------------------------------- weights
    def _use_weights(self, call: AtenCall) -> None:
        """Number the weights of which nothing was known by this use, after all else in it."""
        known = [t for t in call.tensors if not self._is_new(t)]
        kind = _hash(call.name, call.settings, tuple(map(self.elements.digest, known)))
        for i, t in enumerate(() if call.is_view else call.tensors):
            if self._is_new(t) and call.reads(t):
                # of one call, the first weight says which others it comes with
                place = 0 if call.commutes else i
                kind = self._first_use(t, _hash(kind, place, tuple(t.shape)))

    def _is_new(self, t: Tensor) -> bool:
        """Whether a tensor is a weight, or a part of one, that was not used yet."""
        if storage_key(t) not in self.owners or self.elements.is_constant(t):
            return False
        window = self.elements.window(t)
        return window is not None and not window.any()

    def _first_use(self, t: Tensor, kind: int) -> int:
        shape = [1 if step == 0 else n for n, step in zip(t.shape, t.stride(), strict=True)]
        t = t.as_strided(shape, t.stride())  # without repetitions
        name = self.owners[storage_key(t)]
        offset = int(t.storage_offset()) - self.offsets[name]
        window = tuple(t.shape), tuple(t.stride()), offset
        given, taken = self.ranks.get(kind, {}), self.taken.setdefault(kind, set())
        rank = given.get((name, window), 0)
        if not rank or rank in taken:
            rank = next(r for r in itertools.count(1) if r not in taken | {*given.values()})
        taken.add(rank)
        number = _hash(kind, rank)
        self.elements.fill(t, number)
        self.numbers.uses.append(Use(name, window, number, len(self.numbers.gives), kind, rank))
        return number

    def _note_eps(self, call: AtenCall) -> None:
        given = call.given
        variance = given.get("running_var")
        if "batch_norm" in call.name and isinstance(variance, Tensor):
            weight = given.get("weight")
            eps = float(given.get("eps", given.get("epsilon", 0.0)))
            owner = self.owners.get(storage_key(variance))
            scale = None if weight is None else self.owners.get(storage_key(weight))
            if owner is not None:
                self.numbers.eps.setdefault(owner, (eps, scale))


def _hash(*parts: Any) -> int:
    return int(hash64(hash(parts))) >> 1
