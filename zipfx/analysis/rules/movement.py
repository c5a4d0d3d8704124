"""Movement of data: the operation itself, run on the slots; no rule per operation.

Where data chooses what is moved, that pins the axis on which it chooses; the others are as before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zipfx.analysis.labels.labels import (
    Kind,
    Labels,
    beyond,
    broadcast,
    by_value,
    narrow,
    place,
    placed,
    positions,
    support,
)
from zipfx.analysis.rules.call import Call, aten, carried, first, pinned_along, rule
from zipfx.analysis.rules.pointwise import join
from zipfx.hashing import as_fixed, hash64


def movement(call: Call) -> Labels:
    """Run the operation itself on the slots; slots of several operands are moved together."""
    shape = tuple(first(call.result).shape)
    operands = [(t, call.of(t)) for t in {id(t): t for t in call.tensors()}.values()]
    moved = [(t, lab) for t, lab in operands if not _is_index(call, t)]
    kind = max((lab.kind for _, lab in operands), default=Kind.CONSTANT)
    features = _move(call, moved, feature=True)
    fixed = _move(call, moved, feature=False)
    call.constraints.entangle(features, fixed)
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
    ids = [call.constraints.ids(lab.features) for _, lab in moved]
    seen = torch.cat(ids).unique(return_counts=True)
    shared = seen[0][seen[1] > 1]
    for i, (t, lab) in enumerate(moved):
        told = any(dim in support(s) for s in lab.features) and not bool(
            torch.isin(ids[i], shared).any()
        )
        if told and call.op is not aten.stack.default:
            continue
        if lab.kind == Kind.CONSTANT and t.numel() and not lab.fixed:
            value = t.reshape(-1)[0].item()
            name = as_fixed(hash64([hash(value)])) if value else torch.zeros(1, dtype=torch.int64)
        else:
            name = as_fixed(hash64([i + 1]))
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
        args = (*args[:2], int(as_fixed(hash64([hash(value)]))) if value and not feature else 0)
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


@rule(
    *"gather index_select index_add index_add_ scatter_add scatter_add_".split(),
    *("index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce"),
    *(f"scatter{end}" for end in (".src", ".value", "_.src", "_.value", ".reduce", "_.reduce")),
    *("scatter_reduce.two", "scatter_reduce_.two", "scatter.value_reduce", "scatter_.value_reduce"),
)
def _by_data(call: Call) -> Labels:
    """Elements are moved along one axis to where data says; other axes stay as they are."""
    shape, dim = tuple(first(call.result).shape), call.arg("dim") % max(1, call.arg("self").ndim)
    operands = []
    for t in call.tensors():
        lab = call.of(t)
        if t is call.arg("index") and "index" in str(call.op):  # one number for each entry of `dim`
            lab = placed(lab, {0: dim} if lab.shape else {}, len(shape))
        elif any(n != m for d, (n, m) in enumerate(zip(lab.shape, shape)) if d != dim):
            call.constraints.pin(lab.features, f"{call.op} reads a part of it, chosen by data")
            lab = replace(lab, features=(), fixed=())
        operands.append(pinned_along(call.constraints, lab, {dim}, "chosen by data"))
    y = join(call.constraints, operands, shape)
    return replace(y, fixed=(*y.fixed, *positions(shape, [dim])))


@rule("diag_embed")
def _diagonal_matrix(call: Call) -> Labels:
    """A vector times the identity."""
    v, shape, offset = call.labels("self"), tuple(call.result.shape), call.arg("offset")
    if offset:
        return movement(call)
    dims = [call.arg(name) % len(shape) for name in ("dim1", "dim2")]
    others = [d for d in range(len(shape)) if d not in dims]
    identity = placed(by_value(torch.eye(v.shape[-1])), dict(enumerate(dims)), len(shape))
    along = placed(v, dict(enumerate([*others, dims[0]])), len(shape))
    return join(call.constraints, [along, identity], shape)


@rule("segment_reduce")
def _segments(call: Call) -> Labels:
    """Rows are taken together, as many at a time as data says."""
    axis, shape = int(call.arg("axis")), tuple(call.result.shape)
    x = pinned_along(call.constraints, call.labels("data"), {axis}, "chosen by data")
    y = replace(x, shape=shape, fixed=(*x.fixed, *positions(shape, [axis])))
    return replace(y, kind=max(call.of(t).kind for t in call.tensors()))


@rule("masked_scatter")
def _fill_in(call: Call) -> Labels:
    """Elements of another tensor, one after the other, where a mask says so.

    Whole rows, if the mask is one for all of a row and both have rows of one length.
    """
    x, mask, source = (call.labels(name) for name in ("self", "mask", "source"))
    last, flags = len(x.shape) - 1, call.arg("mask").expand(x.shape)
    rows = source.shape[-1:] == x.shape[-1:] and bool((flags == flags[..., :1]).all())
    rows = rows and not any(last in support(s) for s in (*mask.features, *mask.fixed))
    reason, kept = "chosen by data", set(range(last)) if rows else set(range(last + 1))
    call.constraints.pin(mask.features, reason)
    x = pinned_along(call.constraints, x, kept, reason)
    others = set(range(len(source.shape) - rows))
    source = pinned_along(call.constraints, source, others, reason)
    filled = placed(source, {len(source.shape) - 1: last}, last + 1)
    if not rows:
        filled = replace(filled, features=(), fixed=())
    y = join(call.constraints, [x, replace(filled, shape=x.shape)], x.shape)
    return replace(y, fixed=(*y.fixed, *positions(x.shape, kept)))


@rule("linalg_cross")
def _cross(call: Call) -> Labels:
    """Of three coordinates, in a product of two."""
    shape, operands = tuple(call.result.shape), []
    dim = int(call.arg("dim")) % len(shape)
    for name in ("self", "other"):
        lab = call.labels(name)
        at = dim - len(shape) + len(lab.shape)
        operands.append(pinned_along(call.constraints, lab, {at}, "coordinates keep their order"))
    y = join(call.constraints, operands, shape)
    return replace(y, fixed=(*y.fixed, *positions(shape, [dim])))


def _listed(call: Call) -> tuple[list[int], dict[int, int], range]:
    """x[i] or x[:, i, j] or x[mask]: the axes where data chooses, where the others lie in the
    result, and the axes of the result that count what was chosen."""
    given = call.arg("indices")
    masks = (torch.bool, torch.uint8)
    numbers = [
        n
        for i in given
        for n in (i.nonzero(as_tuple=True) if i is not None and i.dtype in masks else (i,))
    ]
    dims = [d for d, n in enumerate(numbers) if n is not None]
    rows = len(torch.broadcast_shapes(*(numbers[d].shape for d in dims)))
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    others = [d for d in range(call.arg("self").ndim) if d not in dims]
    out = [d for d in range(len(others) + rows) if not at <= d < at + rows]
    for t in tree_leaves(given):
        call.constraints.pin(
            call.of(t).features if isinstance(t, Tensor) else (), "chooses elements"
        )
    return dims, dict(zip(others, out)), range(at, at + rows)


@rule("index.Tensor")
def _by_list(call: Call) -> Labels:
    """What lies on other axes stays as it is."""
    shape = tuple(call.result.shape)
    dims, keep, rows = _listed(call)
    x = pinned_along(call.constraints, call.labels("self"), dims, "chosen by data")
    made = carried(x.features, keep, len(shape))
    if x.kind == Kind.WEIGHT:  # as an embedding
        call.constraints.make(made)
    fixed = [place(s, keep, len(shape)) for s in x.fixed]
    return Labels(shape, tuple(made), (*fixed, *positions(shape, rows)), Kind.DATA)


@rule("index_put", "index_put_")
def _put_by_list(call: Call) -> Labels:
    """The new values meet what lies on other axes."""
    values = call.labels("values")
    dims, keep, rows = _listed(call)
    x = pinned_along(call.constraints, call.labels("self"), dims, "chosen by data")
    ndim, before = len(x.shape), len(keep) + len(rows) - len(values.shape)
    back = {to - before: d for d, to in keep.items() if to >= before}
    call.constraints.pin([s for s in values.features if not support(s) <= set(back)], "put by data")
    gone = set(range(len(values.shape))) - set(back)
    fixed = tuple(place(s, back, ndim) for s in beyond(values.fixed, gone))
    kept = Labels(x.shape, tuple(carried(values.features, back, ndim)), fixed, values.kind)
    y = join(call.constraints, [x, kept], x.shape)
    return replace(y, fixed=(*y.fixed, *positions(x.shape, dims)))


MOVEMENT = {
    op
    for name in (
        "cat stack constant_pad_nd index index_select gather roll flip repeat clone im2col "
        "pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d "
        "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d block_diag "
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
        "empty_like rand_like randn_like randint_like"
    ).split()
    for op in [getattr(aten, name).default]
}
