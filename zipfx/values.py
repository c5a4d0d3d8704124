"""Values: dataclasses that hold tensors, equal where all that they hold is equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ByValue:
    """Equality and hash of a frozen dataclass that may hold tensors; declare it with `eq=False`.

    Tensors are equal where their dtypes, shapes and entries are, on any device; nan is equal to nan
    (nothing was measured, twice). The hash goes by the shapes of tensors, not by what is in them.
    Fields with `compare=False` do not count.

    >>> @dataclasses.dataclass(frozen=True, eq=False)
    ... class Index(ByValue):
    ...     of: str
    ...     index: Tensor
    >>> a, b, c = (Index("a", torch.tensor(x)) for x in ([0, 1], [0, 1], [1, 0]))
    >>> a == b, a == c, a == "a", hash(a) == hash(b), len({a, b, c})
    (True, False, False, True, 2)
    """

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or all(
            same(ours, theirs)
            for ours, theirs in zip(_compared(self), _compared(other), strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self), *map(_hashable, _compared(self))))


def _compared(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value) if field.compare]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, with tensors in them compared entry by entry.

    >>> same({"x": (torch.ones(2), 1.0)}, {"x": (torch.ones(2), 1.0)})
    True
    """
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensors(a, b)
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.is_meta or b.is_meta:
        return False
    a, b = a.detach(), b.detach().to(a.device)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _hashable(value: Any) -> Any:
    """What is the same for all values that are equal to this one, and has a hash."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.shape
    if isinstance(value, (tuple, list)):
        return type(value), *map(_hashable, value)
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(v)) for key, v in value.items())
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # those of Python have hashes by identity
    return value
