"""Diagonals: constants that stay the same when two of their axes are permuted alike.

The identity that is added to a square weight, or that masks its diagonal, holds no position of its
own: it says that feature i of one axis and feature i of the other are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zipfx.analysis.labels.constraints import Ledger
from zipfx.analysis.labels.labels import Kind, place, project, support, vector

Slots = list[tuple[Tensor, Kind]]


def tied(ledger: Ledger, slots: Slots, fixed: Sequence[Tensor]) -> tuple[Slots, list[Tensor]]:
    """Make the features one that a diagonal ties, in place of colouring them by position.

    Where features lie along only one of the two axes, the other has them, too, from now on: a
    diagonal matrix hands them on. Returns all slots, and what is left of the coordinates.
    """
    left: list[Tensor] = []
    for slot in fixed:
        dims = _square(slot)
        found = None if dims is None else _tie(ledger, slots, slot, dims)
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


def _tie(ledger: Ledger, slots: Slots, slot: Tensor, dims: tuple[int, int]) -> Slots | None:
    """The slots that come in addition; None where features lie along these dimensions otherwise."""
    met = [(s, kind) for s, kind in slots if support(s) & set(dims)]
    alone = [(s, kind, d) for s, kind in met for d in dims if support(s) == {d}]
    ids = [vector(s, d) for s, _, d in alone]
    if not met or len(alone) < len(met) or any(len(v[v > 0].unique()) < len(v) for v in ids):
        return None
    first, kind, _ = alone[0]
    for other in ids[1:]:
        ledger.relate(ids[0], other)
    ledger.bilinear.append((ids[0].numpy(), ledger.node))  # masks must be those of all models
    entries = slot.diagonal(0, *dims).movedim(-1, 0).reshape(len(ids[0]), -1)
    values = project(entries, {0}).expand(len(ids[0]), 1).reshape(-1)
    if len(values.unique()) > 1:
        ledger.colour(ids[0], values)
    missing = [d for d in dims if all(d != held for _, _, held in alone)]
    return [(place(ledger.twins(ids[0]), {0: d}, first.ndim), kind) for d in missing]
