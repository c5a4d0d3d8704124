"""The constraints: everything that an analysis learns about labels, in the order it learns it.

Features that meet one to one are one (an edge); where one label meets many, the finer belongs to
the coarser (a member). A coordinate that can not be exchanged colours what it meets.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zipfx.analysis.labels.labels import (
    Kind,
    Labels,
    broadcast,
    filled,
    narrow,
    place,
    project,
    support,
)
from zipfx.analysis.labels.records import AxisLabels, Colour, Contraction, Edge, Member
from zipfx.hashing import Hashes, Ints, as_they_come, hash64


@dataclass
class Constraints:
    """Everything learned so far; every entry names the graph node (by index) that taught it."""

    node: int = 0
    where: str = ""
    axes: list[AxisLabels] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    produced: list[tuple[Ints, int]] = field(default_factory=list)
    bilinear: list[tuple[Ints, int]] = field(default_factory=list)
    blocks: list[tuple[Ints, int, str]] = field(default_factory=list)
    variances: set[tuple[str, int]] = field(default_factory=set)
    alive: list[tuple[Ints, int]] = field(default_factory=list)
    traits: dict[int, set[str]] = field(default_factory=dict)
    size: int = 1  # label 0 is "none"
    # what is known of a slot, for as long as it lives
    _unique: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _entangled: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _blocks: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _alive: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _parted: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def make(self, slots: Iterable[Tensor]) -> None:
        """The current node makes these features with weights."""
        self.produced.extend((slot.reshape(-1).numpy(), self.node) for slot in slots)

    def trait(self, name: str) -> None:
        """Say of the current node: 'elementwise' (a weight met features one to one), 'mixes'."""
        self.traits.setdefault(self.node, set()).add(name)

    def parameter(self, name: str, t: Tensor) -> Labels:
        """Allocate labels for every axis of a parameter or float buffer."""
        slots = []
        for d, n in enumerate(t.shape):
            if n > 1:
                self.axes.append(AxisLabels(name, d, self.size, n))
                slots.append(place(self._fresh(n), {0: d}, t.ndim))
        return Labels(tuple(t.shape), tuple(slots), kind=Kind.WEIGHT)

    def _fresh(self, n: int) -> Tensor:
        self.size += n
        return torch.arange(self.size - n, self.size)

    def twins(self, labels: Tensor) -> Tensor:
        """New labels, each one feature with one of these, for an axis that is no parameter's."""
        new = self._fresh(len(labels))
        self.edges.append(Edge(labels.numpy(), new.numpy(), self.node, False))
        return new

    def parted(self, slot: Tensor, by: Tensor, parts: int = 0) -> Tensor | None:
        """Labels of the features that an axis has for every part of the rows alone.

        slot, by: labels of two axes of one parameter, that of the rows being `by`; parts: how many
        equal parts the rows make (default: every row is one). None where they are not such axes.
        """
        axis, rows = self.axis(slot), self.axis(by)
        if axis is None or rows is None or axis.name != rows.name or axis.dim == rows.dim:
            return None
        parts = parts or rows.size
        key = axis.start, rows.dim, parts
        if key not in self._parted:
            for (start, _, _), at in self._parted.items():
                if start == axis.start:  # in parts of another number
                    n = next(a.stop for a in self.axes if a.start == at) - at
                    self.pin([torch.arange(at, at + n)], "a weight is used in different parts")
                    return None
            self._parted[key] = self.size
            self.axes.append(
                replace(axis, start=self.size, by=rows.dim, parts=parts, base=axis.start)
            )
            self._fresh(parts * axis.size)
        part = (by - rows.start) // (rows.size // parts)
        own = self._parted[key] + part * axis.size + slot - axis.start
        return torch.where((slot > 0) & (by > 0), own, 0)

    def axis(self, slot: Tensor) -> AxisLabels | None:
        """The axis that all labels of a slot come from."""
        ids = slot[slot > 0]
        if not len(ids):
            return None
        low, high = int(ids.min()), int(ids.max())
        at = bisect.bisect_right(self.axes, low, key=lambda axis: axis.start) - 1
        axis = self.axes[at] if at >= 0 else None
        return axis if axis is not None and high < axis.stop and axis.by < 0 else None

    def relate(
        self,
        a: Tensor,
        b: Tensor,
        fixed: Sequence[Tensor] = (),
        *,
        weights_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """Two slots of one tensor: where their labels go one to one they are one feature, else the
        finer belongs to the coarser, in a way that depends on the coordinates where they meet.

        Returns the slots that are needed to tell all features.
        """
        if a is b:
            return (a,)
        if a.shape == b.shape and self._distinct(a) and self._distinct(b):
            x, y = a.reshape(-1).numpy(), b.reshape(-1).numpy()
            if not np.array_equal(x, y):
                self.edges.append(Edge(x, y, self.node, weights_only))
            return (a,)
        u, v = broadcast(a, b)
        mask = (u > 0) & (v > 0)
        x, y = u[mask].numpy(), v[mask].numpy()
        codes, pair = np.unique(x * np.int64(self.size) + y, return_inverse=True)
        x, y = codes // self.size, codes % self.size
        _, of_x, many_x = np.unique(x, return_inverse=True, return_counts=True)
        _, of_y, many_y = np.unique(y, return_inverse=True, return_counts=True)
        few_x, few_y = many_x[of_x] == 1, many_y[of_y] == 1
        same = few_x & few_y
        new = same & (x != y)
        if new.any():
            self.edges.append(Edge(x[new], y[new], self.node, weights_only))
        known = (few_x.all() and self._is_block(b, a)) or (few_y.all() and self._is_block(a, b))
        if not same.all() and not known:
            # the finer label has one partner, the coarser many; where both have many, either way
            fine = np.where(few_x, x, y)[~same], np.where(few_x, y, x)[~same]
            way = np.zeros(len(codes), np.uint64)
            seen = coordinates(fixed, u.shape, support(u))
            np.add.at(way, pair, np.broadcast_to(seen, u.shape)[mask.numpy()])
            self._belongs(*fine, way[~same])
        # the coarser label still tells what lies where there is no finer one: beside the padding of
        # what was padded before a norm, whose bias the padding holds, too
        if few_x.all():
            return (a if bool(((u > 0) | (v <= 0)).all()) else filled(u, v, same.all()),)
        if few_y.all():
            return (b if bool(((v > 0) | (u <= 0)).all()) else filled(v, u, same.all()),)
        return a, b

    def crossing(self, a: Tensor, b: Tensor, dims: Collection[int]) -> bool:
        """Whether labels meet along `dims` in pairs that are neither a grid nor one finer than the
        other everywhere."""
        u, v = broadcast(a, b)
        both = (u > 0) & (v > 0)
        u, v = torch.where(both, u, 0), torch.where(both, v, 0)
        pairs = u * self.size + v
        found = torch.unique(pairs[both])
        many = [torch.unique(n, return_inverse=True, return_counts=True) for n in
                (found // self.size, found % self.size)]  # fmt: skip
        if not bool(torch.stack([count[of] > 1 for _, of, count in many]).all(0).any()):
            return False
        rest = [d for d in range(u.ndim) if d not in dims]
        rows = math.prod(u.shape[d] for d in rest)

        def distinct(t: Tensor) -> Tensor:
            ordered = t.permute([*rest, *sorted(dims)]).reshape(rows, -1).sort(1)[0]
            return (ordered.diff(dim=1) != 0).sum(1) + (ordered[:, 0] > 0)

        return bool((distinct(pairs) != distinct(u) * distinct(v)).any())

    def _ids(self, slot: Tensor) -> Tensor:
        """The labels of a slot, each once, sorted."""
        if slot not in self._unique:
            self._unique[slot] = torch.unique(slot)
        found: Tensor = self._unique[slot]
        return found

    def ids(self, slots: Sequence[Tensor]) -> Tensor:
        """The labels of several slots, each once."""
        found = [self._ids(slot) for slot in slots] or [torch.zeros(0, dtype=torch.int64)]
        ids: Tensor = torch.unique(torch.cat(found))
        return ids[ids > 0]

    def _distinct(self, slot: Tensor) -> bool:
        ids = self._ids(slot)
        return 0 < len(ids) == slot.numel() and int(ids[0]) > 0

    def block(self, slot: Tensor, dims: Iterable[int], fixed: Sequence[Tensor] = ()) -> Tensor:
        """What is taken together over `dims`, symmetrically: one block per index along the rest.

        Returns the slot of the blocks, which no longer varies along `dims`.
        """
        along = support(slot) & set(dims)
        rest = sorted(support(slot) - along)
        if not along:
            return slot
        if not rest:
            return torch.zeros([1] * slot.ndim, dtype=torch.int64)
        self.trait("mixes")
        known: dict[frozenset[int], Tensor] = self._blocks.setdefault(slot, {})
        if along not in known:
            known[along] = self._new_blocks(slot, rest, fixed)
        return known[along]

    def _is_block(self, block: Tensor, slot: Tensor) -> bool:
        """Whether these are the blocks that were made of a slot."""
        return any(block is known for known in self._blocks.get(slot, {}).values())

    def _belongs(self, a: Ints, b: Ints, way: Hashes) -> None:
        salt = hash64(len(self.members) + 3)
        self.members.append(Member(a, b, hash64((way ^ salt).view(np.int64)), self.node))

    def _new_blocks(self, slot: Tensor, rest: list[int], fixed: Sequence[Tensor]) -> Tensor:
        shape = [n if d in rest else 1 for d, n in enumerate(slot.shape)]
        order = [*rest, *(d for d in range(slot.ndim) if d not in rest)]
        flat = slot.permute(order).reshape(math.prod(shape), -1).numpy()
        # what tells the rows apart is not of interest, only what tells the members of a row apart
        along = support(slot) - set(rest)
        seen = np.broadcast_to(coordinates(fixed, slot.shape, along), slot.shape)
        ways = np.ascontiguousarray(seen.transpose(order)).reshape(flat.shape)
        hashed = hash64((hash64(flat) ^ ways).view(np.int64))
        hashed[flat == 0] = 0
        first, row = as_they_come(hashed.sum(-1, dtype=np.uint64))
        flat, ways = flat[first], ways[first]
        ids = self._fresh(len(first)).numpy()
        ids = np.where((flat > 0).any(-1), ids, 0)
        used = (flat > 0) & (ids > 0)[:, None]
        codes, pair = np.unique(
            (flat * np.int64(self.size) + ids[:, None])[used], return_inverse=True
        )
        way = np.zeros(len(codes), np.uint64)
        np.add.at(way, pair, hash64(ways[used].view(np.int64)))
        self._belongs(codes // self.size, codes % self.size, way)
        return narrow(torch.from_numpy(ids[row]).reshape(shape))

    def colour(self, features: Tensor, values: Hashes | Tensor, reason: str = "") -> None:
        """Give feature labels (0: skip) the coordinate `values`, of the same shape."""
        a = features.reshape(-1).numpy()
        v = values.reshape(-1).numpy() if isinstance(values, Tensor) else values.reshape(-1)
        keep = (a > 0) & (v != 0)
        if keep.any():
            # hashed twice: salts must not be hashes of small numbers, as coordinates are
            salt = hash64(hash64(len(self.colours)).view(np.int64)).view(np.int64)
            hashed = hash64(hash64(v[keep]).view(np.int64) ^ salt)
            self.colours.append(Colour(a[keep], hashed, self.node, reason))

    def event(self, slots: Iterable[Tensor], operand: int) -> None:
        """These features took part in one more computation, as its operand number `operand`.

        A computation on some of the features only (`y[:, :4] = y[:, :4].sigmoid()`) so tells them
        from the others, and the two halves of `h[:, :4] - h[:, 4:]` from each other.
        """
        for slot in slots:
            ids = self._ids(slot)
            self.colour(ids, torch.full_like(ids, operand + 1))

    def counted(self, slot: Tensor) -> None:
        """Features that all of this slot is taken over count as often as they lie in it."""
        if not self._distinct(slot):
            labels, count = torch.unique(slot, return_counts=True)
            if len(torch.unique(count[labels > 0])) > 1:
                self.colour(labels, count)

    def pin(self, slots: Iterable[Tensor], reason: str) -> None:
        """Make every feature of these slots distinct from all others, and say why."""
        self.trait("mixes")
        for slot in slots:
            ids = self._ids(slot)
            self.colour(ids, ids, reason)

    def collapse(self, slot: Tensor, dims: Iterable[int], reason: str) -> Tensor:
        """Make everything along `dims` one feature (a block that moves as a whole, in order).

        Returns the slot of the blocks, which no longer varies along `dims`.
        """
        along = sorted(support(slot) & set(dims))
        self.trait("mixes")
        if not support(slot) - set(along):
            self.pin([slot], reason)
            return torch.zeros([1] * slot.ndim, dtype=torch.int64)
        shape = [slot.shape[d] if d in along else 1 for d in range(slot.ndim)]
        rank = (-torch.arange(1, 1 + math.prod(shape))).reshape(shape)
        self.colour(slot, rank.expand(slot.shape))
        block = self._new_blocks(slot, [d for d in support(slot) if d not in along], [rank])
        self.blocks.append((torch.unique(slot).numpy(), self.node, reason))
        return block

    def entangle(self, features: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Colour features by the pattern of every fixed slot that varies along their dimensions."""
        for f in features:
            met = self._entangled.setdefault(f, WeakTensorKeyDictionary())
            for p in fixed:
                if support(f) & support(p) and p not in met:
                    met[p] = True
                    self._colour_pattern(f, p)

    def _colour_pattern(self, f: Tensor, p: Tensor) -> None:
        u, v = (s.reshape(-1).numpy() for s in broadcast(f, p))
        u, v = u[keep := u > 0], v[keep]
        order = np.argsort(u, kind="stable")
        labels, start, count = np.unique(u[order], return_index=True, return_counts=True)
        # the rank of an element among those of its feature: a pattern, not just a multiset
        rank = np.arange(len(u)) - np.repeat(start, count)
        h = hash64(hash64(v[order]).view(np.int64) + rank)
        h[v[order] == 0] = 0
        if len(labels):
            sums = np.add.reduceat(h, start)
            self.colour(torch.from_numpy(labels), sums)

    def mark_alive(self, labels: Labels) -> None:
        """These features reach data at the current node (weights alone do not make a space)."""
        if labels.kind == Kind.DATA:
            for slot in labels.features:
                if slot not in self._alive:
                    self._alive[slot] = True
                    self.alive.append((self._ids(slot).numpy(), self.node))


def coordinates(fixed: Sequence[Tensor], shape: Sequence[int], dims: Collection[int]) -> Hashes:
    """A hash of all coordinates along `dims` of a tensor, of a shape that broadcasts to its own."""
    found = np.ones([1] * len(shape), np.uint64)
    for slot in fixed:
        if support(slot) & set(dims):
            seen = hash64(project(slot, support(slot) & set(dims)).numpy())
            found = found + hash64(seen.view(np.int64))
    return found
