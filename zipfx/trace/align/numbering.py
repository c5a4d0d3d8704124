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
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.hashing import Hashes, hash64
from zipfx.model.copies import alias
from zipfx.model.memory import storage_key
from zipfx.model.running import Guard, declared, decomposed
from zipfx.model.tensors import clone_tensors, constant_names, leaves, named_tensors
from zipfx.modes import as_caller, as_library
from zipfx.trace.align.spelling import (
    COMMUTATIVE,
    SAME,
    given_to,
    has_tensors,
    ignored,
    in_one_form,
    is_view,
    operation,
)

aten: Any = torch.ops.aten
#: of a tensor: a digest of those of its elements, and its shape
Number = tuple[int, tuple[int, ...]]
Value = tuple[Any, ...]  # of what a node computes: the numbers of its tensors, other things as text
Window = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset
#: by kind of a first use, the rank of each (name of a tensor, window into it)
Ranks = Mapping[int, Mapping[tuple[str, Window], int]]

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class _Numbered:
    """The elements of a storage, of `size` bytes each, and their numbers (0: none yet)."""

    ref: Any
    size: int
    numbers: Hashes


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
        self.numbers = mode.numbers
        self.at = {node: i for i, node in enumerate(graph.nodes)}
        self.inputs = 0

    def run_node(self, n: fx.Node) -> Any:
        with as_library():
            self.numbers.reads.append(
                {self.at[a]: self.mode.value(self.env[a]) for a in n.all_input_nodes}
            )
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        with decomposed(leaf), self.mode, self.guard, as_caller():
            result = super().run_node(n)
        with as_library():
            if n.op == "placeholder":
                for t in (t for t in leaves(result) if isinstance(t, Tensor)):
                    self.inputs += 1
                    self.mode.fill(t, _hash(-self.inputs))
            self.numbers.gives.append(self.mode.value(result))
            if self.at[n] == self.last:
                env = {**self.env, n: result}
                self.numbers.left = {self.at[m]: self.mode.value(v) for m, v in env.items()}
                raise _Stopped
        return result


class _Mode(TorchDispatchMode):
    """Numbers every element of every storage while operations run."""

    def __init__(self, named: Mapping[str, Tensor], constants: Iterable[str], ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = ranks
        self.numbers = Numbers()
        self.storages: dict[int, _Numbered] = {}
        self.owners = {storage_key(t): name for name, t in named.items()}
        self.offsets = {name: int(t.storage_offset()) for name, t in named.items()}
        self.constant: set[int] = set()  # storages that are known by their values
        self.taken: dict[int, set[int]] = {}  # ranks, by kind
        self.most = 64
        for name, t in named.items():
            if name in constants or not (t.is_floating_point() or t.is_complex()):
                self.by_value(t)
            else:
                self.storages.setdefault(storage_key(t), _blank(t))

    # ---------------------------------------------------------------- elements
    def window(self, t: Tensor) -> Hashes | None:
        """The numbers of a tensor's elements, as a view (None: its storage is unknown, or seen
        through another dtype)."""
        known = self.storages.get(storage_key(t))
        if known is None or known.ref.expired() or known.size != t.itemsize:
            return None
        whole = known.numbers[int(t.storage_offset()) :]
        return np.lib.stride_tricks.as_strided(whole, t.shape, [s * 8 for s in t.stride()])

    def fill(self, t: Tensor, number: int) -> None:
        """New numbers for all elements of a tensor, in their order."""
        with np.errstate(over="ignore"):
            found = hash64((np.arange(t.numel(), dtype=np.uint64) * _ODD).view(np.int64) ^ number)
        self.put(t, found)

    def put(self, t: Tensor, numbers: Hashes) -> None:
        window = self.window(t)
        if window is None:
            self.storages[storage_key(t)] = _blank(t)
            window = self.window(t)
            if len(self.storages) > self.most:
                self._forget()
        assert window is not None
        window[...] = numbers.reshape(t.shape)

    def _forget(self) -> None:
        gone = [key for key, known in self.storages.items() if known.ref.expired()]
        for key in gone:
            del self.storages[key]
            self.constant.discard(key)
        self.most = 64 + 2 * len(self.storages)

    def by_value(self, t: Tensor) -> None:
        """Number a tensor by what it holds."""
        values = t.detach().cpu().contiguous().reshape(-1)
        real = torch.view_as_real(values) if values.is_complex() else values
        wide = real.double() if real.is_floating_point() else real.long()
        bits = (wide + 0 if wide.dtype == torch.int64 else wide + 0.0).numpy().view(np.int64)
        found = hash64(bits)
        if values.is_complex():
            found = hash64((found[..., 0] ^ hash64(found[..., 1].view(np.int64))).view(np.int64))
        self.put(t, found.reshape(-1))
        self.constant.add(storage_key(t))

    def digest(self, t: Tensor) -> int:
        """Of the numbers of a tensor's elements, in their order."""
        window = self.window(t)
        if window is None:
            self.by_value(t)  # a tensor that came from nowhere, such as one in an attribute
            window = self.window(t)
        assert window is not None
        if not t.numel():
            return 0
        with np.errstate(over="ignore"):
            flat = window.reshape(-1) + np.arange(t.numel(), dtype=np.uint64) * _ODD
            return int(hash64(flat.view(np.int64)).sum(dtype=np.uint64))

    def value(self, value: Any) -> Value:
        """What a node has computed."""
        return tuple(
            (self.digest(x), tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
            for x in leaves(value)
        )

    # ---------------------------------------------------------------- operations
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with as_library():
            about = self._about(func, args, kwargs)
        result = func(*args, **kwargs)
        with as_library():
            self._number(func, args, kwargs, result, *about)
        return result

    def _about(self, func: Any, args: Any, kwargs: Any) -> tuple[int, bool, Hashes | None]:
        """The number of a call, before it writes to anything; whether all that it reads are
        constants; and the numbers of its first operand."""
        given = given_to(func, args, kwargs)
        tensors = [t for t in tree_leaves(list(given.values())) if isinstance(t, Tensor)]
        written = {id(t) for t in declared(func, args, kwargs)}
        name = operation(func)
        self._note_eps(name, given)
        constant = all(storage_key(t) in self.constant for t in tensors)
        shapes = {tuple(t.shape) for t in tensors}
        plain = torch.Tag.pointwise in func.tags and len(shapes) == 1
        commutes = name in COMMUTATIVE and len(tensors) == 2 and given.get("alpha", 1) == 1
        overwrites = name in ("copy", "fill", "zero", "uniform", "normal")
        parts: list[tuple[str, Any]] = []
        # weights that nothing was known of are numbered by this use, after all else
        for key, value in given.items():
            if not has_tensors(value) and key not in ignored(name):
                parts.append((key, in_one_form(key, value, tensors, name)))
        known = [t for t in tensors if not self._is_new(t)]
        first = _hash(name, tuple(parts), tuple(self.digest(t) for t in known))
        for i, t in enumerate(() if is_view(func) else tensors):
            if self._is_new(t) and not (overwrites and id(t) in written):
                # of one call, the first weight says which others it comes with
                place = 0 if commutes else i
                first = self._first_use(t, _hash(first, place, tuple(t.shape)))
        operands: list[Any] = []
        for value in (v for v in given.values() if has_tensors(v)):
            for t in (t for t in tree_leaves(value) if isinstance(t, Tensor)):
                if not (overwrites and id(t) in written):
                    operands.append(self.digest(t) if plain else (self.digest(t), tuple(t.shape)))
        if commutes:
            operands.sort(key=str)
        head = self.window(tensors[0]) if name in (*SAME, "_to_copy") and tensors else None
        number = _hash(name, tuple(parts), tuple(operands))
        return number, constant, None if head is None else head.copy()

    def _number(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        number: int,
        constant: bool,
        head: Hashes | None,
    ) -> None:
        written = declared(func, args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        storages = {storage_key(t) for t in tensors}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in fresh if storage_key(t) not in storages]
        name = operation(func)
        same = name in SAME or (name == "_to_copy" and fresh and fresh[0].dtype == tensors[0].dtype)
        for i, t in enumerate([*fresh, *written]):
            if constant and torch.Tag.nondeterministic_seeded not in func.tags:
                self.constant.discard(storage_key(t))
                self.by_value(t)
                continue
            self.constant.discard(storage_key(t))
            if name == "copy" and len(tensors) > 1:
                source = self.window(tensors[1])
                assert source is not None
                self.put(t, np.broadcast_to(source, t.shape))
            elif same and head is not None:
                self.put(t, head)
            else:
                self.fill(t, _hash(number, i))

    # ---------------------------------------------------------------- weights
    def _is_new(self, t: Tensor) -> bool:
        """Whether a tensor is a weight, or a part of one, that was not used yet."""
        if storage_key(t) not in self.owners or storage_key(t) in self.constant:
            return False
        window = self.window(t)
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
        self.fill(t, number)
        self.numbers.uses.append(Use(name, window, number, len(self.numbers.gives), kind, rank))
        return number

    def _note_eps(self, name: str, given: Mapping[str, Any]) -> None:
        variance = given.get("running_var")
        if "batch_norm" in name and isinstance(variance, Tensor):
            weight = given.get("weight")
            eps = float(given.get("eps", given.get("epsilon", 0.0)))
            owner = self.owners.get(storage_key(variance))
            scale = None if weight is None else self.owners.get(storage_key(weight))
            if owner is not None:
                self.numbers.eps.setdefault(owner, (eps, scale))


def _hash(*parts: Any) -> int:
    return int(hash64(hash(parts))) >> 1


def _blank(t: Tensor) -> _Numbered:
    storage = t.untyped_storage()
    count = storage.nbytes() // t.itemsize
    return _Numbered(StorageWeakRef(storage), t.itemsize, np.zeros(count, np.uint64))
