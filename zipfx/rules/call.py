"""One aten call as rules see it, and the table of rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.labels import Labels, place, support
from zipfx.ledger import Ledger

aten: Any = torch.ops.aten
Lookup = Callable[[Tensor], Labels]


@dataclass(frozen=True)
class Call:
    """One aten call: its arguments bound by name, its result, and the labels of its tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ledger: Ledger
    of: Lookup

    def arg(self, name: str, default: Any = None) -> Any:
        for i, a in enumerate(self.op._schema.arguments):
            if a.name == name:
                if i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, a.default_value if a.has_default_value() else default)
        return default

    def labels(self, name: str) -> Labels:
        return self.of(self.arg(name))

    def tensors(self) -> list[Tensor]:
        return self._tensors

    @functools.cached_property
    def _tensors(self) -> list[Tensor]:
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]


Rule = Callable[[Call], "Labels | tuple[Labels, ...]"]
RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten overloads by name (names this torch does not have are skipped)."""

    def register(function: Rule) -> Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None:
                RULES[op] = function
        return function

    return register


def first(result: Any) -> Tensor:
    return next(t for t in tree_leaves(result) if isinstance(t, Tensor))


def carried(slots: Sequence[Tensor], dims: dict[int, int], ndim: int) -> list[Tensor]:
    """The slots that live only on `dims` (old -> new), at their place in the result."""
    return [place(s, dims, ndim) for s in slots if support(s) <= set(dims) and support(s)]
