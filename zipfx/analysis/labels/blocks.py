"""Blocks: what is taken together along some dimensions of a slot, one block per index along the
rest; indices with the same members are the same block."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zipfx.analysis.labels.labels import coordinates, narrow, support
from zipfx.hashing import Hashes, Ints, as_they_come, hash64


@dataclass(frozen=True)
class Blocks:
    """The distinct blocks of a slot, as they come.

    labels, ways: (blocks, n) their elements, and the coordinates there, which tell members of a
    block apart; which: (of the shape of the slot, 1 where things are taken together) the block of
    each index.
    """

    labels: Ints
    ways: Hashes
    which: Ints

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def of(slot: Tensor, rest: Collection[int], fixed: Sequence[Tensor]) -> Blocks:
        """What lies at each index along the dimensions `rest`, all others taken together."""
        shape = [n if d in rest else 1 for d, n in enumerate(slot.shape)]
        order = [*rest, *(d for d in range(slot.ndim) if d not in rest)]
        labels = slot.permute(order).reshape(math.prod(shape), -1).numpy()
        # what tells the rows apart is not of interest, only what tells the members of a row apart
        along = support(slot) - set(rest)
        seen = np.broadcast_to(coordinates(fixed, slot.shape, along), slot.shape)
        ways = np.ascontiguousarray(seen.transpose(order)).reshape(labels.shape)
        hashed = hash64((hash64(labels) ^ ways).view(np.int64))
        hashed[labels == 0] = 0
        first, row = as_they_come(hashed.sum(-1, dtype=np.uint64))
        return Blocks(labels[first], ways[first], row.reshape(shape))

    def numbered(self, ids: Ints) -> Ints:
        """These labels for the blocks, 0 for an empty one."""
        return np.where((self.labels > 0).any(-1), ids, 0)

    def members(self, ids: Ints) -> tuple[Ints, Ints, Hashes]:
        """Which features belong to which blocks, and in which way."""
        used = (self.labels > 0) & (ids > 0)[:, None]
        base = np.int64(ids.max(initial=0) + 1)
        codes, pair = np.unique((self.labels * base + ids[:, None])[used], return_inverse=True)
        way = np.zeros(len(codes), np.uint64)
        np.add.at(way, pair, hash64(self.ways[used].view(np.int64)))
        return codes // base, codes % base, way

    def slot(self, ids: Ints) -> Tensor:
        """A slot that carries the blocks' labels in place of their members'."""
        return narrow(torch.from_numpy(ids[self.which]))
