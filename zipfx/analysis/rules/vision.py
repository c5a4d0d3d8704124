"""Operations of torchvision, by their names: it is not imported here."""

from __future__ import annotations

from dataclasses import replace

import torch

from zipfx.analysis.labels.labels import Labels, place, positions, vector
from zipfx.analysis.rules.call import Call, carried, pinned_along, rule
from zipfx.analysis.rules.convolution import convolved, slide


@rule("torchvision::deform_conv2d")
def _deformable(call: Call) -> Labels:
    """A convolution whose pixels are where the offsets say, each weighed as the masks say.

    Groups of input channels may have offsets of their own.
    """
    ledger, x = call.ledger, call.labels("input")
    for name in ("offset", "mask"):
        ledger.pin(call.labels(name).features, "says which pixels are read")
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
            s = place(call.ledger.collapse(parts, {1}, reason)[:, 0], {0: 1}, 4)
        features.append(s)
    fixed = positions(shape, [0, 2, 3])
    y = Labels(shape, tuple(features), fixed, x.kind)
    mapping = tuple(call.result[1].shape)
    return y, Labels(mapping, (), positions(mapping), x.kind)


def _read(call: Call) -> Labels:
    """The images, seen along their channels: boxes choose on all other axes."""
    boxes, reason = call.labels("rois"), "boxes say which pixels are read"
    call.ledger.pin(boxes.features, reason)
    x = slide(call.ledger, pinned_along(call.ledger, call.labels("input"), {0}, reason), {2, 3})
    channels = tuple(carried(x.features, {1: 1}, 4))
    fixed = tuple(carried(x.fixed, {1: 1}, 4))
    return replace(x, features=channels, fixed=fixed, kind=max(x.kind, boxes.kind))


@rule("torchvision::nms")
def _suppressed(call: Call) -> Labels:
    """Numbers of the boxes that are left."""
    for name in ("dets", "scores"):
        call.ledger.pin(call.labels(name).features, "says which boxes are left")
    shape = tuple(call.result.shape)
    return Labels(shape, (), positions(shape), call.labels("dets").kind)
