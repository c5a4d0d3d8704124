"""Convolutions and poolings: channels are features, pixels are positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zipfx.labels import Kind, Labels, Ledger, place, positions, project, support, vector
from zipfx.rules.call import Call, carried, first, rule
from zipfx.rules.contraction import add_bias, contract, produce


@rule(
    "convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution"
)
def _convolution(call: Call) -> Labels:
    name = "input" if call.arg("input") is not None else "self"
    x, w = call.labels(name), call.labels("weight")
    ledger, ndim, groups = call.ledger, len(x.shape), int(call.arg("groups"))
    out, into = (1, 0) if call.arg("transposed") else (0, 1)
    shape = tuple(call.result.shape)
    kernel = set(range(2, ndim))
    _pin_kernel(ledger, w, kernel)
    x = slide(ledger, x, kernel)
    made = carried(w.features, {out: 1}, ndim)
    if groups == 1:
        x, w = contract(ledger, x, 1, w, into)
        produce(ledger, w, x, made)
    elif groups == x.shape[1] and not call.arg("transposed"):
        made = [_depthwise(ledger, x, w, made, shape[1] // groups)]
    else:
        reason = f"grouped convolution with {groups} groups (only depthwise is understood)"
        on_axis = [s for s in x.features if 1 in support(s)]
        ledger.pin([*on_axis, *made, *[s for s in w.features if into in support(s)]], reason)
        if call.arg("transposed"):  # output channels: groups x the axis of the weight
            made = []
    fresh = positions(shape, [d for d in kernel if shape[d] > 1])
    if not made or made[0].shape[1] != shape[1]:
        fresh, made = (*fresh, *positions(shape, [1])), []
    features = (*carried(x.features, {0: 0}, ndim), *made)
    fixed = (*carried(x.fixed, {0: 0}, ndim), *carried(w.fixed, {out: 1}, ndim), *fresh)
    product = Labels(shape, features, fixed, max(x.kind, w.kind))
    bias = call.arg("bias")
    if bias is None:
        return product
    b = call.of(bias)
    features_of_b, fixed_of_b = (
        tuple(place(s, {0: 0}, ndim - 1) for s in slots) for slots in (b.features, b.fixed)
    )
    b = Labels((shape[1], *[1] * (ndim - 2)), features_of_b, fixed_of_b, b.kind)
    return add_bias(ledger, product, b)


def slide(ledger: Ledger, x: Labels, spatial: set[int]) -> Labels:
    """An operation that sees neighbours along `spatial`: features along it move as wholes."""
    reason = "an operation slides along a feature axis: blocks keep their inner order"
    slots = (ledger.collapse(s, spatial, reason) if support(s) & spatial else s for s in x.features)
    return replace(x, features=tuple(s for s in slots if support(s)))


def _pin_kernel(ledger: Ledger, w: Labels, kernel: set[int]) -> None:
    """Kernel positions are coordinates, not features."""
    for slot in w.features:
        if support(slot) & kernel:
            ids = torch.unique(slot)
            ledger.colour(ids, ids)


def _depthwise(ledger: Ledger, x: Labels, w: Labels, made: list[Tensor], multiplier: int) -> Tensor:
    """Every input channel makes its own `multiplier` output channels: they are one feature."""
    ndim = len(x.shape)
    x = slide(ledger, x, set(range(ndim)) - {1})
    slots = [vector(s, 1) for s in x.features if 1 in support(s)]
    rows = vector(made[0], 1) if made else torch.zeros(1, dtype=torch.int64)
    for slot in x.fixed:
        if 1 in support(slot):
            seen = vector(project(slot, [1]), 1).repeat_interleave(multiplier)
            ledger.colour(rows, seen)
    if len(slots) > 1:
        ledger.pin([*slots, rows], "features of several axes on one axis")
    elif slots:
        if w.kind == Kind.WEIGHT:
            ledger.trait("elementwise")
        rows = ledger.unify(rows, slots[0].repeat_interleave(multiplier), weights_only=False)
    return place(rows, {0: 1}, ndim)


@rule(
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_bilinear2d.vec",
    "upsample_bicubic2d.vec",
    "upsample_linear1d.vec",
    "upsample_nearest2d.vec",
    "upsample_nearest1d.vec",
    "upsample_nearest2d",
    "upsample_nearest1d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "upsample_trilinear3d.vec",
)
def _pool(call: Call) -> Any:
    """Local operations on the trailing dims of (N, C, ...): channels pass, pixels are new."""
    x = call.of(call.tensors()[0])
    ndim = len(x.shape)
    size = next(n for n in (1, 2, 3) if f"{n}d" in str(call.op))
    spatial = set(range(ndim - size, ndim))
    x = slide(call.ledger, x, spatial)
    shape = tuple(first(call.result).shape)
    keep = {d: d for d in range(ndim) if d not in spatial}
    y = Labels(
        shape,
        tuple(carried(x.features, keep, ndim)),
        (*carried(x.fixed, keep, ndim), *positions(shape, spatial)),
        x.kind,
    )
    return (y,) * len(call.result) if isinstance(call.result, tuple) else y
