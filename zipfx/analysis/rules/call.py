"""Call: one aten call as rules see it, and the table of rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Labels, beyond, is_padded, narrow, place, project, support

aten: Any = torch.ops.aten
Lookup = Callable[[Tensor], Labels]


@dataclass(frozen=True)
class Call:
    """One aten call: its arguments bound by name, its result, and the labels of its tensors.

    see: calls a function, so that the operations it is made of are seen, and their results have
    labels.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    constraints: Constraints
    of: Lookup
    see: Callable[..., Any]

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
#: by name, of libraries that are not imported here, and may be loaded later
ELSEWHERE: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten overloads by name (names this torch does not have are skipped), or
    for operations of another library, named as in `torchvision::roi_align`."""

    def register(function: Rule) -> Rule:
        for name in names:
            if "::" in name:
                ELSEWHERE[name] = function
                continue
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None:
                RULES[op] = function
        return function

    return register


def rule_of(op: Any) -> Rule | None:
    """The rule of an operation, if it has one."""
    return RULES.get(op) or ELSEWHERE.get(op.name())


@functools.cache
def made_of_others(op: Any) -> bool:
    """Whether an operation is nothing but others, which are seen in its place."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(op, OpOverload) and bool(op.has_kernel_for_dispatch_key(key))


@functools.cache
def functional(op: Any) -> Any:
    """The operation that gives what this one writes to its first argument (itself, if none)."""
    name = op.name().removeprefix("aten::").partition(".")[0]
    if not name.endswith("_") or name.endswith("__"):
        return op
    return getattr(getattr(aten, name[:-1], None), op._overloadname, op)


def first(result: Any) -> Tensor:
    return next(t for t in tree_leaves(result) if isinstance(t, Tensor))


def carried(slots: Sequence[Tensor], dims: dict[int, int], ndim: int) -> list[Tensor]:
    """The slots that live only on `dims` (old -> new), at their place in the result."""
    return [place(s, dims, ndim) for s in slots if support(s) <= set(dims) and support(s)]


def without_padding(
    constraints: Constraints, slot: Tensor, dims: Collection[int], *, alike: bool = False
) -> Tensor | None:
    """A slot that varies along `dims` only in where features are missing (zero padding), without
    these dimensions; None if it is another.

    Features that are missing elsewhere than others are told apart; alike: none may be.
    """
    along = sorted(support(slot) & set(dims))
    if not along:
        return slot
    found = slot.amax(along, keepdim=True)
    if bool(((slot != found) & (slot != 0)).any()):
        return None
    apart = {d for d in support(found) if not is_padded(found, d)}
    missing = project(torch.where(slot == 0, -1, -2), apart)
    if bool((missing != missing.reshape(-1)[0]).any()):
        if alike:
            return None
        label = found.amax([d for d in range(found.ndim) if d not in apart], keepdim=True)
        constraints.colour(label, missing.expand(label.shape))
    return narrow(found)


def pinned_along(constraints: Constraints, x: Labels, dims: Collection[int], reason: str) -> Labels:
    """Labels of what an operation does along `dims` as only data knows, or in an order of its own:
    features that lie there are pinned, what lies elsewhere is as before."""
    slots = [(s, without_padding(constraints, s, dims)) for s in x.features]
    constraints.pin([s for s, rest in slots if rest is None], reason)
    features = tuple(rest for _, rest in slots if rest is not None)
    return replace(x, features=features, fixed=beyond(x.fixed, dims))


def opaque(call: Call) -> None:
    """What is not understood pins everything it touches."""
    name, where = call.op.name(), call.constraints.where
    why = f"{name} is not understood ({where})"
    if any(isinstance(t, Tensor) for t in tree_leaves(call.result)) or call.op._schema.is_mutable:
        why += "; teach it with zipfx.register_rule, see docs/analysis.md"
    for t in call.tensors():
        call.constraints.pin(call.of(t).features, why)
