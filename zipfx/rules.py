"""Rules: how labels pass through the few operations that compute.

Views and in-place writes need no rule (see `shadow`), data movement is the same operation run on
the labels, pointwise operations carry `torch.Tag.pointwise`.  What is left is here: contractions,
convolutions, norms, poolings, reductions and softmax.  An operation without a rule pins what it
touches and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zipfx.labels import (
    Contraction,
    Kind,
    Labels,
    Ledger,
    as_fixed,
    mix,
    narrow,
    place,
    positions,
    project,
    support,
    vector,
)

aten = torch.ops.aten
Lookup = Callable[[Tensor], Labels]


@dataclass(frozen=True)
class Call:
    """One aten call: its arguments bound by name, its result, and the labels of its tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ledger: Ledger
    of: Lookup

    def arg(self, name: str, default: Any = None) -> Any:
        for i, a in enumerate(self.op._schema.arguments):
            if a.name == name:
                if i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, a.default_value if a.has_default_value() else default)
        return default

    def labels(self, name: str) -> Labels:
        return self.of(self.arg(name))

    def tensors(self) -> list[Tensor]:
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]


Rule = Callable[[Call], "Labels | tuple[Labels, ...]"]
RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten overloads by name (names this torch does not have are skipped)."""

    def register(function: Rule) -> Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None:
                RULES[op] = function
        return function

    return register


# ------------------------------------------------------------------ pointwise
def join(ledger: Ledger, operands: Sequence[Labels], shape: Sequence[int]) -> Labels:
    """Labels of a pointwise result: broadcast, then unify features and colour what meets them."""
    ndim = len(shape)
    kind = max((o.kind for o in operands), default=Kind.CONSTANT)
    features: list[tuple[Tensor, Kind]] = []
    fixed: list[Tensor] = []
    for operand in operands:
        aligned = {i: i + ndim - len(operand.shape) for i in range(len(operand.shape))}
        mine = [_align(slot, aligned, ndim) for slot in operand.features]
        features = _meet(ledger, features, mine, operand.kind)
        for slot in (_align(slot, aligned, ndim) for slot in operand.fixed):
            fixed = _meet_fixed(fixed, slot)
    slots = tuple(slot for slot, _ in features)
    ledger.entangle(slots, fixed)
    return Labels(tuple(shape), slots, tuple(fixed), kind)


def _align(slot: Tensor, dims: dict[int, int], ndim: int) -> Tensor:
    return slot if slot.ndim == ndim else place(slot, dims, ndim)


def _meet(
    ledger: Ledger, ours: list[tuple[Tensor, Kind]], theirs: list[Tensor], kind: Kind
) -> list[tuple[Tensor, Kind]]:
    result = list(ours)
    for slot in theirs:
        hits = [i for i, (f, _) in enumerate(ours) if support(f) & support(slot)]
        same = [i for i in hits if ours[i][0] is slot or _equal(ours[i][0], slot)]
        crowd = [s for s in theirs if any(support(s) & support(ours[i][0]) for i in hits)]
        if same:
            continue
        if not hits:
            result.append((slot, kind))
        elif len(hits) == 1 and len(crowd) == 1:
            other, other_kind = ours[hits[0]]
            if {kind, other_kind} == {Kind.WEIGHT, Kind.DATA}:
                ledger.trait("elementwise")
            only = kind == other_kind == Kind.WEIGHT
            union = ledger.unify(other, slot, weights_only=only)
            result[hits[0]] = (union, max(kind, other_kind))
        else:
            ledger.pin([slot, *(ours[i][0] for i in hits)], "features of several axes on one axis")
    return result


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _meet_fixed(ours: list[Tensor], slot: Tensor) -> list[Tensor]:
    for i, other in enumerate(ours):
        if other is slot or _equal(other, slot):
            return ours
        if support(other) == support(slot):
            u, v = torch.broadcast_tensors(other, slot)
            h = mix(mix(u.numpy()).view("int64") ^ v.numpy())
            both = torch.where(u == 0, v, torch.where((v == 0) | (u == v), u, as_fixed(h)))
            return [*ours[:i], both, *ours[i + 1 :]]
    return [*ours, slot]


def pointwise(call: Call) -> Labels:
    operands = [call.of(t) for t in call.tensors()]
    return join(call.ledger, operands, tuple(_first(call.result).shape))


def _first(result: Any) -> Tensor:
    return next(t for t in tree_leaves(result) if isinstance(t, Tensor))


# ------------------------------------------------------------------ data movement
def movement(call: Call) -> Labels:
    """Run the operation itself on the slots; slots of several operands are moved together."""
    shape = tuple(_first(call.result).shape)
    operands = [(t, call.of(t)) for t in {id(t): t for t in call.tensors()}.values()]
    moved = [(t, lab) for t, lab in operands if not _is_index(call, t)]
    kind = max((lab.kind for _, lab in operands), default=Kind.CONSTANT)
    features = _move(call, moved, feature=True)
    fixed = _move(call, moved, feature=False)
    call.ledger.entangle(features, fixed)
    return Labels(shape, features, fixed, kind)


def _is_index(call: Call, t: Tensor) -> bool:
    indices = tree_leaves((call.arg("indices"), call.arg("index")))
    return any(t is i for i in indices)


def _move(call: Call, moved: list[tuple[Tensor, Labels]], *, feature: bool) -> tuple[Tensor, ...]:
    families: dict[frozenset[int], dict[int, Tensor]] = {}
    for t, lab in moved:
        slots = lab.features if feature else lab.fixed
        for slot in slots:
            key = support(slot)
            while id(t) in families.get(key, {}):  # a second slot of this shape
                key = key | {-1 - len(key)}
            families.setdefault(key, {})[id(t)] = slot
    if not feature and len(moved) > 1:
        families = _tell_operands_apart(call, moved, families)
    result = []
    for family in families.values():
        slot = narrow(_run_on(call, family))
        if bool(slot.any()):
            result.append(slot)
    return tuple(result)


def _tell_operands_apart(
    call: Call, moved: list[tuple[Tensor, Labels]], families: dict[frozenset[int], dict[int, Tensor]]
) -> dict[frozenset[int], dict[int, Tensor]]:
    """Joined tensors differ from one another along the axis of joining (cat, stack, ...).

    Where an operand has features there, they say so; a uniform constant is told by its value.
    """
    dim = call.arg("dim", 0) % max(1, _first(call.result).ndim)
    names: dict[int, Tensor] = {}
    for i, (t, lab) in enumerate(moved):
        varies = any(dim in support(s) for s in (*lab.features, *lab.fixed))
        if varies and call.op is not aten.stack.default:
            continue
        if lab.kind == Kind.CONSTANT and t.numel() and not lab.fixed:
            value = float(t.reshape(-1)[0])
            name = as_fixed(mix([hash(value)])) if value else torch.zeros(1, dtype=torch.int64)
        else:
            name = as_fixed(mix([i + 1]))
        names[id(t)] = name.reshape([1] * t.ndim)
    return {**families, frozenset({-99}): names} if names else families


def _run_on(call: Call, family: dict[int, Tensor]) -> Tensor:
    def swap(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if id(a) in family:
            return family[id(a)].expand(a.shape)
        if _is_index(call, a):
            return a.cpu()
        return torch.zeros((), dtype=torch.int64).expand(a.shape)

    args, kwargs = tree_map(swap, (call.args, call.kwargs))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout")}
    if call.op is aten.constant_pad_nd.default:  # the padding is one coordinate, none if zero
        value = call.arg("value")
        args = (*args[:2], int(as_fixed(mix([hash(float(value))]))) if value else 0)
    moved: Tensor = call.op(*args, **kwargs)
    return moved


MOVEMENT = {
    op
    for name in (
        "cat stack constant_pad_nd index index_select gather roll flip repeat clone im2col "
        "pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d upsample_nearest1d upsample_nearest2d "
        "repeat_interleave slice_scatter select_scatter diagonal_scatter lift_fresh_copy tril triu "
        "_reshape_copy _unsafe_view rot90 tile take_along_dim _unsafe_index"
    ).split()
    for op in (
        getattr(getattr(aten, name, None), o, None)
        for o in getattr(getattr(aten, name, None), "overloads", list)()
    )
    if op is not None and not str(op).endswith(("out", "Tensor_Scalar"))
}
IDENTITY = {aten._to_copy.default, aten.lift_fresh.default, aten.lift.default}
UNIFORM = {
    op
    for name in (
        "new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like full_like "
        "empty_like"
    ).split()
    for op in [getattr(aten, name).default]
}
#: pointwise, but without the tag
ALSO_POINTWISE = {
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("hardswish", "default"),
        ("hardswish_", "default"),
        ("_prelu_kernel", "default"),
        ("native_dropout", "default"),
        ("nan_to_num", "default"),
        ("log_sigmoid_forward", "default"),
        ("rrelu_with_noise", "default"),
    )
}


# ------------------------------------------------------------------ contractions
def carried(slots: Sequence[Tensor], dims: dict[int, int], ndim: int) -> list[Tensor]:
    """The slots that live only on `dims` (old -> new), at their place in the result."""
    return [place(s, dims, ndim) for s in slots if support(s) <= set(dims) and support(s)]


def contract(ledger: Ledger, x: Labels, kx: int, w: Labels, kw: int) -> tuple[Labels, Labels]:
    """Dimension kx of x is multiplied with kw of w and summed: one feature space, read by w.

    Returns x and w with features that share the summed axis with others made into blocks.
    """
    x, w = _blocks(ledger, x, kx, w, kw), _blocks(ledger, w, kw, x, kx)
    vx, vw = ([vector(s, k) for s in lab.features if support(s) == {k}]
              for lab, k in ((x, kx), (w, kw)))  # fmt: skip
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
        pair = torch.broadcast_tensors((read or [one])[0], (met or [one])[0])
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
    shape = tuple(_first(call.result).shape)
    product = Labels(
        shape,
        (*carried(x.features, keep, ndim), *made),
        (*carried(x.fixed, keep, ndim), *carried(w.fixed, {1 - kw: ndim - 1}, ndim)),
        max(x.kind, w.kind),
    )
    return product if bias is None else _add_bias(ledger, product, bias)


def _add_bias(ledger: Ledger, product: Labels, bias: Labels) -> Labels:
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
        call, call.labels("input"), call.labels("weight"), 1, None if bias is None else call.of(bias)
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
    return _add_bias(ledger, product, call.labels("self")) if added else product


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution")
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
    b = Labels((shape[1], *[1] * (ndim - 2)), *(
        tuple(place(s, {0: 0}, ndim - 1) for s in slots) for slots in (b.features, b.fixed)
    ), b.kind)  # fmt: skip
    return _add_bias(ledger, product, b)


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


def _depthwise(
    ledger: Ledger, x: Labels, w: Labels, made: list[Tensor], multiplier: int
) -> Tensor:
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


# ------------------------------------------------------------------ norms
def _normalise(call: Call, x: Labels, dims: set[int], params: Sequence[tuple[Tensor | None, int]],
               ) -> Labels:  # fmt: skip
    """Features normalised together stay exchangeable if all of them are; then per-feature affine.

    params: parameters with the dimension of x at which their own first dimension lies.
    """
    ledger, ndim = call.ledger, len(x.shape)
    if dims:
        together(ledger, x, dims)
    operands = [x]
    for t, at in params:
        if t is not None:
            lab = call.of(t)
            shape = tuple([1] * at + list(lab.shape) + [1] * (ndim - at - len(lab.shape)))
            dims_of = {i: at + i for i in range(len(lab.shape))}
            f, p = (tuple(place(s, dims_of, ndim) for s in g) for g in (lab.features, lab.fixed))
            operands.append(Labels(shape, f, p, lab.kind))
    return join(ledger, operands, x.shape)


def together(ledger: Ledger, x: Labels, dims: set[int]) -> Labels:
    """Features are taken together over `dims`: symmetric if all of an axis takes part, else blocks.

    Returns x with blocks in the place of their features.
    """
    reason = "an operation takes a part of the features together: blocks keep their inner order"
    slots = []
    for slot in x.features:
        if support(slot) & dims:
            ledger.trait("mixes")
            if not support(slot) <= dims:
                slot = ledger.collapse(slot, dims, reason)
        slots.append(slot)
    return replace(x, features=tuple(slots))


@rule(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "batch_norm",
    "_native_batch_norm_legit.no_stats", "_batch_norm_no_update",
)  # fmt: skip
def _batch_norm(call: Call) -> tuple[Labels, ...]:
    x = call.labels("input")
    names = ("weight", "bias", "running_mean", "running_var")
    params = [(call.arg(n), 1) for n in names]
    variance = call.arg("running_var")
    if variance is not None:
        call.ledger.variances.update(_names(call.ledger, call.of(variance)))
    y = _normalise(call, x, set(), params)
    return (y, *_rest(call))


def _names(ledger: Ledger, lab: Labels) -> set[tuple[str, int]]:
    starts = {int(s.reshape(-1)[0]) for s in lab.features if s.numel()}
    return {(name, ledger.node) for name, _, start, _ in ledger.axes if start in starts}


def _rest(call: Call) -> list[Labels]:
    """Side results (saved statistics): nothing downstream reads them in eval mode."""
    results = [t for t in tree_leaves(call.result) if isinstance(t, Tensor)][1:]
    return [Labels(tuple(t.shape), (), positions(tuple(t.shape))) for t in results]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Call) -> Any:
    x = call.labels("input")
    first = len(x.shape) - len(call.arg("normalized_shape"))
    params = [(call.arg(n), first) for n in ("weight", "bias")]
    y = _normalise(call, x, set(range(first, len(x.shape))), params)
    return (y, *_rest(call)) if isinstance(call.result, tuple) else y


@rule("native_group_norm")
def _group_norm(call: Call) -> tuple[Labels, ...]:
    x, groups = call.labels("input"), int(call.arg("group"))
    channels = x.shape[1]
    if 1 < groups < channels:  # features stay exchangeable inside their group
        group = torch.arange(channels) // (channels // groups) + 1
        for slot in x.features:
            if 1 in support(slot):
                call.ledger.trait("mixes")
                u, v = torch.broadcast_tensors(slot, place(group, {0: 1}, slot.ndim))
                call.ledger.colour(u, v, f"group norm with {groups} groups (blocks)")
    dims = set(range(1 if groups < channels else 2, len(x.shape)))
    y = _normalise(call, x, dims, [(call.arg(n), 1) for n in ("weight", "bias")])
    return (y, *_rest(call))


# ------------------------------------------------------------------ softmax, reductions, pooling
@rule("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "logcumsumexp")
def _softmax(call: Call) -> Labels:
    x = call.of(call.arg("self"))
    dim = int(call.arg("dim")) % max(1, len(x.shape))
    if "cum" in str(call.op):
        call.ledger.pin([s for s in x.features if dim in support(s)], f"{call.op} is ordered")
    together(call.ledger, x, {dim})
    return x


@rule(
    "mean", "mean.dim", "sum", "sum.dim_IntList", "amax", "amin", "max", "min", "max.dim", "min.dim",
    "var.correction", "std.correction", "var_mean.correction", "linalg_vector_norm", "norm.ScalarOpt_dim",
    "norm.Scalar", "prod", "prod.dim_int", "logsumexp", "any", "any.dim", "all", "all.dim", "any.dims",
    "all.dims", "argmax", "argmin", "median", "median.dim",
)  # fmt: skip
def _reduce(call: Call) -> Any:
    x = call.of(call.tensors()[0])
    dim = call.arg("dim")
    dims = [dim] if isinstance(dim, int) else (list(dim) if dim else range(len(x.shape)))
    reduced = {d % max(1, len(x.shape)) for d in dims}
    x = together(call.ledger, x, reduced)
    if "arg" in str(call.op):
        chosen = [s for s in x.features if support(s) & reduced]
        call.ledger.pin(chosen, f"{call.op} gives the index of a feature")
    keep = sorted(set(range(len(x.shape))) - reduced)
    same = bool(call.arg("keepdim", False))
    out = {d: (d if same else i) for i, d in enumerate(keep)}
    ndim = len(x.shape) if same else len(keep)
    shape = tuple(_first(call.result).shape)
    fixed = [place(project(s, keep), out, ndim) for s in x.fixed if support(s) & set(keep)]
    y = Labels(shape, tuple(carried(x.features, out, ndim)), tuple(fixed), x.kind)
    return (y,) * len(call.result) if isinstance(call.result, tuple) else y


@rule(
    "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d",
    "upsample_bilinear2d.vec", "upsample_bicubic2d.vec", "upsample_linear1d.vec",
    "upsample_nearest2d.vec", "upsample_nearest1d.vec", "upsample_nearest2d", "upsample_nearest1d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_trilinear3d.vec",
)  # fmt: skip
def _pool(call: Call) -> Any:
    """Local operations on the trailing (spatial) dims of (N, C, ...): channels pass, pixels are new."""
    x = call.of(call.tensors()[0])
    ndim = len(x.shape)
    spatial = set(range(2 if ndim > 2 else 1, ndim))
    x = slide(call.ledger, x, spatial)
    shape = tuple(_first(call.result).shape)
    keep = {d: d for d in range(ndim) if d not in spatial}
    y = Labels(
        shape,
        tuple(carried(x.features, keep, ndim)),
        (*carried(x.fixed, keep, ndim), *positions(shape, spatial)),
        x.kind,
    )
    return (y,) * len(call.result) if isinstance(call.result, tuple) else y


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> tuple[Labels, ...]:
    """Direction over its norm, times magnitude: symmetric in all that the norm sums over."""
    v, g = call.labels("v"), call.labels("g")
    y = join(call.ledger, [v, g], v.shape)
    return y, replace(g, kind=y.kind)


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


@rule("glu")
def _glu(call: Call) -> Labels:
    x = call.labels("self")
    dim = int(call.arg("dim")) % len(x.shape)
    half = x.shape[dim] // 2
    halves = []
    for start in (0, half):
        cut = [
            tuple(s.narrow(dim, start, half) if s.shape[dim] != 1 else s for s in group)
            for group in (x.features, x.fixed)
        ]
        shape = tuple(half if d == dim else n for d, n in enumerate(x.shape))
        halves.append(Labels(shape, cut[0], cut[1], x.kind))
        call.ledger.event(halves[-1].features, len(halves))
    return join(call.ledger, halves, halves[0].shape)


def opaque(call: Call) -> None:
    """What is not understood pins everything it touches."""
    for t in call.tensors():
        call.ledger.pin(call.of(t).features, f"{call.op} is not understood")
