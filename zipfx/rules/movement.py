"""Data movement: the operation itself, run on the slots; no rule per operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zipfx.labels import Kind, Labels, as_fixed, broadcast, mix, narrow, support
from zipfx.rules.call import Call, aten, first


def movement(call: Call) -> Labels:
    """Run the operation itself on the slots; slots of several operands are moved together."""
    shape = tuple(first(call.result).shape)
    operands = [(t, call.of(t)) for t in {id(t): t for t in call.tensors()}.values()]
    moved = [(t, lab) for t, lab in operands if not _is_index(call, t)]
    kind = max((lab.kind for _, lab in operands), default=Kind.CONSTANT)
    features = _move(call, moved, feature=True)
    fixed = _move(call, moved, feature=False)
    call.ledger.entangle(features, fixed)
    return Labels(shape, features, fixed, kind)


def _is_index(call: Call, t: Tensor) -> bool:
    indices = tree_leaves((call.arg("indices"), call.arg("index")))
    return any(t is i for i in indices)


def _move(call: Call, moved: list[tuple[Tensor, Labels]], *, feature: bool) -> tuple[Tensor, ...]:
    families: dict[frozenset[int], dict[int, Tensor]] = {}
    for t, lab in moved:
        slots = lab.features if feature else lab.fixed
        for slot in slots:
            key = support(slot)
            while id(t) in families.get(key, {}):  # a second slot of this shape
                key = key | {-1 - len(key)}
            families.setdefault(key, {})[id(t)] = slot
    if not feature and len(moved) > 1:
        families = _tell_operands_apart(call, moved, families)
    result = []
    for family in families.values():
        slot = narrow(_run_on(call, family, feature))
        if bool(slot.any()):
            result.append(slot)
    return tuple(_side_by_side(result) if feature and len(moved) > 1 else result)


def _side_by_side(slots: list[Tensor]) -> list[Tensor]:
    """Slots of joined tensors that are nowhere both present are one slot (a class token that all
    positions share, beside features of their own at every position)."""
    kept: list[Tensor] = []
    for slot in slots:
        for i, other in enumerate(kept):
            u, v = broadcast(slot, other)
            if support(slot) & support(other) and not bool(((u > 0) & (v > 0)).any()):
                kept[i] = torch.where(u > 0, u, v)
                break
        else:
            kept.append(slot)
    return kept


def _tell_operands_apart(
    call: Call,
    moved: list[tuple[Tensor, Labels]],
    families: dict[frozenset[int], dict[int, Tensor]],
) -> dict[frozenset[int], dict[int, Tensor]]:
    """Joined tensors differ from one another along the axis of joining (cat, stack, ...).

    Where an operand has features there that no other has, they say so; a uniform constant is told
    by its value.
    """
    dim = call.arg("dim", 0) % max(1, first(call.result).ndim)
    names: dict[int, Tensor] = {}
    ids = [call.ledger.ids(lab.features) for _, lab in moved]
    seen = torch.cat(ids).unique(return_counts=True)
    shared = seen[0][seen[1] > 1]
    for i, (t, lab) in enumerate(moved):
        told = any(dim in support(s) for s in lab.features) and not bool(
            torch.isin(ids[i], shared).any()
        )
        if told and call.op is not aten.stack.default:
            continue
        if lab.kind == Kind.CONSTANT and t.numel() and not lab.fixed:
            value = float(t.reshape(-1)[0])
            name = as_fixed(mix([hash(value)])) if value else torch.zeros(1, dtype=torch.int64)
        else:
            name = as_fixed(mix([i + 1]))
        names[id(t)] = name.reshape([1] * t.ndim)
    return {**families, frozenset({-99}): names} if names else families


def _run_on(call: Call, family: dict[int, Tensor], feature: bool) -> Tensor:
    def swap(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if id(a) in family:
            return family[id(a)].expand(a.shape)
        if _is_index(call, a):
            return a.cpu()
        return torch.zeros((), dtype=torch.int64).expand(a.shape)

    args, kwargs = tree_map(swap, (call.args, call.kwargs))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout")}
    if call.op is aten.constant_pad_nd.default:  # the padding is one coordinate, none if zero
        value = call.arg("value")
        args = (*args[:2], int(as_fixed(mix([hash(float(value))]))) if value and not feature else 0)
    try:
        moved: Tensor = call.op(*args, **kwargs)
    except RuntimeError:  # not there for integers
        moved = _by_index(call, family)
    return moved


def _by_index(call: Call, family: dict[int, Tensor]) -> Tensor:
    """Where the elements of a result come from is found by moving their numbers as floats."""
    (t,) = {id(t): t for t in call.tensors()}.values()
    numbers = torch.arange(1, t.numel() + 1, dtype=torch.float64).reshape(t.shape)
    args, kwargs = tree_map(lambda a: numbers if a is t else a, (call.args, call.kwargs))
    source = call.op(*args, **kwargs).round().long()
    labels = family[id(t)].expand(t.shape).reshape(-1)
    return torch.where(source > 0, labels[(source - 1).clamp(min=0)], 0)


MOVEMENT = {
    op
    for name in (
        "cat stack constant_pad_nd index index_select gather roll flip repeat clone im2col "
        "pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d "
        "repeat_interleave slice_scatter select_scatter diagonal_scatter lift_fresh_copy tril triu "
        "_reshape_copy _unsafe_view rot90 tile take_along_dim _unsafe_index"
    ).split()
    for op in (
        getattr(getattr(aten, name, None), o, None)
        for o in getattr(getattr(aten, name, None), "overloads", list)()
    )
    if op is not None and not str(op).endswith(("out", "Tensor_Scalar"))
}
IDENTITY = {aten._to_copy.default, aten.lift_fresh.default, aten.lift.default}
UNIFORM = {
    op
    for name in (
        "new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like full_like "
        "empty_like"
    ).split()
    for op in [getattr(aten, name).default]
}
