"""Contraction: sums of products over an axis, which read one feature space and make another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import (
    Kind,
    Labels,
    broadcast,
    placed,
    positions,
    project,
    support,
)
from zipfx.analysis.labels.records import Contraction
from zipfx.analysis.rules.call import Call, aten, carried, first, rule
from zipfx.analysis.rules.pointwise import join, meet, not_elementwise, reduce


def contract(
    constraints: Constraints,
    x: Labels,
    w: Labels,
    dims: tuple[dict[int, int], dict[int, int]],
    k: int,
) -> Labels:
    """x times w, summed over k: a pointwise product in a common frame, then a symmetric sum.

    dims: where the dimensions of x and of w lie in the frame. Returns labels in the frame, which
    no longer vary along k.
    """
    ndim = 1 + max(*dims[0].values(), *dims[1].values())
    framed = [placed(lab, at, ndim) for lab, at in zip((x, w), dims, strict=True)]
    shared = set(dims[0].values()) & set(dims[1].values())
    left, right = (
        _parted(constraints, lab, other, shared - {k}, k) for lab, other in (framed, framed[::-1])
    )
    for lab, other in ((left, right), (right, left)):
        for slot in lab.fixed:
            if k in support(slot):
                seen = project(slot, support(slot) & shared)
                for f in other.features:
                    if k in support(f):
                        constraints.colour(*broadcast(f, seen))
    _note_reading(constraints, left, right, k)
    slots = _product(constraints, left, right)
    fixed = (*left.fixed, *right.fixed)
    shape = list(torch.broadcast_shapes(left.shape, right.shape))
    shape[k] = 1
    return Labels(tuple(shape), *reduce(constraints, slots, {k}, fixed), max(x.kind, w.kind))


def _parted(constraints: Constraints, w: Labels, x: Labels, shared: set[int], k: int) -> Labels:
    """A stack of matrices: a weight has features of its own for every index of a shared dimension.

    Likewise where two of its axes are read, or made, as one (an expert and its hidden units).
    """
    if w.kind != Kind.WEIGHT or x.kind != Kind.DATA:
        return w
    stack = [s for s in w.features if support(s) <= shared]
    stack.sort(key=lambda s: not support(s))  # heads come before the one layer that w[0] is
    read = [s for s in w.features if k in support(s)]
    made = [s for s in w.features if k not in support(s) and not support(s) <= shared]
    found = list(stack)
    for group in (read, made):
        group.sort(key=lambda s: int(s.max()))  # the axes of a parameter are numbered in order
        base = stack or (group[:1] if len(group) > 1 else [])
        for slot in group:
            own = constraints.parted(slot, base[0]) if base and slot is not base[0] else None
            found += [slot] if own is None else constraints.relate(own, base[0], weights_only=True)
    produce(
        constraints, w, x, [s for s in found if k not in support(s) and not support(s) <= shared]
    )
    return replace(w, features=tuple(found))


def _product(constraints: Constraints, left: Labels, right: Labels) -> list[Tensor]:
    """The slots of a product; a weight that meets data here is read, not elementwise."""
    slots = [(s, left.kind) for s in left.features]
    with not_elementwise(constraints):
        slots = meet(constraints, slots, right.features, right.kind, (*left.fixed, *right.fixed))
    return [s for s, _ in slots]


def _note_reading(constraints: Constraints, left: Labels, right: Labels, k: int) -> None:
    weight, other = (right, left) if right.kind == Kind.WEIGHT else (left, right)
    read, met = ([s for s in lab.features if k in support(s)] for lab in (weight, other))
    if weight.kind != Kind.WEIGHT:
        constraints.trait("mixes")  # two activations, as in attention
        constraints.bilinear.extend(
            (torch.unique(s).numpy(), constraints.node) for s in (*read, *met)
        )
    elif other.kind == Kind.WEIGHT:  # the right factor is applied first: the left one reads
        ids = (met or [torch.zeros(1, dtype=torch.int64)])[0].reshape(-1).numpy()
        constraints.contractions.append(Contraction(ids, (ids * 0,), -1))
    elif read or met:
        note_reading(constraints, (read or [torch.zeros(1, dtype=torch.int64)])[0], met)


def note_reading(constraints: Constraints, read: Tensor, met: Sequence[Tensor]) -> None:
    """A weight with labels `read` along its axis reads data with the slots `met`."""
    shape = torch.broadcast_shapes(read.shape, *(s.shape for s in met))
    flat = [s.expand(shape).reshape(-1).numpy() for s in (read, *met)]
    constraints.contractions.append(Contraction(flat[0], tuple(flat[1:]), constraints.node))


def produce(constraints: Constraints, w: Labels, x: Labels, slots: Sequence[Tensor]) -> None:
    """These axes of a weight make features of data."""
    if w.kind == Kind.WEIGHT and x.kind == Kind.DATA:
        constraints.make(slots)


def _linear(call: Call, x: Labels, w: Labels, kw: int, bias: Labels | None) -> Labels:
    """x (..., k) times w (k at dim kw of two) gives (..., n)."""
    constraints, n = call.constraints, len(x.shape) - 1
    # the frame is (..., n, k)
    product = contract(
        constraints, x, w, ({d: d for d in range(n)} | {n: n + 1}, {1 - kw: n, kw: n + 1}), n + 1
    )
    product = without(product, n + 1, tuple(first(call.result).shape))
    return product if bias is None else add_bias(constraints, product, bias)


def without(lab: Labels, dim: int, shape: tuple[int, ...]) -> Labels:
    """Labels that do not vary along `dim`, which is dropped."""
    features, fixed = (tuple(s.squeeze(dim) for s in slots) for slots in (lab.features, lab.fixed))
    return Labels(shape, features, fixed, lab.kind)


def add_bias(constraints: Constraints, product: Labels, bias: Labels) -> Labels:
    """A bias belongs to what makes the features: it does not meet features of the input."""
    with not_elementwise(constraints):
        return join(constraints, [product, bias], product.shape)


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


@rule("mv", "addmv", "dot", "vdot")
def _mv(call: Call) -> Labels:
    added = "addmv" in str(call.op)
    names = ("mat" if added else "self", "vec" if "mv" in str(call.op) else _OTHER[call.op])
    x, w = (call.labels(n) for n in names)
    k = len(x.shape) - 1
    product = contract(call.constraints, x, w, ({d: d for d in range(k + 1)}, {0: k}), k)
    product = without(product, k, tuple(call.result.shape))
    return add_bias(call.constraints, product, call.labels("self")) if added else product


_OTHER = {aten.dot.default: "tensor", aten.vdot.default: "other"}


@rule("addr")
def _outer(call: Call) -> Labels:
    """The product of every entry of one vector with every one of another."""
    at = {"vec1": 0, "vec2": 1}
    factors = [placed(call.labels(name), {0: d}, 2) for name, d in at.items()]
    return join(call.constraints, [*factors, call.labels("self")], tuple(call.result.shape))


@rule("bmm", "baddbmm", "addbmm")
def _bmm(call: Call) -> Labels:
    """(b, n, k) times (b, k, m) gives (b, n, m), of which addbmm takes the sum."""
    added, summed = (
        "add" in str(call.op),
        "addbmm" in str(call.op) and "baddbmm" not in str(call.op),
    )
    names = ("batch1", "batch2") if added else ("self", "mat2")
    x, w = (call.labels(name) for name in names)
    constraints, (b, n, m) = call.constraints, (*x.shape[:2], w.shape[2])
    frame = {0: 0, 1: 1, 2: 3}, {0: 0, 2: 2, 1: 3}
    product = without(contract(constraints, x, w, frame, 3), 3, (b, n, m))
    if summed:
        slots = reduce(constraints, product.features, {0}, product.fixed)
        product = without(Labels((1, n, m), *slots, product.kind), 0, (n, m))
    return add_bias(constraints, product, call.labels("self")) if added else product


@rule("_trilinear")
def _bilinear(call: Call) -> Labels:
    """A product of three, each with dimensions inserted, summed over some of the dimensions."""
    constraints, operands = call.constraints, []
    ndim = call.arg("i1").ndim + len(call.arg("expand1"))
    for i in (1, 2, 3):
        inserted = set(call.arg(f"expand{i}"))
        at = dict(enumerate(d for d in range(ndim) if d not in inserted))
        operands.append(placed(call.labels(f"i{i}"), at, ndim))
    summed = set(call.arg("sumdim"))
    shapes = torch.broadcast_shapes(*(o.shape for o in operands))
    for o in operands:
        if o.kind == Kind.WEIGHT:
            made = [s for s in o.features if not support(s) & summed]
            constraints.make(made)
            for s in (s for s in o.features if support(s) & summed):
                met = [f for other in operands if other is not o for f in other.features]
                note_reading(constraints, s, [f for f in met if support(f) == support(s)])
    product = join(constraints, operands, shapes)
    constraints.trait("mixes")
    left = Labels(
        shapes, *reduce(constraints, product.features, summed, product.fixed), product.kind
    )
    keep = {d: i for i, d in enumerate(d for d in range(ndim) if d not in summed)}
    return placed(left, keep, len(keep))


@rule("embedding")
def _embedding(call: Call) -> Labels:
    w, ids = call.labels("weight"), call.labels("indices")
    shape = tuple(call.result.shape)
    call.constraints.pin([s for s in w.features if 0 in support(s)], "rows are chosen by the input")
    n = len(ids.shape)
    made = carried(w.features, {1: n}, n + 1)
    call.constraints.make(made)
    places = carried(ids.fixed, {d: d for d in range(n)}, n + 1)
    return Labels(shape, tuple(made), tuple(places), Kind.DATA)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: Call) -> tuple[Labels, ...]:
    """Rows chosen by the input, of which every bag makes one."""
    w, ids, constraints = call.labels("weight"), call.labels("indices"), call.constraints
    constraints.pin([s for s in w.features if 0 in support(s)], "rows are chosen by the input")
    if call.arg("per_sample_weights") is not None:
        constraints.pin(
            call.labels("per_sample_weights").features, "weighs rows chosen by the input"
        )
    made = carried(w.features, {1: 1}, 2)
    constraints.make(made)
    shapes = [tuple(t.shape) for t in call.result]
    bags = Labels(shapes[0], tuple(made), positions(shapes[0], [0]), Kind.DATA)
    return (bags, *(Labels(s, (), positions(s), ids.kind) for s in shapes[1:]))
