"""Incidence: which labels of two slots lie at the same elements, as a bipartite graph."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zipfx.analysis.labels.labels import broadcast
from zipfx.hashing import Flags, Hashes, Ints, hash64


@dataclass(frozen=True)
class Incidence:
    """The distinct pairs of labels that meet, in ascending order: x[i] meets y[i].

    only_x, only_y: whether this is the only pair of the label; there: the elements where two labels
    meet; pair: which pair it is, at each of these.

    >>> of = Incidence.of(torch.tensor([1, 1, 2, 0]), torch.tensor([5, 6, 7, 8]))
    >>> of.x, of.y, of.only_x, of.only_y
    (array([1, 1, 2]), array([5, 6, 7]), array([False, False,  True]), array([ True,  True,  True]))
    """

    x: Ints
    y: Ints
    only_x: Flags
    only_y: Flags
    there: Flags
    pair: Ints

    @staticmethod
    def of(u: Tensor, v: Tensor) -> Incidence:
        """Of two slots of one shape."""
        there = (u > 0) & (v > 0)
        x, y = u[there].numpy(), v[there].numpy()
        base = np.int64(y.max(initial=0) + 1)
        codes, pair = np.unique(x * base + y, return_inverse=True)
        x, y = codes // base, codes % base
        return Incidence(x, y, _occur_once(x), _occur_once(y), there.numpy(), pair)

    @property
    def one_to_one(self) -> Flags:
        both: Flags = self.only_x & self.only_y
        return both

    def finer_and_coarser(self) -> tuple[Ints, Ints]:
        """Of each pair that is not one to one, the label with one partner and that with many; where
        both have many, either way."""
        rest = ~self.one_to_one
        x, y, fine = self.x[rest], self.y[rest], self.only_x[rest]
        return np.where(fine, x, y), np.where(fine, y, x)

    def sums(self, at: Hashes) -> Hashes:
        """The sum of what lies where a pair meets, for each pair that is not one to one."""
        total = np.zeros(len(self.x), np.uint64)
        np.add.at(total, self.pair, np.broadcast_to(at, self.there.shape)[self.there])
        return total[~self.one_to_one]


def _occur_once(x: Ints) -> Flags:
    _, of, count = np.unique(x, return_inverse=True, return_counts=True)
    once: Flags = count[of] == 1
    return once


def crosses(a: Tensor, b: Tensor, dims: Collection[int]) -> bool:
    """Whether labels meet along `dims` in pairs that are neither a grid nor one finer than the
    other everywhere."""
    u, v = broadcast(a, b)
    both = (u > 0) & (v > 0)
    met = Incidence.of(u, v)
    if bool((met.only_x | met.only_y).all()):
        return False
    u, v = torch.where(both, u, 0), torch.where(both, v, 0)
    pairs = u * (v.max() + 1) + v
    rest = [d for d in range(u.ndim) if d not in dims]
    rows = math.prod(u.shape[d] for d in rest)

    def distinct(t: Tensor) -> Tensor:
        ordered = t.permute([*rest, *sorted(dims)]).reshape(rows, -1).sort(1)[0]
        return (ordered.diff(dim=1) != 0).sum(1) + (ordered[:, 0] > 0)

    return bool((distinct(pairs) != distinct(u) * distinct(v)).any())


def pattern(features: Tensor, fixed: Tensor) -> tuple[Tensor, Hashes]:
    """The labels of a slot, each once, and a hash of the coordinates at its elements in order: a
    pattern, not just a multiset."""
    u, v = (s.reshape(-1).numpy() for s in broadcast(features, fixed))
    u, v = u[keep := u > 0], v[keep]
    order = np.argsort(u, kind="stable")
    labels, start, count = np.unique(u[order], return_index=True, return_counts=True)
    rank = np.arange(len(u)) - np.repeat(start, count)
    h = hash64(hash64(v[order]).view(np.int64) + rank)
    h[v[order] == 0] = 0
    return torch.from_numpy(labels), np.add.reduceat(h, start)
