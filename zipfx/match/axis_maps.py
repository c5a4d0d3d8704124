"""Axis maps: what the merge matrix M and the unmerge matrix U do along each axis of each parameter.

Every axis of every parameter is described by where its indices go (`AxisMap`): features of a
space go to their merged feature, everything else stays.  A merge averages, an unmerge sums the
columns that read the same merged feature.  Nothing here knows a layer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.analysis import Axis, Role, Space, by_rows
from zipfx.match.matchers.matching import Matching, Merge, merge_of, unmerge_of


@dataclass(frozen=True)
class AxisMap:
    """Where model k's indices of one axis go, and with which weight.

    target: (d,) int64; scale: (d,) float64. For a merged axis the scale is K / count of the merged
    feature, so that the mean over models of what arrives is M_k; for a read axis it is 1 (U_k).
    by, parts: as in `Axis`; then d counts every part of the rows.
    """

    dim: int
    target: Tensor
    scale: Tensor
    by: int = -1
    parts: int = 1

    def apply(self, t: Tensor) -> Tensor:
        """Send every slice of `t` along `dim` to its target, adding up."""
        if self.by >= 0:
            scaled = t * self._rows(self.scale, t.shape).to(t.device)
            index = self._rows(self.target % t.shape[self.dim], t.shape).to(t.device)
            return torch.zeros_like(scaled).scatter_add_(self.dim, index, scaled)
        shape = [1] * t.ndim
        shape[self.dim] = -1
        scaled = t * self.scale.to(t.device).reshape(shape)
        out = torch.zeros_like(scaled)
        return out.index_add_(self.dim, self.target.to(t.device), scaled)

    def _rows(self, values: Tensor, shape: torch.Size) -> Tensor:
        return by_rows(values, self.dim, self.by, self.parts, shape)


@dataclass(frozen=True)
class AxisMatrix:
    """Features of a space on one axis, multiplied by a dense matrix.

    index: (size, occurrences) int64, as in `Axis`; matrix: (size, size) float64, column j what
    becomes of feature j: K M_k for a merged axis, U_k^T for a read one; by, parts: as in `Axis`.

    >>> swap = AxisMatrix(0, torch.tensor([[0], [2]]), torch.tensor([[0.0, 1], [1, 0]]).double())
    >>> swap.apply(torch.tensor([1.0, 2.0, 3.0]).double())
    tensor([3., 2., 1.], dtype=torch.float64)
    """

    dim: int
    index: Tensor
    matrix: Tensor
    by: int = -1
    parts: int = 1

    def apply(self, t: Tensor) -> Tensor:
        """Mix the slices of `t` along `dim`; those of other features stay."""
        index, matrix = self.index.to(t.device), self.matrix.to(t.device, t.dtype)
        x: Tensor = columns(t, self.dim, self.by, self.parts).clone()
        x[..., index.flatten()] = torch.einsum("...no,mn->...mo", x[..., index], matrix).flatten(-2)
        rows: Tensor = x
        if self.by < 0:
            return rows.movedim(-1, self.dim)
        rows = x.unflatten(-1, (self.parts, -1)).movedim(-2, -3).flatten(-3, -2)
        return rows.movedim((-2, -1), (self.by, self.dim))


def columns(t: Tensor, dim: int, by: int = -1, parts: int = 1) -> Tensor:
    """What one axis has at each of its indices, (..., d); of an axis `by` the rows, of all parts
    of them, (..., rows of a part, parts * d)."""
    if by < 0:
        return t.movedim(dim, -1)
    apart: Tensor = t.movedim((by, dim), (-2, -1)).unflatten(-2, (parts, -1))
    return apart.movedim(-3, -2).flatten(-2)


Move = AxisMap | AxisMatrix


def axis_map(
    size: int,
    dim: int,
    merges: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    by: int = -1,
    parts: int = 1,
) -> AxisMap:
    """The map of one axis; merges: (index table, merged feature of each row, scale or None).

    They are done one after the other: blocks move first, then features inside their new blocks.
    """
    target = torch.arange(size)
    scale = torch.ones(size, dtype=torch.float64)
    for index, assigned, weight in merges:
        if weight is not None:
            here = torch.ones(size, dtype=torch.float64)
            here[index] = weight[:, None].expand(index.shape)
            scale *= here[target]
        move = torch.arange(size)
        move[index] = index[assigned]
        target = move[target]
    return AxisMap(dim, target, scale, by, parts)


def read_maps(
    size: int,
    dim: int,
    reads: Sequence[tuple[Tensor, Merge]],
    k: int,
    by: int = -1,
    parts: int = 1,
) -> list[Move]:
    """What the columns of an axis of model k need in order to read merged features, U_k.

    reads: (index table, merge) of each space on the axis.
    """
    return _maps(size, dim, [(index, merge, True) for index, merge in reads], k, by, parts)


def made_matrix(size: int, made: Sequence[tuple[Tensor, Merge]], k: int) -> Tensor:
    """What becomes of the features of model k along an axis that carries them, K M_k: (size, size)
    float64, entries of pinned features on the diagonal.

    made: (index table, merge) of each space on the axis.
    """
    found = torch.eye(size, dtype=torch.float64)
    for move in _maps(size, 0, [(index, merge, False) for index, merge in made], k):
        found = move.apply(found)
    return found


def _maps(
    size: int,
    dim: int,
    uses: Sequence[tuple[Tensor, Merge, bool]],
    k: int,
    by: int = -1,
    parts: int = 1,
) -> list[Move]:
    """The maps of one axis of model k; uses: (index table, merge, whether it is read)."""
    merges: list[tuple[Tensor, Tensor, Tensor | None]] = []
    dense: list[Move] = []
    for index, merge, read in uses:
        if is_pattern(merge, read):
            assert isinstance(merge, Matching)
            merges.append((index, merge.of(k), None if read else _share(merge, k)))
        else:
            matrix = unmerge_of(merge, k).T if read else merge_of(merge, k) * len(merge.sizes)
            dense.append(AxisMatrix(dim, index, matrix, by, parts))
    return [axis_map(size, dim, merges, by, parts), *dense]


def is_pattern(merge: Merge, read: bool) -> bool:
    """Whether M (or U, where features are read) only averages (or copies) whole features."""
    return isinstance(merge, Matching) and not (read and merge.unmerge is not None)


def plan(
    spaces: Sequence[Space],
    merges: Mapping[str, Merge],
    shapes: Mapping[str, torch.Size],
    models: int,
) -> dict[str, list[list[Move]]]:
    """For every parameter that a space touches: for each model, the maps of its axes."""
    found: dict[tuple[str, int, int], list[tuple[Axis, Merge]]] = {}
    by = {}
    for space in spaces:
        for axis in space.axes:
            if axis.by >= 0:
                by[axis.parameter, axis.dim] = axis.by
            if not axis.implied:
                key = axis.parameter, axis.dim, axis.parts
                found.setdefault(key, []).append((axis, merges[space.name]))

    def turn(key: tuple[str, int, int]) -> tuple[int, int]:
        """Blocks of an axis as a whole before what lies in parts of it, as features are known by
        where their blocks have gone; parts of the rows before the rows move."""
        name, dim, parts = key
        rows = 0
        while (name, dim) in by:
            rows, dim = rows + 1, by[name, dim]
        return -rows, parts

    maps: dict[str, list[list[Move]]] = {}
    for name, dim, parts in sorted(found, key=turn):
        group = found[name, dim, parts]
        moves = maps.setdefault(name, [[] for _ in range(models)])
        uses = [(axis.index, m, axis.role == Role.CONSUMES) for axis, m in group]
        for k in range(models):
            moves[k] += _maps(shapes[name][dim] * parts, dim, uses, k, group[0][0].by, parts)
    for rows in maps.values():  # matrices come last: they are those of the blocks at a new place
        for mine in rows:
            mine.sort(key=lambda move: isinstance(move, AxisMatrix))
    return maps


def _share(matching: Matching, k: int) -> Tensor:
    return len(matching.sizes) / matching.counts.double()[matching.of(k)]
