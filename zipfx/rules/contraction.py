"""Contractions: sums of products over an axis, which read one feature space and make another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zipfx.labels import Contraction, Kind, Labels, Ledger, broadcast, project, support, vector
from zipfx.rules.call import Call, carried, first, rule
from zipfx.rules.pointwise import join


def contract(ledger: Ledger, x: Labels, kx: int, w: Labels, kw: int) -> tuple[Labels, Labels]:
    """Dimension kx of x is multiplied with kw of w and summed: one feature space, read by w.

    Returns x and w with features that share the summed axis with others made into blocks.
    """
    x, w = _blocks(ledger, x, kx, w, kw), _blocks(ledger, w, kw, x, kx)
    vx, vw = (
        [vector(s, k) for s in lab.features if support(s) == {k}] for lab, k in ((x, kx), (w, kw))
    )
    for lab, k, other in ((x, kx, vw), (w, kw, vx)):
        for slot in lab.fixed:
            if k in support(slot):
                seen = vector(project(slot, [k]), k)
                for v in other:
                    ledger.colour(v, seen)
    if len(vx) > 1 or len(vw) > 1:
        ledger.pin([*vx, *vw], "features of several axes on one axis")
        return x, w
    _note_reading(ledger, (x, vx), (w, vw))
    if vx and vw:
        ledger.unify(vx[0], vw[0], weights_only=False)
    return x, w


def _blocks(ledger: Ledger, lab: Labels, k: int, other: Labels, ko: int) -> Labels:
    """Features that vary along k and elsewhere: a sum over k sees each block, or each slice.

    Where the other operand is a weight read along k, it reads the same k in every slice.
    """
    reason = "an operation sums over a part of the features: blocks keep their inner order"
    sliced = other.kind == Kind.WEIGHT and any(support(s) == {ko} for s in other.features)
    slots = []
    for s in lab.features:
        if k in support(s) and support(s) != {k}:
            s = ledger.collapse(s, support(s) - {k} if sliced else {k}, reason)
        slots.append(s)
    return replace(lab, features=tuple(s for s in slots if support(s)))


def _note_reading(
    ledger: Ledger, x: tuple[Labels, list[Tensor]], w: tuple[Labels, list[Tensor]]
) -> None:
    (weight, read), (other, met) = (w, x) if w[0].kind == Kind.WEIGHT else (x, w)
    if weight.kind != Kind.WEIGHT:
        ledger.trait("mixes")  # two activations, as in attention
    elif other.kind == Kind.WEIGHT:  # the right factor is applied first: the left one reads
        ids = (x[1] or [torch.zeros(1, dtype=torch.int64)])[0].numpy()
        ledger.contractions.append(Contraction(ids, ids * 0, -1))
    elif read or met:
        one = torch.zeros(1, dtype=torch.int64)
        pair = broadcast((read or [one])[0], (met or [one])[0])
        ledger.contractions.append(Contraction(pair[0].numpy(), pair[1].numpy(), ledger.node))


def produce(ledger: Ledger, w: Labels, x: Labels, slots: Sequence[Tensor]) -> None:
    """These axes of a weight make features of data."""
    if w.kind == Kind.WEIGHT and x.kind == Kind.DATA:
        ledger.produced.extend((s.reshape(-1).numpy(), ledger.node) for s in slots)


def _linear(call: Call, x: Labels, w: Labels, kw: int, bias: Labels | None) -> Labels:
    """x (..., k) times w (k at dim kw of two) gives (..., n)."""
    ledger, ndim = call.ledger, len(x.shape)
    x, w = contract(ledger, x, ndim - 1, w, kw)
    keep = {d: d for d in range(ndim - 1)}
    made = carried(w.features, {1 - kw: ndim - 1}, ndim)
    produce(ledger, w, x, made)
    shape = tuple(first(call.result).shape)
    product = Labels(
        shape,
        (*carried(x.features, keep, ndim), *made),
        (*carried(x.fixed, keep, ndim), *carried(w.fixed, {1 - kw: ndim - 1}, ndim)),
        max(x.kind, w.kind),
    )
    return product if bias is None else add_bias(ledger, product, bias)


def add_bias(ledger: Ledger, product: Labels, bias: Labels) -> Labels:
    """A bias belongs to what makes the features: it does not meet features of the input."""
    had = "elementwise" in ledger.traits.get(ledger.node, ())
    result = join(ledger, [product, bias], product.shape)
    if not had:
        ledger.traits.get(ledger.node, set()).discard("elementwise")
    return result


@rule("mm", "addmm", "_addmm_activation")
def _mm(call: Call) -> Labels:
    added = "addmm" in str(call.op)
    x, w = call.labels("mat1" if added else "self"), call.labels("mat2")
    return _linear(call, x, w, 0, call.labels("self") if added else None)


@rule("linear")
def _aten_linear(call: Call) -> Labels:
    bias = call.arg("bias")
    return _linear(
        call,
        call.labels("input"),
        call.labels("weight"),
        1,
        None if bias is None else call.of(bias),
    )


@rule("mv", "dot")
def _mv(call: Call) -> Labels:
    names = ("self", "vec") if "mv" in str(call.op) else ("self", "tensor")
    x, w = (call.labels(n) for n in names)
    x, w = contract(call.ledger, x, len(x.shape) - 1, w, 0)
    ndim = len(x.shape) - 1
    made = carried(x.features, {d: d for d in range(ndim)}, ndim)
    produce(call.ledger, x, w, made)
    fixed = carried(x.fixed, {d: d for d in range(ndim)}, ndim)
    return Labels(tuple(call.result.shape), tuple(made), tuple(fixed), max(x.kind, w.kind))


@rule("bmm", "baddbmm")
def _bmm(call: Call) -> Labels:
    added = "baddbmm" in str(call.op)
    x, w = call.labels("batch1" if added else "self"), call.labels("batch2" if added else "mat2")
    ledger = call.ledger
    x, w = contract(ledger, x, 2, w, 1)
    parts = []
    for lab, dims in ((x, {0: 0, 1: 1}), (w, {0: 0, 2: 2})):
        features, fixed = carried(lab.features, dims, 3), carried(lab.fixed, dims, 3)
        parts.append(Labels(call.result.shape, tuple(features), tuple(fixed), lab.kind))
    produce(ledger, w, x, parts[1].features)
    produce(ledger, x, w, parts[0].features)
    product = join(ledger, parts, tuple(call.result.shape))
    return add_bias(ledger, product, call.labels("self")) if added else product


@rule("embedding")
def _embedding(call: Call) -> Labels:
    w, ids = call.labels("weight"), call.labels("indices")
    shape = tuple(call.result.shape)
    call.ledger.pin([s for s in w.features if 0 in support(s)], "rows are chosen by the input")
    n = len(ids.shape)
    made = carried(w.features, {1: n}, n + 1)
    call.ledger.produced.extend((s.reshape(-1).numpy(), call.ledger.node) for s in made)
    places = carried(ids.fixed, {d: d for d in range(n)}, n + 1)
    return Labels(shape, tuple(made), tuple(places), Kind.DATA)
