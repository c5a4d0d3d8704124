"""Convolution, and pooling: channels are features, pixels are positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import (
    Kind,
    Labels,
    beyond,
    broadcast,
    narrow,
    place,
    placed,
    positions,
    project,
    support,
    vector,
)
from zipfx.analysis.rules.call import Call, carried, first, pinned_along, rule, without_padding
from zipfx.analysis.rules.contraction import add_bias, contract, note_reading, produce, without
from zipfx.analysis.rules.pointwise import join


@rule(
    "convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution"
)
def _convolution(call: Call) -> Labels:
    name = "input" if call.arg("input") is not None else "self"
    x, w = call.labels(name), call.labels("weight")
    slides = {d for d in range(2, len(x.shape)) if not _still(call, d - 2, w.shape[d])}
    return convolved(call, x, w, slides, transposed=bool(call.arg("transposed")))


def convolved(
    call: Call, x: Labels, w: Labels, slides: set[int], *, transposed: bool = False
) -> Labels:
    """A convolution of x that moves values along the dimensions `slides`."""
    constraints, ndim, groups = call.constraints, len(x.shape), int(call.arg("groups"))
    shape = tuple(call.result.shape)
    w = _flat(constraints, w)
    x = slide(constraints, x, slides)
    x = replace(x, fixed=beyond(x.fixed, slides))
    product = (
        _whole(constraints, x, w, transposed)
        if groups == 1
        else _grouped(constraints, x, w, groups, transposed)
    )
    if product is None:
        reason = "a grouped convolution of channels that lie on several axes"
        constraints.pin([*x.features, *w.features], reason)
        product = Labels(x.shape, (), positions(shape, [1]), max(x.kind, w.kind))
    pixels = positions(shape, slides)
    product = replace(product, shape=shape, fixed=(*product.fixed, *pixels))
    bias = call.arg("bias")
    if bias is None:
        return product
    return add_bias(constraints, product, placed(call.of(bias), {0: 0}, ndim - 1))


@rule("conv_tbc")
def _convolution_of_steps(call: Call) -> Labels:
    """(T, B, C), by a kernel (width, C, new C)."""
    x, w = call.labels("self"), call.labels("weight")
    features, fixed = (tuple(s.movedim(0, 2) for s in slots) for slots in (w.features, w.fixed))
    w = Labels((*w.shape[1:], w.shape[0]), features, fixed, w.kind)
    x = slide(call.constraints, x, {0})
    frame = {0: 0, 1: 1, 2: 3}, {0: 3, 1: 2}
    shape = tuple(call.result.shape)
    y = without(contract(call.constraints, x, _flat(call.constraints, w), frame, 3), 3, shape)
    y = replace(y, fixed=(*beyond(y.fixed, {0}), *positions(shape, [0])))
    return add_bias(call.constraints, y, call.labels("bias"))


def _still(call: Call, i: int, width: int) -> bool:
    """Whether a convolution leaves positions along its dimension i alone."""
    step, pad, apart = (
        (list(call.arg(n)) * (i + 1))[i] if call.arg(n) is not None else default
        for n, default in (("stride", 1), ("padding", 0), ("output_padding", 0))
    )
    return width == 1 and step == 1 and pad == 0 and apart == 0


def _flat(constraints: Constraints, w: Labels) -> Labels:
    """A weight seen along its first two dimensions: kernel positions are coordinates.

    Features along them (of what computes a kernel) move as wholes.
    """
    slots = []
    for s in w.features:
        kernel = support(s) - {0, 1}
        if kernel == support(s):
            ids = torch.unique(s)
            constraints.colour(ids, ids)
            continue
        reason = "a computed kernel: blocks keep their inner order"
        slots.append(constraints.collapse(s, kernel, reason) if kernel else s)
    fixed = [project(s, support(s) & {0, 1}).flatten(1) for s in w.fixed if support(s) & {0, 1}]
    features = tuple(s.flatten(1) for s in slots)
    return Labels(w.shape[:2], features, tuple(s for s in fixed if support(s)), w.kind)


def _whole(constraints: Constraints, x: Labels, w: Labels, transposed: bool) -> Labels:
    """Every input channel meets every output channel: a linear map at every position."""
    out, into = (1, 0) if transposed else (0, 1)
    k = len(x.shape)  # the frame is (n, out, positions ..., in)
    frame = {d: k if d == 1 else d for d in range(k)}, {out: 1, into: k}
    return without(contract(constraints, x, w, frame, k), k, x.shape)


def _grouped(
    constraints: Constraints, x: Labels, w: Labels, groups: int, transposed: bool
) -> Labels | None:
    """Every group of channels is a linear map of its own: a block in, a block out.

    The axis of the weight that counts channels within a group has features of its own in every
    group, so that its labels are those of (group, channel).
    """
    ndim = len(x.shape)
    rows, columns = ([vector(s, d) for s in w.features if support(s) == {d}] for d in (0, 1))
    channels = [s for s in x.features if 1 in support(s)]
    if any(support(s) != {1} for s in channels):
        return None
    told = len(rows) == 1 and len(constraints.ids(rows)) == w.shape[0]  # by its row alone
    if not told or len(columns) > 1 or len(w.features) > 1 + len(columns):
        return _stacked(constraints, x, w, groups, transposed)
    row = rows[0].reshape(groups, -1)
    if columns and not _complete(constraints, row):
        return _stacked(constraints, x, w, groups, transposed)
    group = constraints.block(row, {1}) if row.shape[1] > 1 else row
    column = group
    if columns:
        own = constraints.parted(columns[0], row[:, :1], groups)
        if own is None:
            return _stacked(constraints, x, w, groups, transposed)
        constraints.relate(own, group, weights_only=True)
        column = own
    into, made = (row, column) if transposed else (column, row)
    for slot in x.fixed:
        if 1 in support(slot):
            seen = vector(project(slot, {1}), 1).reshape(groups, -1)
            constraints.colour(*broadcast(into, seen))
    met = [vector(s, 1).reshape(groups, -1) for s in channels]
    for slot in met:
        constraints.relate(into, slot)
    if into is made:  # depthwise: every channel goes its own way
        if met and w.kind == Kind.WEIGHT:
            constraints.trait("elementwise")
    else:
        constraints.trait("mixes")
        if w.kind == Kind.WEIGHT:
            note_reading(constraints, into, met)
        produce(constraints, w, x, [made])
    features = (
        *(s for s in x.features if 1 not in support(s)),
        place(made.reshape(-1), {0: 1}, ndim),
    )
    fixed = (
        *beyond(x.fixed, {1}),
        *(place(s, {0: 1}, ndim) for s in w.fixed if not transposed and support(s) == {0}),
    )
    return Labels(x.shape, features, fixed, max(x.kind, w.kind))


def _complete(constraints: Constraints, row: Tensor) -> bool:
    """Whether the rows of every group are an own part of an axis of a parameter, of equal size."""
    axis = constraints.axis(row)
    if axis is None or axis.size != row.numel():
        return False
    part = (row - axis.start) // row.shape[1]
    return bool((part == part[:, :1]).all())


def _stacked(
    constraints: Constraints, x: Labels, w: Labels, groups: int, transposed: bool
) -> Labels:
    """Groups that share rows of their weights, or have none (one constant kernel for all channels).

    What tells the channels of the result is not the weight alone, so it is a stack of products.
    """
    ndim, into = len(x.shape), x.shape[1] // groups
    features = tuple(vector(s, 1) for s in x.features if 1 in support(s))
    fixed = tuple(vector(project(s, {1}), 1) for s in x.fixed if 1 in support(s))
    data = _split(Labels(x.shape[1:2], features, fixed, x.kind), groups)
    kernels = _split(w, groups)
    if into == 1:  # every channel goes its own way
        kernels = placed(kernels, {0: 0, 2: 1} if transposed else {0: 0, 1: 1}, 2)
        y = join(constraints, [data, kernels], kernels.shape)
    else:
        at = {0: 0, 1: 2, 2: 1} if transposed else {0: 0, 1: 1, 2: 2}
        y = contract(constraints, data, kernels, ({0: 0, 1: 2}, at), 2)
        y = without(y, 2, y.shape[:2])
    features, fixed = (
        tuple(place(s.expand(y.shape).reshape(-1), {0: 1}, ndim) for s in slots)
        for slots in (y.features, y.fixed)
    )
    features = (*(s for s in x.features if 1 not in support(s)), *features)
    return Labels(x.shape, features, (*beyond(x.fixed, {1}), *fixed), y.kind)


def _split(lab: Labels, groups: int) -> Labels:
    """The first dimension in groups."""

    def split(s: Tensor) -> Tensor:
        return narrow(s.unflatten(0, (groups, -1)) if s.shape[0] > 1 else s.unsqueeze(0))

    features, fixed = (tuple(map(split, slots)) for slots in (lab.features, lab.fixed))
    return Labels((groups, lab.shape[0] // groups, *lab.shape[1:]), features, fixed, lab.kind)


_SLIDES = "an operation slides along a feature axis: blocks keep their inner order"


def slide(constraints: Constraints, x: Labels, spatial: set[int], reason: str = _SLIDES) -> Labels:
    """An operation that sees neighbours along `spatial`: features along it move as wholes.

    Where they are only missing at some positions (zero padding) they do not lie along it.
    """
    slots = []
    for s in x.features:
        rest = without_padding(constraints, s, spatial)
        slots.append(constraints.collapse(s, spatial, reason) if rest is None else rest)
    return replace(x, features=tuple(s for s in slots if support(s)))


_RESIZING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()


@rule(
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    *(name + overload for name in _RESIZING for overload in ("", ".vec")),
)
def _pool(call: Call) -> Any:
    """Local operations on the trailing dims of (N, C, ...): channels pass, pixels are new."""
    x = call.of(call.tensors()[0])
    ndim = len(x.shape)
    size = next(n for n in (1, 2, 3) if f"{n}d" in str(call.op))
    spatial = set(range(ndim - size, ndim))
    x = slide(call.constraints, x, spatial)
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


@rule("grid_sampler_2d", "grid_sampler_3d", "max_unpool2d", "max_unpool3d")
def _resample(call: Call) -> Labels:
    """Pixels of every channel are moved to where the second operand says."""
    x, where = (call.of(t) for t in call.tensors())
    spatial = set(range(2, len(x.shape)))
    x = slide(call.constraints, x, spatial)
    shape = tuple(call.result.shape)
    y = Labels(shape, x.features, (*beyond(x.fixed, spatial), *positions(shape, spatial)), x.kind)
    if "grid" in str(call.op):  # the same for all channels
        call.constraints.pin(where.features, "says which pixels are read")
        return replace(y, kind=max(x.kind, where.kind))
    where = slide(call.constraints, where, spatial)  # of every channel its own
    return join(call.constraints, [y, replace(where, fixed=beyond(where.fixed, spatial))], shape)


@rule("affine_grid_generator")
def _grid(call: Call) -> Labels:
    """Where pixels are read, by a matrix for every image."""
    theta, shape = call.labels("theta"), tuple(call.result.shape)
    call.constraints.pin(theta.features, "says which pixels are read")
    return Labels(shape, (), positions(shape), theta.kind)


@rule("col2im")
def _fold(call: Call) -> Labels:
    """(N, C x kernel, L) -> (N, C, H, W): what lies on one kernel position is not exchanged."""
    x, shape = call.labels("self"), tuple(call.result.shape)
    constraints, kernel = call.constraints, math.prod(call.arg("kernel_size"))
    reason = "patches are put together: blocks keep their inner order"
    batch = len(shape) - 3
    x = slide(constraints, x, {batch + 1})
    features = []
    for s in x.features:
        if batch in support(s):
            parts = s.unflatten(batch, (-1, kernel))
            s = constraints.collapse(parts, {batch + 1}, reason).squeeze(batch + 1)
        if support(s):
            features.append(place(s, {d: d for d in range(batch + 1)}, len(shape)))
    left = beyond(x.fixed, {batch, batch + 1})
    fixed = [place(s, {0: 0}, len(shape)) for s in left]
    pixels = positions(shape, {batch + 1, batch + 2})
    return Labels(shape, tuple(features), (*fixed, *pixels), x.kind)


@rule("torchvision::deform_conv2d")
def _deformable(call: Call) -> Labels:
    """A convolution whose pixels are where the offsets say, each weighed as the masks say.

    Groups of input channels may have offsets of their own.
    """
    constraints, x = call.constraints, call.labels("input")
    for name in ("offset", "mask"):
        constraints.pin(call.labels(name).features, "says which pixels are read")
    groups = int(call.arg("offset_groups"))
    if groups > 1:
        group = torch.arange(groups).repeat_interleave(x.shape[1] // groups)
        x = replace(x, fixed=(*x.fixed, place(-1 - group, {0: 1}, 4)))
    y = convolved(call, x, call.labels("weight"), {2, 3})
    return replace(y, kind=max(y.kind, call.labels("offset").kind, call.labels("mask").kind))


@rule("torchvision::roi_align", "torchvision::roi_pool")
def _regions(call: Call) -> Labels | tuple[Labels, ...]:
    """(N, C, H, W) -> (K, C, h, w): boxes say which image, and which pixels, are read."""
    x = _read(call)
    several = isinstance(call.result, tuple)
    shape = tuple((call.result[0] if several else call.result).shape)
    y = replace(x, shape=shape, fixed=(*x.fixed, *positions(shape, [0, 2, 3])))
    return (y, y) if several else y


@rule("torchvision::ps_roi_align", "torchvision::ps_roi_pool")
def _regions_by_bin(call: Call) -> tuple[Labels, ...]:
    """(N, C h w, H, W) -> (K, C, h, w): every bin of a region reads channels of its own."""
    x, shape = _read(call), tuple(call.result[0].shape)
    bins = shape[2] * shape[3]
    reason = "every bin of a region has channels of its own: they keep their order"
    features = []
    for s in x.features:
        if s.shape[1] > 1:
            parts = vector(s, 1).reshape(-1, bins)
            s = place(call.constraints.collapse(parts, {1}, reason)[:, 0], {0: 1}, 4)
        features.append(s)
    fixed = positions(shape, [0, 2, 3])
    y = Labels(shape, tuple(features), fixed, x.kind)
    mapping = tuple(call.result[1].shape)
    return y, Labels(mapping, (), positions(mapping), x.kind)


def _read(call: Call) -> Labels:
    """The images, seen along their channels: boxes choose on all other axes."""
    boxes, reason = call.labels("rois"), "boxes say which pixels are read"
    call.constraints.pin(boxes.features, reason)
    x = slide(
        call.constraints, pinned_along(call.constraints, call.labels("input"), {0}, reason), {2, 3}
    )
    channels = tuple(carried(x.features, {1: 1}, 4))
    fixed = tuple(carried(x.fixed, {1: 1}, 4))
    return replace(x, features=channels, fixed=fixed, kind=max(x.kind, boxes.kind))


@rule("torchvision::nms")
def _suppressed(call: Call) -> Labels:
    """Numbers of the boxes that are left."""
    for name in ("dets", "scores"):
        call.constraints.pin(call.labels(name).features, "says which boxes are left")
    shape = tuple(call.result.shape)
    return Labels(shape, (), positions(shape), call.labels("dets").kind)
