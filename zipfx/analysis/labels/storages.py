"""Storages: the labels of every storage, so that views and in-place writes need no rules.

A view is the same storage seen through another (size, stride, offset); its labels are the same
window into the labels of the storage.  Labels are kept compact for the geometry in which a storage
was made, and laid out in full only when it is seen, or written to, through another one.

A complex number is two real ones: a storage of complex numbers has labels for them, and the same
for its real and imaginary parts, which a coordinate tells apart. Real numbers that are seen in
pairs, as complex ones, may carry two features: what a pair then is, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zipfx.analysis.labels.labels import Kind, Labels, by_value, narrow, place, position
from zipfx.hashing import as_fixed, hash64
from zipfx.model.memory import storage_key
from zipfx.model.tensors import as_real

#: size, strides and offset of the elements, bytes of one, and whether they are complex numbers
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, int, bool]


def geometry(t: Tensor) -> Geometry:
    where = tuple(t.shape), tuple(t.stride()), int(t.storage_offset())
    return *where, t.itemsize, t.is_complex()


@dataclass
class _Record:
    ref: Any  # a StorageWeakRef: while it lives, its key is not reused
    owner: int
    made: Geometry
    views: dict[Geometry, Labels]
    full: list[list[Tensor]] | None = None  # features and fixed slots, one entry per element
    parts: _Record | None = None  # of complex numbers, as soon as their parts are seen

    def of_parts(self) -> _Record:
        """The same storage as real numbers, two for each complex one."""
        if self.parts is None:
            shape, stride, offset, size, _ = self.made
            made = (*shape, 2), (*(2 * s for s in stride), 1), 2 * offset, size // 2, False
            self.parts = _Record(self.ref, self.owner, made, {made: _parted(self.views[self.made])})
        return self.parts


def _covers(t: Tensor) -> bool:
    return t.numel() * t.itemsize == t.untyped_storage().nbytes()


class StorageLabels:
    """The labels of all live storages."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._passing: set[int] = set()  # of what nodes made, which lives no longer than needed
        self._marks = 0
        self._most = 32  # then look which of them are gone

    def _forget(self) -> None:
        """Drop the labels of storages that are gone."""
        gone = {key for key in self._passing if self._records[key].ref.expired()}
        for key in gone:
            del self._records[key]
        self._passing -= gone
        self._most = 32 + 2 * len(self._passing)

    def _record(self, t: Tensor) -> _Record | None:
        record = self._records.get(storage_key(t))
        return record if record is not None and not record.ref.expired() else None

    def knows(self, t: Tensor) -> bool:
        return self._record(t) is not None

    def base(self, t: Tensor) -> Labels | None:
        """The labels of the whole storage of `t`, as it was made."""
        record = self._record(t)
        return None if record is None else record.views[record.made]

    def owner(self, t: Tensor) -> int | None:
        """The graph node (index) that made the storage of `t`."""
        record = self._record(t)
        return None if record is None else record.owner

    def put(self, t: Tensor, labels: Labels, node: int) -> None:
        """Set the labels of a tensor with a new storage."""
        g = geometry(t)
        ref = StorageWeakRef(t.untyped_storage())
        self._records[storage_key(t)] = _Record(ref, node, g, {g: labels})
        if node >= 0:
            self._passing.add(storage_key(t))
            if len(self._passing) > self._most:
                self._forget()

    def get(self, t: Tensor) -> Labels | None:
        """The labels of a tensor; None if its storage is unknown or seen through another dtype,
        unless that are the parts of complex numbers (or pairs that were told before)."""
        record, g = self._record(t), geometry(t)
        if record is not None and record.made[4] and not g[4]:
            record = record.of_parts()
        if record is None:
            return None
        if g not in record.views:
            if g[3:] != record.made[3:]:
                return None
            box = _box(record.made, g) if record.full is None else None
            if box is not None:
                record.views[g] = _cut(record.views[record.made], box, g)
                return record.views[g]
            record.full = record.full or self._lay_out(t, record)
            record.views[g] = _window(record.full, g, record.views[record.made].kind)
        return record.views[g]

    def tell(self, t: Tensor, labels: Labels) -> None:
        """Set what pairs of real numbers are that are seen as complex ones, until they change."""
        record = self._record(t)
        if record is not None:
            record.views[geometry(t)] = labels

    def write(self, t: Tensor, labels: Labels, node: int) -> None:
        """Set the labels of a tensor that was written to in place."""
        record = self._record(t)
        if record is None:
            self.put(t, labels, node)
            return
        g = geometry(t)
        if _covers(t):
            record.made, record.full, record.views, record.parts = g, None, {g: labels}, None
            return
        if record.made[4] and not g[4]:  # from now on, its elements are the parts
            record = self._records[storage_key(t)] = record.of_parts()
        elif g[4] and not record.made[4]:
            t, labels = as_real(t), _parted(labels)
            g = geometry(t)
        record.parts = None
        base = record.views[record.made]
        record.full = record.full or self._lay_out(t, record)
        for group, slots in zip(record.full, (labels.features, labels.fixed), strict=True):
            while len(group) < len(slots):
                group.append(torch.zeros(self._elements(t), dtype=torch.int64))
            for i, full in enumerate(group):
                window = full.as_strided(*g[:3])
                window.copy_(slots[i]) if i < len(slots) else window.zero_()
        kind = max(base.kind, labels.kind)
        if kind == Kind.CONSTANT:  # told by its values, as ever
            whole = t.as_strided(*record.made[:3])
            record.full, record.views = None, {record.made: by_value(whole)}
            return
        self._tell_apart(t, record.full, len(labels.fixed))
        record.views = {record.made: _window(record.full, record.made, kind)}

    def _tell_apart(self, t: Tensor, full: list[list[Tensor]], used: int) -> None:
        """What was written to is told by a coordinate from the rest, where no slot does that:
        `y = cat([x, x], 1); y[:, :1] *= 2` has two sorts of x."""
        g = geometry(t)
        inside = torch.zeros(self._elements(t), dtype=torch.bool)
        inside.as_strided(*g[:3]).fill_(True)
        for slot in (*full[0], *full[1]):
            if not bool(torch.isin(slot[inside].unique(), slot[~inside]).any()):
                return
        self._marks += 1
        if used == len(full[1]):
            full[1].append(torch.zeros(len(inside), dtype=torch.int64))
        full[1][used].as_strided(*g[:3]).copy_(as_fixed(hash64([-self._marks])))

    @staticmethod
    def _elements(t: Tensor) -> int:
        return t.untyped_storage().nbytes() // t.itemsize

    def _lay_out(self, t: Tensor, record: _Record) -> list[list[Tensor]]:
        labels = record.views[record.made]
        groups: list[list[Tensor]] = []
        for slots in (labels.features, labels.fixed):
            group = []
            for slot in slots:
                full = torch.zeros(self._elements(t), dtype=torch.int64)
                full.as_strided(*record.made[:3]).copy_(slot)
                group.append(full)
            groups.append(group)
        return groups


def _parted(labels: Labels) -> Labels:
    """The labels of the parts of complex numbers, which lie along a further dimension."""
    shape = (*labels.shape, 2)
    features, fixed = (
        tuple(s.unsqueeze(-1) for s in slots) for slots in (labels.features, labels.fixed)
    )
    return replace(
        labels, shape=shape, features=features, fixed=(*fixed, position(shape, len(shape) - 1))
    )


def _box(made: Geometry, g: Geometry) -> dict[int, tuple[int | None, int]] | None:
    """A view that only slices, selects and reorders whole dimensions: nothing is laid out for it.

    Returns for every dimension of the base that is longer than 1: the dimension of the view it
    became (None: one index of it was selected) and where it starts; None for other views.
    """
    rest = g[2] - made[2]
    strides = [(stride, d) for d, (n, stride) in enumerate(zip(made[0], made[1])) if n > 1]
    seen = {stride: i for i, (n, stride) in enumerate(zip(g[0], g[1])) if n > 1}
    if len(set(dict(strides))) != len(strides) or not set(seen) <= set(dict(strides)) or 0 in seen:
        return None
    if len(seen) != sum(n > 1 for n in g[0]) or 0 in g[0] or 0 in made[0]:
        return None
    box: dict[int, tuple[int | None, int]] = {}
    for stride, d in sorted(strides, reverse=True):
        start, rest = divmod(rest, stride)
        i = seen.get(stride)
        if start < 0 or start + (1 if i is None else g[0][i]) > made[0][d]:
            return None
        box[d] = (i, start)
    return box if rest == 0 else None


def _cut(labels: Labels, box: dict[int, tuple[int | None, int]], g: Geometry) -> Labels:
    def cut(slot: Tensor) -> Tensor:
        for d, (i, start) in box.items():
            if slot.shape[d] > 1:
                slot = slot.narrow(d, start, 1 if i is None else g[0][i])
        dims = {d: i for d, (i, _) in box.items() if i is not None}
        return narrow(place(slot, dims, len(g[0])))

    features, fixed = (
        tuple(slot for s in slots if bool((slot := cut(s)).any()))
        for slots in (labels.features, labels.fixed)
    )
    return Labels(g[0], features, _distinct(fixed), labels.kind)


def _window(full: list[list[Tensor]], g: Geometry, kind: Kind) -> Labels:
    features, fixed = (
        tuple(slot for f in group if bool((slot := narrow(f.as_strided(*g[:3])).clone()).any()))
        for group in full
    )
    return Labels(g[0], features, _distinct(fixed), kind)


def _distinct(slots: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Drop repeated fixed slots, which say the same thing twice."""
    kept: list[Tensor] = []
    for slot in slots:
        if not any(slot.shape == other.shape and torch.equal(slot, other) for other in kept):
            kept.append(slot)
    return tuple(kept)
