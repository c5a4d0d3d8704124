"""Constraints: everything that an analysis learns about labels, in the order it learns it.

This is the constraint store of the abstract interpretation. Features that meet one to one are one
(an edge, for union-find); where one label meets many, the finer belongs to the coarser (a member,
for block systems). A coordinate that can not be exchanged colours what it meets (an invariant, for
colour refinement).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zipfx.analysis.labels.alphabet import Alphabet
from zipfx.analysis.labels.blocks import Blocks
from zipfx.analysis.labels.incidence import Incidence, pattern
from zipfx.analysis.labels.labels import Kind, Labels, broadcast, coordinates, filled, support
from zipfx.analysis.labels.records import Records


@dataclass
class _Known:
    """What is known of one slot: its labels (each once, sorted), its blocks by the dimensions taken
    together, the fixed slots that have coloured it, and whether it has reached data."""

    ids: Tensor | None = None
    blocks: dict[frozenset[int], Tensor] = field(default_factory=dict)
    coloured: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    alive: bool = False


class _Slots:
    """What is known of every slot, for as long as it lives."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def __getitem__(self, slot: Tensor) -> _Known:
        if slot not in self._known:
            self._known[slot] = _Known()
        known: _Known = self._known[slot]
        return known

    def ids(self, slot: Tensor) -> Tensor:
        """The labels of a slot, each once, sorted."""
        known = self[slot]
        if known.ids is None:
            known.ids = torch.unique(slot)
        return known.ids

    def distinct(self, slot: Tensor) -> bool:
        """Whether a slot has a label everywhere, and none twice."""
        ids = self.ids(slot)
        return 0 < len(ids) == slot.numel() and int(ids[0]) > 0

    def is_block(self, block: Tensor, slot: Tensor) -> bool:
        """Whether these are the blocks that were made of a slot."""
        return any(block is known for known in self[slot].blocks.values())


@dataclass
class Constraints(Alphabet, Records):
    """The labels that there are, and what relates them."""

    _slots: _Slots = field(default_factory=_Slots)

    def ids(self, slots: Sequence[Tensor]) -> Tensor:
        """The labels of several slots, each once."""
        found = [self._slots.ids(slot) for slot in slots] or [torch.zeros(0, dtype=torch.int64)]
        ids: Tensor = torch.unique(torch.cat(found))
        return ids[ids > 0]

    # ------------------------------------------------------------------ one feature
    def twins(self, labels: Tensor) -> Tensor:
        """New labels, each one feature with one of these, for an axis that is no parameter's."""
        new = self.fresh(len(labels))
        self.same(labels.numpy(), new.numpy())
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
        own = self.in_parts(axis, rows.dim, parts)
        if (own.by, own.parts) != (rows.dim, parts):
            self.pin([torch.arange(own.start, own.stop)], "a weight is used in different parts")
            return None
        part = (by - rows.start) // (rows.size // parts)
        index = own.start + part * axis.size + slot - axis.start
        return torch.where((slot > 0) & (by > 0), index, 0)

    def relate(
        self, a: Tensor, b: Tensor, fixed: Sequence[Tensor] = (), *, weights_only: bool = False
    ) -> tuple[Tensor, ...]:
        """Two slots of one tensor: where their labels go one to one they are one feature, else the
        finer belongs to the coarser, in a way that depends on the coordinates where they meet.

        Returns the slots that are needed to tell all features.
        """
        if a is b:
            return (a,)
        if a.shape == b.shape and self._slots.distinct(a) and self._slots.distinct(b):
            x, y = a.reshape(-1).numpy(), b.reshape(-1).numpy()
            if not np.array_equal(x, y):
                self.same(x, y, weights_only=weights_only)
            return (a,)
        u, v = broadcast(a, b)
        met = Incidence.of(u, v)
        a_finer, b_finer = bool(met.only_x.all()), bool(met.only_y.all())
        if (new := met.one_to_one & (met.x != met.y)).any():
            self.same(met.x[new], met.y[new], weights_only=weights_only)
        known = (a_finer and self._slots.is_block(b, a)) or (b_finer and self._slots.is_block(a, b))
        alike = a_finer and b_finer
        if not alike and not known:
            seen = coordinates(fixed, u.shape, support(u))
            self.belongs(*met.finer_and_coarser(), met.sums(seen))
        # the coarser label still tells what lies where there is no finer one: beside the padding of
        # what was padded before a norm, whose bias the padding holds, too
        if a_finer:
            return (a if bool(((u > 0) | (v <= 0)).all()) else filled(u, v, alike),)
        if b_finer:
            return (b if bool(((v > 0) | (u <= 0)).all()) else filled(v, u, alike),)
        return a, b

    # ------------------------------------------------------------------ blocks
    def block(self, slot: Tensor, dims: Iterable[int], fixed: Sequence[Tensor] = ()) -> Tensor:
        """What is taken together over `dims`, symmetrically: one block per index along the rest.

        Returns the slot of the blocks, which no longer varies along `dims`.
        """
        along = support(slot) & set(dims)
        if not along:
            return slot
        if along == support(slot):
            return torch.zeros([1] * slot.ndim, dtype=torch.int64)
        self.trait("mixes")
        known = self._slots[slot].blocks
        if along not in known:
            known[along] = self._new_blocks(slot, along, fixed)
        return known[along]

    def _new_blocks(self, slot: Tensor, along: frozenset[int], fixed: Sequence[Tensor]) -> Tensor:
        found = Blocks.of(slot, sorted(support(slot) - along), fixed)
        ids = found.numbered(self.fresh(len(found)).numpy())
        self.belongs(*found.members(ids))
        return found.slot(ids)

    def collapse(self, slot: Tensor, dims: Iterable[int], reason: str) -> Tensor:
        """Make everything along `dims` one feature (a block that moves as a whole, in order).

        Returns the slot of the blocks, which no longer varies along `dims`.
        """
        along = support(slot) & set(dims)
        self.trait("mixes")
        if along == support(slot):
            self.pin([slot], reason)
            return torch.zeros([1] * slot.ndim, dtype=torch.int64)
        shape = [slot.shape[d] if d in along else 1 for d in range(slot.ndim)]
        rank = (-torch.arange(1, 1 + math.prod(shape))).reshape(shape)
        self.colour(slot, rank.expand(slot.shape))
        block = self._new_blocks(slot, along, [rank])
        self.blocks.append((torch.unique(slot).numpy(), self.node, reason))
        return block

    # ------------------------------------------------------------------ colours
    def event(self, slots: Iterable[Tensor], operand: int) -> None:
        """These features took part in one more computation, as its operand number `operand`.

        A computation on some of the features only (`y[:, :4] = y[:, :4].sigmoid()`) so tells them
        from the others, and the two halves of `h[:, :4] - h[:, 4:]` from each other.
        """
        for slot in slots:
            ids = self._slots.ids(slot)
            self.colour(ids, torch.full_like(ids, operand + 1))

    def counted(self, slot: Tensor) -> None:
        """Features that all of this slot is taken over count as often as they lie in it."""
        if not self._slots.distinct(slot):
            labels, count = torch.unique(slot, return_counts=True)
            if len(torch.unique(count[labels > 0])) > 1:
                self.colour(labels, count)

    def pin(self, slots: Iterable[Tensor], reason: str) -> None:
        """Make every feature of these slots distinct from all others, and say why."""
        self.trait("mixes")
        for slot in slots:
            ids = self._slots.ids(slot)
            self.colour(ids, ids, reason)

    def entangle(self, features: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Colour features by the pattern of every fixed slot that varies along their dimensions."""
        for f in features:
            coloured = self._slots[f].coloured
            for p in fixed:
                if support(f) & support(p) and p not in coloured:
                    coloured[p] = True
                    self.colour(*pattern(f, p))

    def mark_alive(self, labels: Labels) -> None:
        """These features reach data at the current node (weights alone do not make a space)."""
        for slot in labels.features if labels.kind == Kind.DATA else ():
            if not self._slots[slot].alive:
                self._slots[slot].alive = True
                self.alive.append((self._slots.ids(slot).numpy(), self.node))
