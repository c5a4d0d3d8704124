"""Fuse: one generic rule turns K weights into one, W* = sum_k M_k W_k U_k, axis by axis.

Every axis of every parameter is described by where its indices go (`AxisMap`): features of a
space go to their merged feature, everything else stays.  A merge averages, an unmerge sums the
columns that read the same merged feature.  Nothing here knows a layer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.matrices import Matching, Pairs
from zipfx.spaces import Axis, Role, Space, by_rows


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


def plan(
    spaces: Sequence[Space],
    matchings: Mapping[str, Matching],
    shapes: Mapping[str, torch.Size],
    models: int,
) -> dict[str, list[list[AxisMap]]]:
    """For every parameter that a space touches: for each model, the maps of its axes."""
    found: dict[tuple[str, int, int], list[tuple[Axis, Matching]]] = {}
    for space in spaces:
        for axis in space.axes:
            key = axis.parameter, axis.dim, -axis.parts  # parts of the rows before the rows move
            if not axis.implied:
                found.setdefault(key, []).append((axis, matchings[space.name]))
    maps: dict[str, list[list[AxisMap]]] = {}
    for name, dim, parts in sorted(found, key=lambda key: key[2]):
        group = found[name, dim, parts]
        rows = maps.setdefault(name, [[] for _ in range(models)])
        size, by = shapes[name][dim] * -parts, group[0][0].by
        for k in range(models):
            merges = [
                (axis.index, m.of(k), None if axis.role == Role.CONSUMES else _share(m, k, models))
                for axis, m in group
            ]
            rows[k].append(axis_map(size, dim, merges, by, -parts))
    return maps


def _share(matching: Matching, k: int, models: int) -> Tensor:
    return models / matching.counts.double()[matching.of(k)]


def fuse(tensors: Sequence[Tensor], maps: Sequence[Sequence[AxisMap]]) -> Tensor:
    """One parameter from K corresponding ones, computed in float64, returned in their dtype.

    >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0], [3.0]])
    >>> swap = AxisMap(0, torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64))
    >>> fuse([a, b], [[], [swap]]).flatten()
    tensor([2., 3.])
    """
    total: Tensor | None = None
    for t, mine in zip(tensors, maps, strict=True):
        moved = t.detach().double()
        for m in mine:
            moved = m.apply(moved)
        total = moved.clone() if total is None else total.add_(moved)
    assert total is not None
    return (total / len(tensors)).to(tensors[0].dtype)


def fuse_variance(
    tensors: Sequence[Tensor], parts: Sequence[tuple[Space, Axis, Matching, Pairs]]
) -> Tensor:
    """Running variance of merged features, diag(M Sigma M^T) (design, section 3).

    Sigma takes its variances from the models' running statistics and its correlations from the
    observed covariance, which may be of another place of the space.
    """
    std = [t.detach().double().clamp(min=0).sqrt().cpu() for t in tensors]
    blocks = [(axis, m) for space, axis, m, _ in parts if space.of_blocks]
    for k, t in enumerate(std):
        merges = [(axis.index, m.of(k), None) for axis, m in blocks]
        std[k] = axis_map(len(t), 0, merges).apply(t)
    result = torch.stack(std).mean(0).square()
    for space, axis, matching, pairs in parts:
        if space.of_blocks:
            continue
        groups, counts = matching.assignment, matching.counts.double()
        for where in axis.index.T:
            s = torch.cat([t[where] for t in std])
            both = s[pairs.first] * s[pairs.second] * pairs.correlation
            total = torch.zeros(matching.merged, dtype=torch.float64)
            total.index_add_(0, groups, s.square()).index_add_(0, groups[pairs.first], both)
            result[where] = (total / counts.square()).clamp(min=0)
    return result.to(tensors[0].device, tensors[0].dtype)
