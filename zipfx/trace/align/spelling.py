"""Spelling: aten calls in one form, whichever of the ways to write the same was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.model.running import declared

#: results are their first argument, but for shape, layout, or nothing at all
SAME = "clone lift_fresh lift_fresh_copy lift contiguous alias detach _reshape_copy".split()
#: arguments that make no difference to what is computed
_IDLE = frozenset(
    "memory_format layout device pin_memory keepdim non_blocking copy benchmark deterministic "
    "allow_tf32".split()
)
#: and those of a BatchNorm in eval mode; its eps can be made up for
_OF_BATCH_NORM = frozenset(
    "eps epsilon momentum exponential_average_factor training cudnn_enabled".split()
)
#: what keeps all elements, and computes nothing; parts that are cut out are another matter
_VIEWS = frozenset(
    "t transpose numpy_T permute movedim view reshape _unsafe_view flatten unflatten unsqueeze "
    "squeeze expand alias detach".split()
)
_COMMUTATIVE = ("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or")
#: what is filled from elsewhere, whatever it held
_OVERWRITES = ("copy", "fill", "zero", "uniform", "normal")
_REDUCTIONS = ("mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp", "any", "all")


@dataclass(frozen=True)
class AtenCall:
    """An aten call.

    name: what it does, in place or not; given: its arguments by name, defaults included; tensors:
    those among them, in order; written: those that it writes to.
    """

    func: Any
    name: str
    given: Mapping[str, Any]
    tensors: Sequence[Tensor]
    written: Sequence[Tensor]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Mapping[str, Any]) -> AtenCall:
        given = _given(func, args, kwargs)
        written = declared(func, args, dict(kwargs))
        return cls(func, _operation(func), given, _tensors(list(given.values())), written)

    @property
    def is_view(self) -> bool:
        """Whether it only looks at all of its argument in another way."""
        return self.name in _VIEWS

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def is_plain(self) -> bool:
        """Whether it works on one element of each tensor at a time, none of which is repeated."""
        shapes = {tuple(t.shape) for t in self.tensors}
        return torch.Tag.pointwise in self.func.tags and len(shapes) == 1

    @property
    def commutes(self) -> bool:
        """Whether its two operands may change places."""
        scaled = self.given.get("alpha", 1) != 1
        return self.name in _COMMUTATIVE and len(self.tensors) == 2 and not scaled

    @cached_property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """All that makes a difference but the tensors, in one form."""
        return tuple(
            (key, _in_one_form(key, value, self.tensors, self.name))
            for key, value in self.given.items()
            if not _tensors(value) and key not in _ignored(self.name)
        )

    @property
    def operands(self) -> list[Tensor]:
        """The tensors that it reads."""
        return [t for t in self.tensors if self.reads(t)]

    def reads(self, t: Tensor) -> bool:
        """Whether what a tensor holds makes a difference; else it is only written to."""
        return self.name not in _OVERWRITES or all(t is not w for w in self.written)


def _given(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an aten call by name, defaults included."""
    given = {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in enumerate(func._schema.arguments)
    }
    if "kernel_size" in given and not given.get("stride", True):  # of a pooling: as the kernel
        given["stride"] = given["kernel_size"]
    return given


def _operation(func: Any) -> str:
    """What an operation does, in place or not."""
    name = str(func._schema.name).rpartition("::")[2]
    if "batch_norm" in name:
        return "batch_norm"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _ignored(name: str) -> frozenset[str]:
    return _IDLE | _OF_BATCH_NORM if name == "batch_norm" else _IDLE


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _in_one_form(key: str, value: Any, tensors: Sequence[Tensor], name: str) -> Any:
    """A setting, in one form."""
    if isinstance(value, (list, tuple)):
        found = tuple(_in_one_form(key, v, tensors, name) for v in value)
        return tuple(sorted(found)) if key == "dim" and name in _REDUCTIONS else found
    if key.startswith("dim") and isinstance(value, int) and tensors and tensors[0].ndim:
        return value % tensors[0].ndim
    if isinstance(value, torch.dtype):
        return None if tensors and tensors[0].dtype == value else str(value)
    return value if isinstance(value, (bool, int, float, complex, str, type(None))) else repr(value)
