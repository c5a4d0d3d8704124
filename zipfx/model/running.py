"""Untouched: run a model on its own weights, and leave them as they were.

Forward may write to its parameters and buffers.  Copying them all beforehand would double the
memory; here a tensor is copied when it is about to be written to, and restored at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.model.memory import storage_key


@contextmanager
def untouched(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo at exit what happened to these tensors inside.

    >>> weight = torch.zeros(2)
    >>> with untouched([weight]):
    ...     _ = weight.view(1, 2).add_(1)
    >>> weight
    tensor([0., 0.])
    """
    guard = Guard(tensors)
    try:
        with guard:
            yield
    finally:
        guard.restore()


class Guard(TorchDispatchMode):
    """While it is on, keeps what these tensors held before they were written to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = list(tensors)
        self._owned = {storage_key(t) for t in self._tensors}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in overwritten(func, args, kwargs or {}):
            self._save(t)
        return func(*args, **(kwargs or {}))

    def _save(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self._owned and storage._cdata not in self._saved:
            whole = torch.empty(0, dtype=t.dtype, device=t.device)
            whole = whole.set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))
            self._saved[storage._cdata] = whole, whole.clone()

    def restore(self) -> None:
        """Undo all writes."""
        with torch.no_grad():
            for whole, before in self._saved.values():
                whole.copy_(before)

    @property
    def written(self) -> list[Tensor]:
        """Those of the tensors that were written to, as far as memory tells."""
        return [t for t in self._tensors if storage_key(t) in self._saved]


class State:
    """Tensors that a module's forward writes to, and what they hold before it ever runs.

    Whatever is run on data begins each time with that, so that a result depends neither on the
    order of batches nor on how many there were.

    >>> counter = torch.zeros(2)
    >>> state = State([counter])
    >>> _ = counter.add_(1)
    >>> state.reset()
    >>> counter
    tensor([0., 0.])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.initial = self.values()

    def values(self) -> list[Tensor]:
        """What they hold now."""
        return [t.detach().clone() for t in self.tensors]

    def reset(self, values: Sequence[Tensor] | None = None) -> None:
        """Write what they held at first, or other values."""
        with torch.no_grad():
            for t, value in zip(self.tensors, self.initial if values is None else values):
                t.copy_(value)


def overwritten(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten call writes to; a norm does so in training only, whatever its schema
    says."""
    found, name = declared(op, args, kwargs), op._schema.name
    if "batch_norm" not in name:
        return found
    given = {a.name: v for a, v in zip(op._schema.arguments, args)} | kwargs
    statistics = [given.get(key) for key in ("running_mean", "running_var")]
    others = [t for t in found if all(t is not s for s in statistics)]
    trains = given.get("training", name.endswith("_with_update"))
    return [*others, *(t for t in statistics if trains and isinstance(t, Tensor))]


def declared(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten call writes to, by its schema."""
    if torch.Tag.inplace_view in op.tags:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found
