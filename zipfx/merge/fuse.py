"""Fuse: one generic rule turns K weights into one, W* = sum_k M_k W_k U_k, axis by axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zipfx.analysis import Axis, Space
from zipfx.match import Merge, Move, Pairs, merged_variance, read_maps
from zipfx.model.tensors import widened


def fuse(tensors: Sequence[Tensor], maps: Sequence[Sequence[Move]]) -> Tensor:
    """One parameter from K corresponding ones, computed in float64 (complex ones in complex128),
    returned in their dtype.

    M and U are real, so a complex weight that is conjugated where it is used needs nothing of its
    own: conj(M W U) = M conj(W) U.

    >>> from zipfx.match.axis_maps import AxisMap
    >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0], [3.0]])
    >>> swap = AxisMap(0, torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64))
    >>> fuse([a, b], [[], [swap]]).flatten()
    tensor([2., 3.])
    """
    total: Tensor | None = None
    for t, mine in zip(tensors, maps, strict=True):
        moved = widened(t.detach())
        for m in mine:
            moved = m.apply(moved)
        total = moved.clone() if total is None else total.add_(moved)
    assert total is not None
    return (total / len(tensors)).to(tensors[0].dtype)


def fuse_variance(
    tensors: Sequence[Tensor], parts: Sequence[tuple[Space, Axis, Merge, Pairs]]
) -> Tensor:
    """Running variance of merged features, diag(M Sigma M^T) (design, section 3).

    Sigma takes its variances from the models' running statistics and its correlations from the
    observed covariance, which may be of another place of the space.
    """
    std = [t.detach().double().clamp(min=0).sqrt().cpu() for t in tensors]
    blocks = [(axis.index, merge) for space, axis, merge, _ in parts if space.of_blocks]
    for k, t in enumerate(std):
        for move in read_maps(len(t), 0, blocks, k):
            std[k] = move.apply(std[k])
    result = torch.stack(std).mean(0).square()
    for space, axis, merge, pairs in parts:
        if not space.of_blocks:
            for where in axis.index.T:
                result[where] = merged_variance(merge, pairs, torch.cat([t[where] for t in std]))
    return result.to(tensors[0].device, tensors[0].dtype)
