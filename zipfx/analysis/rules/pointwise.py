"""Pointwise: broadcast, unify the features that meet, colour them by what else meets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.incidence import crosses
from zipfx.analysis.labels.labels import (
    Kind,
    Labels,
    beyond,
    broadcast,
    coordinates,
    place,
    project,
    support,
    vector,
)
from zipfx.analysis.rules.call import Call, aten, first, pinned_along, rule, without_padding
from zipfx.hashing import as_fixed, hash64

Slots = list[tuple[Tensor, Kind]]


def tie_diagonals(
    constraints: Constraints, slots: Slots, fixed: Sequence[Tensor]
) -> tuple[Slots, list[Tensor]]:
    """Make the features one that a diagonal ties, in place of colouring them by position.

    Where features lie along only one of the two axes, the other has them, too, from now on: a
    diagonal matrix hands them on. Returns all slots, and what is left of the coordinates.
    """
    left: list[Tensor] = []
    for slot in fixed:
        dims = _square(slot)
        found = None if dims is None else _tie(constraints, slots, slot, dims)
        if dims is None or found is None:
            left.append(slot)
            continue
        slots = [*slots, *found]
        rest = support(slot) - set(dims)
        left += [project(slot, rest)] if rest else []
    return slots, left


def _square(slot: Tensor) -> tuple[int, int] | None:
    """Two dimensions along which a slot has one value on the diagonal of a square (or one for every
    entry of it), and another everywhere else; other dimensions do not matter."""
    for a, b in itertools.combinations(sorted(support(slot)), 2):
        if (n := slot.shape[a]) == slot.shape[b]:
            rows = slot.movedim((a, b), (0, 1)).reshape(n * n, -1)
            off = ~torch.eye(n, dtype=torch.bool).reshape(-1)
            if bool((rows[off] == rows[1]).all()):
                return a, b
    return None


def _tie(
    constraints: Constraints, slots: Slots, slot: Tensor, dims: tuple[int, int]
) -> Slots | None:
    """The slots that come in addition; None where features lie along these dimensions otherwise."""
    met = [(s, kind) for s, kind in slots if support(s) & set(dims)]
    alone = [(s, kind, d) for s, kind in met for d in dims if support(s) == {d}]
    ids = [vector(s, d) for s, _, d in alone]
    if not met or len(alone) < len(met) or any(len(v[v > 0].unique()) < len(v) for v in ids):
        return None
    first, kind, _ = alone[0]
    for other in ids[1:]:
        constraints.relate(ids[0], other)
    constraints.bilinear.append(
        (ids[0].numpy(), constraints.node)
    )  # masks must be those of all models
    entries = slot.diagonal(0, *dims).movedim(-1, 0).reshape(len(ids[0]), -1)
    values = project(entries, {0}).expand(len(ids[0]), 1).reshape(-1)
    if len(values.unique()) > 1:
        constraints.colour(ids[0], values)
    missing = [d for d in dims if all(d != held for _, _, held in alone)]
    return [(place(constraints.twins(ids[0]), {0: d}, first.ndim), kind) for d in missing]


#: pointwise, but without the tag
ALSO_POINTWISE = {
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("hardswish", "default"),
        ("hardswish_", "default"),
        ("_prelu_kernel", "default"),
        ("native_dropout", "default"),
        ("nan_to_num", "default"),
        ("log_sigmoid_forward", "default"),
        ("rrelu_with_noise", "default"),
        ("complex", "default"),
        ("polar", "default"),
        ("floor_divide", "default"),
        ("floor_divide", "Scalar"),
        ("floor_divide_", "Tensor"),
        ("floor_divide_", "Scalar"),
    )
}


def join(constraints: Constraints, operands: Sequence[Labels], shape: Sequence[int]) -> Labels:
    """Labels of a pointwise result: broadcast, then unify features and colour what meets them."""
    ndim = len(shape)
    kind = max((o.kind for o in operands), default=Kind.CONSTANT)
    features: list[tuple[Tensor, Kind]] = []
    fixed: list[Tensor] = []
    operands = _parted(constraints, operands, ndim)
    seen = [_align(s, _trailing(o, ndim), ndim) for o in operands for s in o.fixed]
    for operand in operands:
        aligned = _trailing(operand, ndim)
        mine = [_align(slot, aligned, ndim) for slot in operand.features]
        features = meet(constraints, features, mine, operand.kind, seen)
        for slot in (_align(slot, aligned, ndim) for slot in operand.fixed):
            fixed = _meet_fixed(fixed, slot)
    features, fixed = tie_diagonals(constraints, features, fixed)
    slots = tuple(slot for slot, _ in features)
    constraints.entangle(slots, fixed)
    fixed = [p for p in fixed if not any(_tells(f, p) for f in slots)]
    return Labels(tuple(shape), slots, tuple(fixed), kind)


def _tells(feature: Tensor, fixed: Tensor) -> bool:
    """Whether a feature slot tells a coordinate: what it has met is part of its colour by then, so
    that the coordinate says no more."""
    if not support(fixed) <= support(feature):
        return False
    u, v = broadcast(feature, fixed)
    if bool((u <= 0)[v != 0].any()):
        return False
    pairs = torch.stack([u.reshape(-1), v.reshape(-1)]).unique(dim=1)
    return bool(len(torch.unique(pairs[0])) == pairs.shape[1])


def _parted(constraints: Constraints, operands: Sequence[Labels], ndim: int) -> Sequence[Labels]:
    """A weight with two axes that meets features along both has features of its own in every row
    (the biases of stacked experts)."""
    met = [
        {d + ndim - len(o.shape) for d in support(s)}
        for o in operands
        if o.kind == Kind.DATA
        for s in o.features
    ]
    result = []
    for o in operands:
        slots = sorted((s for s in o.features if support(s)), key=lambda s: int(s.max()))
        both = {d + ndim - len(o.shape) for s in slots for d in support(s)}
        if o.kind == Kind.WEIGHT and len(slots) == 2 and any(both <= m for m in met):
            own = constraints.parted(slots[1], slots[0])
            if own is not None:
                kept = constraints.relate(own, slots[0], weights_only=True)
                single = (s for s in o.features if not support(s))
                o = replace(o, features=(*single, *kept))
        result.append(o)
    return result


def reduce(
    constraints: Constraints,
    slots: Sequence[Tensor],
    dims: Collection[int],
    fixed: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What is left of a tensor's slots when everything along `dims` is taken together, symmetric.

    Slots that lie elsewhere, and a block for every part of the others; nothing where all of an axis
    takes part. fixed: the tensor's coordinates. Where two slots tell a feature only together, pairs
    are summed, which is symmetric in neither: they are pinned, and tell the parts as coordinates
    (unless coordinates tell one of the two already). Of what is summed as a whole, some features,
    or some pairs of two, may count more often than others.
    """
    along = set(dims)
    was, slots = slots, [_unpadded(constraints, slot, along) for slot in slots]
    every = [i for i, slot in enumerate(slots) if support(slot) and support(slot) <= along]
    for i in every:
        constraints.counted(slots[i])
    for i, j in itertools.combinations(every, 2):
        if support(slots[i]) & support(slots[j]) and _both(was[i], was[j]):
            constraints.relate(slots[i], slots[j], fixed)
    parts = [slot for slot in slots if support(slot) & along and support(slot) - along]
    pairs = [
        (slot, other)
        for slot in parts
        for other in slots
        if other is not slot
        and (shared := support(slot) & support(other) & along)
        and not (told(fixed, shared, slot) or told(fixed, shared, other))
        and crosses(slot, other, along)
    ]
    crossed = {id(s): s for pair in pairs for s in pair}
    if crossed:
        constraints.pin(crossed.values(), "features are summed in pairs: they keep their order")
    apart = tuple(project(-s, support(s) - along) for s in crossed.values() if support(s) - along)
    left = [slot for slot in slots if not support(slot) & along]
    padded = [slot for slot in left if all(slot is not old for old in was)]
    blocks = [constraints.block(slot, along, fixed) for slot in parts if id(slot) not in crossed]
    kept = [(slot, Kind.DATA) for slot in left if all(slot is not new for new in padded)]
    for slot in (*padded, *blocks):
        kept = meet(constraints, kept, [slot], Kind.DATA)
    return tuple(slot for slot, _ in kept), (*beyond(fixed, along), *apart)


def _both(one: Tensor, other: Tensor) -> bool:
    """Whether two slots are anywhere both present."""
    u, v = broadcast(one, other)
    return bool(((u > 0) & (v > 0)).any())


def _unpadded(constraints: Constraints, slot: Tensor, along: set[int]) -> Tensor:
    """Without padding that all features have alike, which takes part in the same way for all; and
    without rows in which nothing is (the steps that a short sentence does not have)."""
    for dims in (along, support(slot) - along):
        rest = (
            without_padding(constraints, slot, dims, alike=dims is along)
            if support(slot) & along
            else None
        )
        slot = slot if rest is None else rest
    return slot


def told(fixed: Sequence[Tensor], dims: Collection[int], slot: Tensor) -> bool:
    """Whether coordinates along `dims` tell which label of a part is where."""
    last = tuple(range(-len(dims), 0))
    seen = np.broadcast_to(coordinates(fixed, slot.shape, dims), slot.shape)
    seen = np.moveaxis(seen, sorted(dims), last).reshape(-1, math.prod(slot.shape[d] for d in dims))
    order = np.argsort(seen[0], kind="stable")
    labels = slot.movedim(sorted(dims), last).reshape(seen.shape)[:, order]
    alike = torch.from_numpy(seen[0][order][1:] == seen[0][order][:-1])
    return bool((labels[:, 1:] == labels[:, :-1])[:, alike].all())


@contextmanager
def not_elementwise(constraints: Constraints) -> Iterator[None]:
    """A weight that meets data inside is read, or added to what it makes: no elementwise weight."""
    had = "elementwise" in constraints.traits.get(constraints.node, ())
    yield
    if not had:
        constraints.traits.get(constraints.node, set()).discard("elementwise")


def _trailing(lab: Labels, ndim: int) -> dict[int, int]:
    """Where the dimensions of an operand lie after broadcasting."""
    return {i: i + ndim - len(lab.shape) for i in range(len(lab.shape))}


def _align(slot: Tensor, dims: dict[int, int], ndim: int) -> Tensor:
    return slot if slot.ndim == ndim else place(slot, dims, ndim)


def meet(
    constraints: Constraints,
    ours: list[tuple[Tensor, Kind]],
    theirs: Sequence[Tensor],
    kind: Kind,
    fixed: Sequence[Tensor] = (),
) -> list[tuple[Tensor, Kind]]:
    """Relate every slot of one operand to those of another that vary along the same dimensions."""
    result = list(ours)
    for new in theirs:
        if any(new is f or _equal(f, new) for f, _ in result):
            continue
        for i, (old, old_kind) in enumerate(ours):
            if not support(old) & support(new) or all(old is not f for f, _ in result):
                continue
            if {kind, old_kind} == {Kind.WEIGHT, Kind.DATA}:
                constraints.trait("elementwise")
            only = kind == old_kind == Kind.WEIGHT
            kept = constraints.relate(old, new, fixed, weights_only=only)
            if all(k is not old for k in kept):  # `new` tells more, or their union
                at = next(i for i, (f, _) in enumerate(result) if f is old)
                del result[at]
                kind = max(kind, old_kind)
                new = kept[0]
            elif all(k is not new for k in kept):
                at = next(i for i, (f, _) in enumerate(result) if f is old)
                result[at] = old, max(kind, old_kind)
                break
        else:
            result.append((new, kind))
    return result


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _meet_fixed(ours: list[Tensor], slot: Tensor) -> list[Tensor]:
    for i, other in enumerate(ours):
        if other is slot or _equal(other, slot):
            return ours
        if support(other) == support(slot):
            u, v = broadcast(other, slot)
            h = hash64(hash64(u.numpy()).view("int64") ^ v.numpy())
            both = torch.where(u == 0, v, torch.where((v == 0) | (u == v), u, as_fixed(h)))
            return [*ours[:i], both, *ours[i + 1 :]]
    return [*ours, slot]


def pointwise(call: Call) -> Labels:
    operands = [call.of(t) for t in call.tensors()]
    return join(call.constraints, operands, tuple(first(call.result).shape))


@rule("bucketize.Tensor", "searchsorted.Tensor")
def _bucket(call: Call) -> Labels:
    """Between which boundaries a value lies; boundaries are sorted, some of its own for each row,
    if they have rows."""
    x, name = call.labels("self"), "boundaries" if "bucket" in str(call.op) else "sorted_sequence"
    bounds = call.labels(name)
    last = len(bounds.shape) - 1
    bounds = pinned_along(call.constraints, bounds, {last}, "boundaries are sorted")
    shape = (*bounds.shape[:-1], 1) if last else (1,)
    return join(call.constraints, [x, replace(bounds, shape=shape)], x.shape)


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> tuple[Labels, ...]:
    """Direction over its norm, times magnitude: symmetric in all that the norm sums over."""
    v, g = call.labels("v"), call.labels("g")
    y = join(call.constraints, [v, g], v.shape)
    return y, replace(g, kind=y.kind)


@rule("glu")
def _glu(call: Call) -> Labels:
    x = call.labels("self")
    dim = int(call.arg("dim")) % len(x.shape)
    half = x.shape[dim] // 2
    halves = []
    for start in (0, half):
        cut = [
            tuple(s.narrow(dim, start, half) if s.shape[dim] != 1 else s for s in group)
            for group in (x.features, x.fixed)
        ]
        shape = tuple(half if d == dim else n for d, n in enumerate(x.shape))
        halves.append(Labels(shape, cut[0], cut[1], x.kind))
        call.constraints.event(halves[-1].features, len(halves))
    return join(call.constraints, halves, halves[0].shape)
