"""Convolutions and poolings: channels are features, pixels are positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from zipfx.labels import (
    Kind,
    Labels,
    beyond,
    broadcast,
    place,
    placed,
    positions,
    project,
    support,
    vector,
)
from zipfx.ledger import Ledger
from zipfx.rules.call import Call, carried, first, rule
from zipfx.rules.contraction import add_bias, contract, note_reading, produce, without


@rule(
    "convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution"
)
def _convolution(call: Call) -> Labels:
    name = "input" if call.arg("input") is not None else "self"
    x, w = call.labels(name), call.labels("weight")
    ledger, ndim, groups = call.ledger, len(x.shape), int(call.arg("groups"))
    transposed = bool(call.arg("transposed"))
    shape = tuple(call.result.shape)
    kernel = set(range(2, ndim))
    _pin_kernel(ledger, w, kernel)
    slides = {d for d in kernel if not _still(call, d - 2, w.shape[d])}
    x = slide(ledger, x, slides)
    x = replace(x, fixed=beyond(x.fixed, slides))
    product = (
        _whole(ledger, x, w, transposed)
        if groups == 1
        else _grouped(ledger, x, w, groups, transposed)
    )
    if product is None:
        reason = "a grouped convolution with weights or channels of several axes"
        ledger.pin([*x.features, *w.features], reason)
        product = Labels(x.shape, (), positions(shape, [1]), max(x.kind, w.kind))
    pixels = positions(shape, slides)
    product = replace(product, shape=shape, fixed=(*product.fixed, *pixels))
    bias = call.arg("bias")
    if bias is None:
        return product
    return add_bias(ledger, product, placed(call.of(bias), {0: 0}, ndim - 1))


def _still(call: Call, i: int, width: int) -> bool:
    """Whether a convolution leaves positions along its dimension i alone."""
    step, pad, apart = (
        (list(call.arg(n)) * (i + 1))[i] if call.arg(n) is not None else default
        for n, default in (("stride", 1), ("padding", 0), ("output_padding", 0))
    )
    return width == 1 and step == 1 and pad == 0 and apart == 0


def _flat(lab: Labels) -> Labels:
    """Seen along the first two dimensions only."""
    features = tuple(s.flatten(1) for s in lab.features if not support(s) - {0, 1})
    fixed = [project(s, support(s) & {0, 1}).flatten(1) for s in lab.fixed if support(s) & {0, 1}]
    return Labels(lab.shape[:2], features, tuple(s for s in fixed if support(s)), lab.kind)


def _whole(ledger: Ledger, x: Labels, w: Labels, transposed: bool) -> Labels:
    """Every input channel meets every output channel: a linear map at every position."""
    out, into = (1, 0) if transposed else (0, 1)
    k = len(x.shape)  # the frame is (n, out, positions ..., in)
    frame = {d: k if d == 1 else d for d in range(k)}, {out: 1, into: k}
    return without(contract(ledger, x, _flat(w), frame, k), k, x.shape)


def _grouped(ledger: Ledger, x: Labels, w: Labels, groups: int, transposed: bool) -> Labels | None:
    """Every group of channels is a linear map of its own: a block in, a block out.

    The axis of the weight that counts channels within a group has features of its own in every
    group, so that its labels are those of (group, channel).
    """
    ndim, flat = len(x.shape), _flat(w)
    rows, columns = ([vector(s, d) for s in flat.features if support(s) == {d}] for d in (0, 1))
    channels = [s for s in x.features if 1 in support(s)]
    if len(rows) != 1 or any(support(s) != {1} for s in channels):
        return None
    row = rows[0].reshape(groups, -1)
    group = ledger.block(row, {1}) if row.shape[1] > 1 else row
    column = group
    if columns:
        own = ledger.parted(columns[0], row[:, :1], groups)
        if own is None:
            return None
        ledger.relate(own, group, weights_only=True)
        column = own
    into, made = (row, column) if transposed else (column, row)
    for slot in _flat(x).fixed:
        if 1 in support(slot):
            seen = vector(project(slot, {1}), 1).reshape(groups, -1)
            ledger.colour(*broadcast(into, seen))
    met = [vector(s, 1).reshape(groups, -1) for s in channels]
    for slot in met:
        ledger.relate(into, slot)
    if into is made:  # depthwise: every channel goes its own way
        if met and w.kind == Kind.WEIGHT:
            ledger.trait("elementwise")
    else:
        ledger.trait("mixes")
        if w.kind == Kind.WEIGHT:
            note_reading(ledger, into, met)
        produce(ledger, w, x, [made])
    features = (
        *(s for s in x.features if 1 not in support(s)),
        place(made.reshape(-1), {0: 1}, ndim),
    )
    fixed = (
        *beyond(x.fixed, {1}),
        *(place(s, {0: 1}, ndim) for s in flat.fixed if not transposed and support(s) == {0}),
    )
    return Labels(x.shape, features, fixed, max(x.kind, w.kind))


def slide(ledger: Ledger, x: Labels, spatial: set[int]) -> Labels:
    """An operation that sees neighbours along `spatial`: features along it move as wholes.

    Where they are only missing at some positions (zero padding) they do not lie along it.
    """
    reason = "an operation slides along a feature axis: blocks keep their inner order"
    slots = []
    for s in x.features:
        if support(s) & spatial:
            whole = s.amax(sorted(support(s) & spatial), keepdim=True)
            s = (
                whole
                if bool(((s == whole) | (s == 0)).all())
                else ledger.collapse(s, spatial, reason)
            )
        slots.append(s)
    return replace(x, features=tuple(s for s in slots if support(s)))


def _pin_kernel(ledger: Ledger, w: Labels, kernel: set[int]) -> None:
    """Kernel positions are coordinates, not features."""
    for slot in w.features:
        if support(slot) & kernel:
            ids = torch.unique(slot)
            ledger.colour(ids, ids)


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
    pixels = positions(shape, spatial)
    y = Labels(
        shape,
        tuple(carried(x.features, keep, ndim)),
        (*beyond(x.fixed, spatial), *pixels),
        x.kind,
    )
    return (y,) * len(call.result) if isinstance(call.result, tuple) else y


@rule("col2im")
def _fold(call: Call) -> Labels:
    """(N, C x kernel, L) -> (N, C, H, W): what lies on one kernel position is not exchanged."""
    x, shape = call.labels("self"), tuple(call.result.shape)
    ledger, kernel = call.ledger, math.prod(call.arg("kernel_size"))
    reason = "patches are put together: blocks keep their inner order"
    batch = len(shape) - 3
    x = slide(ledger, x, {batch + 1})
    features = []
    for s in x.features:
        if batch in support(s):
            parts = s.unflatten(batch, (-1, kernel))
            s = ledger.collapse(parts, {batch + 1}, reason).squeeze(batch + 1)
        if support(s):
            features.append(place(s, {d: d for d in range(batch + 1)}, len(shape)))
    left = beyond(x.fixed, {batch, batch + 1})
    fixed = [place(s, {0: 0}, len(shape)) for s in left]
    pixels = positions(shape, {batch + 1, batch + 2})
    return Labels(shape, tuple(features), (*fixed, *pixels), x.kind)
