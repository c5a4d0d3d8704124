"""Reorder: the features of spaces in another order, in parameters and in activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zipfx.analysis.spaces.values import Axis, Space
from zipfx.errors import ZipError

#: the axes of one parameter that are permuted together, each with the new order of its features
Moves = list[list[tuple[Axis, Tensor]]]


def axis_moves(spaces: Sequence[Space], orders: Mapping[str, Tensor]) -> dict[str, Moves]:
    """What moves on each parameter when feature orders[name][j] of each space goes to position j;
    rows before what lies in their parts."""
    for space in spaces:
        _check_order(space, orders[space.name])
    found: dict[str, dict[tuple[int, int], list[tuple[Axis, Tensor]]]] = {}
    for space in spaces:
        for axis in space.axes:
            if not axis.implied:
                mine = found.setdefault(axis.parameter, {}).setdefault((axis.parts, axis.dim), [])
                mine.append((axis, orders[space.name]))
    return {name: [mine[key] for key in sorted(mine)] for name, mine in found.items()}


def moved(t: Tensor, moves: Moves) -> Tensor:
    """A parameter with its features in their new order."""
    for together in moves:
        dim, by, parts = together[0][0].dim, together[0][0].by, together[0][0].parts
        source = torch.arange(t.shape[dim] * parts)
        for axis, order in together:
            step = torch.arange(len(source))
            step[axis.index.flatten()] = axis.index[order].flatten()
            source = source[step]
        if by < 0:
            t = t.index_select(dim, source.to(t.device))
        else:
            t = t.gather(dim, by_rows(source % t.shape[dim], dim, by, parts, t.shape).to(t.device))
    return t


def _check_order(space: Space, order: object) -> None:
    if not isinstance(order, Tensor) or order.ndim != 1 or order.dtype != torch.int64:
        raise ZipError(
            f"the order of space {space.name!r} is a {type(order).__name__}: it must be a tensor "
            f"({space.size},) of int64"
        )
    if sorted(order.tolist()) != list(range(space.size)):
        raise ZipError(
            f"space {space.name!r} has {space.size} features; the permutation given for it is no "
            f"permutation of 0..{space.size - 1} (shape {tuple(order.shape)})"
        )
    if space.blocks:
        block = torch.arange(len(space.blocks)).repeat_interleave(torch.tensor(space.blocks))
        if not torch.equal(block[order], block):
            raise ZipError(
                f"space {space.name!r} has blocks of {space.blocks} features; the permutation "
                "given for it moves features from one block to another (whole blocks are a space "
                f"of their own: {[b.space for b in space.within]})"
            )


def by_rows(values: Tensor, dim: int, by: int, parts: int, shape: Sequence[int]) -> Tensor:
    """One value (parts * length,) for every index of `dim` in every part of the rows (dimension
    `by`), expanded to the shape of the parameter."""
    found = values.reshape(parts, shape[dim]).repeat_interleave(shape[by] // parts, 0)
    found = found if by < dim else found.T
    return found.reshape([n if d in (by, dim) else 1 for d, n in enumerate(shape)]).expand(
        tuple(shape)
    )


# these are part of merges, so they are written in what of Python torch.jit.script knows
def select(x: Tensor, dims: list[int], index: Tensor) -> Tensor:
    """`index_select` along several dimensions taken as one, flattened in this order."""
    last = list(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    found = moved.flatten(-len(dims)).index_select(-1, index)
    return found.reshape(moved.shape).movedim(last, dims)


def mix(x: Tensor, dims: list[int], matrix: Tensor) -> Tensor:
    """Multiply by a matrix (n, d) along several dimensions taken as one, flattened in this order.

    >>> mix(torch.tensor([[1.0, 2.0]]), [1], torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    tensor([[2., 3.]])
    """
    last = list(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    found = moved.flatten(-len(dims)) @ matrix.to(x.dtype).T
    return found.reshape(moved.shape).movedim(last, dims)
