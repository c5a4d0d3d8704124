"""Spelling: aten calls in one form, whichever of the ways to write the same was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
COMMUTATIVE = ("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or")
_REDUCTIONS = ("mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp", "any", "all")


def given_to(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an aten call by name, defaults included."""
    given = {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in enumerate(func._schema.arguments)
    }
    if "kernel_size" in given and not given.get("stride", True):  # of a pooling: as the kernel
        given["stride"] = given["kernel_size"]
    return given


def operation(func: Any) -> str:
    """What an operation does, in place or not."""
    name = str(func._schema.name).rpartition("::")[2]
    if "batch_norm" in name:
        return "batch_norm"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_view(func: Any) -> bool:
    """Whether an operation only looks at all of its argument in another way."""
    return operation(func) in _VIEWS


def ignored(name: str) -> frozenset[str]:
    return _IDLE | _OF_BATCH_NORM if name == "batch_norm" else _IDLE


def has_tensors(value: Any) -> bool:
    return any(isinstance(t, Tensor) for t in tree_leaves(value))


def in_one_form(key: str, value: Any, tensors: Sequence[Tensor], name: str) -> Any:
    """A setting, in one form."""
    if isinstance(value, (list, tuple)):
        found = tuple(in_one_form(key, v, tensors, name) for v in value)
        return tuple(sorted(found)) if key == "dim" and name in _REDUCTIONS else found
    if key.startswith("dim") and isinstance(value, int) and tensors and tensors[0].ndim:
        return value % tensors[0].ndim
    if isinstance(value, torch.dtype):
        return None if tensors and tensors[0].dtype == value else str(value)
    return value if isinstance(value, (bool, int, float, complex, str, type(None))) else repr(value)
