"""Labels: which feature every element of a tensor carries, and what an analysis learns about them.

A *label* is a positive integer, the id of one index of one axis of one parameter (or float
buffer).  A tensor carries *slots*: integer tensors that broadcast to its shape, size 1 wherever
they do not vary.  There are two sorts, kept apart:

* **feature slots** (entries > 0, or 0 for "no feature here"): the feature an element carries.  A
  tensor may have several, e.g. tokens x channels when both axes were made by weights.
* **fixed slots** (entries < 0, or 0 for "nothing"): a coordinate that can not be exchanged, such
  as an input channel, a pixel position or the value of a constant.

A tensor with no slot along a dimension is uniform along it, as far as feature identity goes.
Nothing is ever unified *with* a fixed coordinate; it only *colours* the features it meets, and
features of different colour are not exchangeable.  That one rule covers raw input channels (each
gets its own colour), constants that vary along a feature axis, and per-channel spatial shifts
(the pattern of positions is part of the colour).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zipfx.hashing import Hashes, Ints, as_fixed, hash64
from zipfx.model.tensors import as_real


class Kind(enum.IntEnum):
    """What a tensor was computed from; an operation gives the largest kind of its operands."""

    CONSTANT = 0
    WEIGHT = 1
    DATA = 2


@dataclass(frozen=True)
class Labels:
    """The slots of one tensor of the given shape.

    pending: feature slots that are pinned as soon as the tensor is used (it holds their indices).
    """

    shape: tuple[int, ...]
    features: tuple[Tensor, ...] = ()
    fixed: tuple[Tensor, ...] = ()
    kind: Kind = Kind.DATA
    pending: tuple[Tensor, ...] = ()


# ------------------------------------------------------------------ slots
def support(slot: Tensor) -> frozenset[int]:
    """The dimensions along which a slot varies."""
    return frozenset(d for d, n in enumerate(slot.shape) if n != 1)


def narrow(slot: Tensor) -> Tensor:
    """Cut every dimension along which `slot` is constant down to size 1."""
    for d, (n, stride) in enumerate(zip(slot.shape, slot.stride(), strict=True)):
        if n > 1:
            first = slot.narrow(d, 0, 1)
            if stride == 0 or (
                bool((slot.narrow(d, 1, 1) == first).all()) and bool((slot == first).all())
            ):
                slot = first
    return slot


def place(slot: Tensor, dims: dict[int, int], ndim: int) -> Tensor:
    """Move a slot's dims to those of another tensor: `dims` maps old to new; others are size 1."""
    shape = [1] * ndim
    keep = sorted((d for d in dims if slot.shape[d] != 1), key=lambda d: dims[d])
    for d in keep:
        shape[dims[d]] = slot.shape[d]
    others = [d for d in range(slot.ndim) if d not in keep]
    return slot.permute([*keep, *others]).reshape(shape)


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both slots at their common shape."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    return a.expand(shape), b.expand(shape)


def vector(slot: Tensor, *dims: int) -> Tensor:
    """The slot as a vector along the dimensions it varies along, flattened in this order."""
    return slot.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1)


def overlapping(slots: Sequence[Tensor]) -> list[tuple[tuple[int, ...], list[Ints]]]:
    """Slots that share dimensions, together: (dimensions, their labels flattened along these)."""
    groups: list[tuple[set[int], list[Tensor]]] = []
    for slot in slots:
        dims, members = set(support(slot)), [slot]
        for other in [g for g in groups if g[0] & dims]:
            groups.remove(other)
            dims, members = dims | other[0], [*other[1], *members]
        groups.append((dims, members))
    found = []
    for dims, members in groups:
        order = tuple(sorted(dims))
        shape = torch.broadcast_shapes(*(s.shape for s in members))
        found.append((order, [vector(s.expand(shape), *order).numpy() for s in members]))
    return found


def position(shape: Sequence[int], dim: int) -> Tensor:
    """A fixed slot: the index along one dimension."""
    return place(-1 - torch.arange(shape[dim]), {0: dim}, len(shape))


def positions(shape: Sequence[int], dims: Iterable[int] | None = None) -> tuple[Tensor, ...]:
    """One fixed slot per dimension of size > 1 (of `dims`; default: all)."""
    chosen = range(len(shape)) if dims is None else dims
    return tuple(position(shape, d) for d in chosen if shape[d] > 1)


def project(fixed: Tensor, keep: Iterable[int]) -> Tensor:
    """A fixed slot seen along `keep` only: equal where all that varies along the rest is equal."""
    kept = sorted(set(keep))
    if set(kept) >= support(fixed) or not kept:
        return fixed if kept else torch.zeros([1] * fixed.ndim, dtype=torch.int64)
    rest = [d for d in range(fixed.ndim) if d not in kept]
    flat = fixed.permute([*kept, *rest]).reshape([fixed.shape[d] for d in kept] + [-1]).numpy()
    with np.errstate(over="ignore"):
        h = hash64(hash64(flat).view(np.int64) + np.arange(flat.shape[-1])).sum(-1, dtype=np.uint64)
    return narrow(place(as_fixed(h), dict(enumerate(kept)), fixed.ndim))


def beyond(fixed: Iterable[Tensor], dims: Collection[int]) -> tuple[Tensor, ...]:
    """What fixed slots still tell when everything along `dims` is taken together."""
    rest = ((slot, support(slot) - set(dims)) for slot in fixed)
    return tuple(project(slot, keep) for slot, keep in rest if keep)


def coordinates(fixed: Sequence[Tensor], shape: Sequence[int], dims: Collection[int]) -> Hashes:
    """A hash of all coordinates along `dims` of a tensor, of a shape that broadcasts to its own."""
    found = np.ones([1] * len(shape), np.uint64)
    for slot in fixed:
        if support(slot) & set(dims):
            seen = hash64(project(slot, support(slot) & set(dims)).numpy())
            found = found + hash64(seen.view(np.int64))
    return found


def trimmed(lab: Labels) -> Labels:
    """The same labels, without dimensions along which features are only missing here and there.

    Zero padding, of images or of short sentences, is alike for all features of a slot, and nothing
    else lies there: it may be taken for any of them, so that no index needs its size.
    """
    features = []
    for slot in lab.features:
        along = {d for d in support(slot) if is_padded(slot, d)} if bool((slot == 0).any()) else ()
        found = slot.amax(sorted(along), keepdim=True) if along else slot
        kept = support(found)
        there = (slot > 0).amax(sorted(kept), keepdim=True) if kept else slot > 0
        others = (s for s in (*lab.features, *lab.fixed) if s is not slot and support(s) & kept)
        alone = not any(bool((s.expand(lab.shape) != 0)[~there.expand(lab.shape)].any())
                        for s in others)  # fmt: skip
        same = torch.equal(torch.where(there, found, 0), slot)
        features.append(narrow(found) if along and same and alone else slot)
    return replace(lab, features=tuple(features))


def is_padded(slot: Tensor, dim: int) -> bool:
    """Whether a slot varies along a dimension only in where features are missing."""
    return not bool(((slot != slot.amax(dim, keepdim=True)) & (slot != 0)).any())


def filled(a: Tensor, b: Tensor, one_to_one: bool) -> Tensor:
    """Slot a, and b where a has nothing: that is what a would be there, if it is nothing there for
    all its features alike (a state that some sentences of a batch do not have yet)."""
    if one_to_one:
        (whole,) = trimmed(Labels(tuple(a.shape), (a,))).features
        u = whole.expand(a.shape)
        pairs, known = (torch.stack([t[b > 0], b[b > 0]]).unique(dim=1) for t in (u, a))
        if bool((u > 0)[b > 0].all()) and torch.equal(pairs, known[:, known[0] > 0]):
            return whole
    return torch.where(a > 0, a, b)


def placed(lab: Labels, at: dict[int, int], ndim: int) -> Labels:
    """Labels whose dims have moved into a frame of ndim dims: `at` maps old to new."""
    shape = [1] * ndim
    for d, to in at.items():
        shape[to] = lab.shape[d]
    features, fixed = (
        tuple(place(slot, at, ndim) for slot in slots) for slots in (lab.features, lab.fixed)
    )
    return Labels(tuple(shape), features, fixed, lab.kind)


def by_value(t: Tensor) -> Labels:
    """Labels of a constant: a fixed slot, equal where values are equal; none where uniform."""
    shape = tuple(t.shape)
    if t.is_quantized:
        return Labels(shape, (), positions(shape), Kind.CONSTANT)
    if t.numel() <= 1:
        return Labels(shape, kind=Kind.CONSTANT)
    values = narrow(t.detach().cpu())
    if values.numel() == 1:
        return Labels(shape, kind=Kind.CONSTANT)
    told = np.zeros(values.shape, np.uint64)
    for part in as_real(values).unbind(-1) if values.is_complex() else (values,):
        bits = part.to(torch.float64).contiguous() + 0.0  # + 0.0: -0.0 equals 0.0
        told = hash64(told.view(np.int64) ^ bits.numpy().view(np.int64))
    return Labels(shape, fixed=(as_fixed(told).where(values != 0, 0),), kind=Kind.CONSTANT)
