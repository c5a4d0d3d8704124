"""Untouched: run a model on its own weights, and leave them as they were.

Forward may write to its parameters and buffers.  Copying them all beforehand would double the
memory; here a tensor is copied when it is about to be written to, and restored at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        self._owned = {t.untyped_storage()._cdata for t in tensors}
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


def overwritten(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten call may write to; of a norm all, as some say nothing of it."""
    if "batch_norm" in op._schema.name:
        return [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return declared(op, args, kwargs)


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
