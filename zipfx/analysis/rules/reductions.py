"""Reductions, norms and softmax: what takes the features of an axis together.

Taken together over a whole axis, features stay exchangeable; over a part of it they become blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Labels, beyond, narrow, place, placed, positions, support
from zipfx.analysis.rules.call import Call, carried, first, pinned_along, rule
from zipfx.analysis.rules.pointwise import join, reduce, told


def _normalise(
    call: Call, x: Labels, taken: Labels, params: Sequence[tuple[Tensor | None, int]]
) -> Labels:
    """Every element meets what it is normalised with, then per-feature parameters.

    So a label that lies in several groups is told apart in each of them, and the zeros that pad a
    row become features of the row. Groups that coordinates tell apart need no more.

    taken: what is left of x when all that is normalised together is; params: parameters with the
    dimension of x at which their own first dimension lies.
    """
    known = {id(s) for s in (*x.features, *x.fixed)}
    features, fixed = (
        tuple(s for s in slots if id(s) not in known) for slots in (taken.features, taken.fixed)
    )
    features = tuple(s for s in features if not told(x.fixed, support(s), s))
    # features belong to groups, not groups to features: the groups come first
    operands, ndim = [replace(taken, features=features, fixed=fixed), x], len(x.shape)
    for t, at in params:
        if t is not None:
            lab = call.of(t)
            operands.append(placed(lab, {i: at + i for i in range(len(lab.shape))}, ndim))
    return join(call.constraints, operands, x.shape)


def together(constraints: Constraints, x: Labels, dims: set[int]) -> Labels:
    """Features are taken together over `dims`: symmetric if all of an axis takes part, else blocks.

    Returns what is left after a reduction over `dims`: the blocks, and features that lie elsewhere.
    """
    if any(support(slot) & dims for slot in x.features):
        constraints.trait("mixes")
    features, fixed = reduce(constraints, x.features, dims, x.fixed)
    return replace(x, features=features, fixed=fixed)


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
    "batch_norm",
    "_native_batch_norm_legit.no_stats",
    "_batch_norm_no_update",
)
def _batch_norm(call: Call) -> tuple[Labels, ...]:
    x = call.labels("input")
    names = ("weight", "bias", "running_mean", "running_var")
    params = [(call.arg(n), 1) for n in names]
    variance = call.arg("running_var")
    if variance is not None:
        call.constraints.variances.update(_names(call.constraints, call.of(variance)))
    y = _normalise(call, x, x, params)
    return (y, *_rest(call))


def _names(constraints: Constraints, lab: Labels) -> set[tuple[str, int]]:
    axes = (constraints.axis(s) for s in lab.features)
    return {(axis.name, constraints.node) for axis in axes if axis is not None}


def _rest(call: Call) -> list[Labels]:
    """Side results (saved statistics): nothing downstream reads them in eval mode."""
    results = [t for t in tree_leaves(call.result) if isinstance(t, Tensor)][1:]
    return [Labels(tuple(t.shape), (), positions(tuple(t.shape))) for t in results]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Call) -> Any:
    x = call.labels("input")
    first = len(x.shape) - len(call.arg("normalized_shape"))
    params = [(call.arg(n), first) for n in ("weight", "bias")]
    taken = together(call.constraints, x, set(range(first, len(x.shape))))
    y = _normalise(call, x, taken, params)
    return (y, *_rest(call)) if isinstance(call.result, tuple) else y


@rule("native_group_norm")
def _group_norm(call: Call) -> tuple[Labels, ...]:
    x, groups = call.labels("input"), int(call.arg("group"))
    size = x.shape[1] // groups

    def split(s: Tensor) -> Tensor:
        return narrow(s.unflatten(1, (groups, size)) if s.shape[1] > 1 else s.unsqueeze(1))

    def whole(s: Tensor) -> Tensor:
        s = s.squeeze(2)
        return s.repeat_interleave(size, 1) if s.shape[1] > 1 else s

    parts = _each(split, x, (x.shape[0], groups, size, *x.shape[2:]))
    taken = together(call.constraints, parts, set(range(2, len(parts.shape))))
    params = [(call.arg(n), 1) for n in ("weight", "bias")]
    return (_normalise(call, x, _each(whole, taken, x.shape), params), *_rest(call))


def _each(change: Callable[[Tensor], Tensor], lab: Labels, shape: tuple[int, ...]) -> Labels:
    features, fixed = (tuple(map(change, slots)) for slots in (lab.features, lab.fixed))
    return replace(lab, shape=shape, features=features, fixed=fixed)


@rule(
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    *"cumsum cumprod cummax cummin".split(),
    "logcumsumexp",
)
def _softmax(call: Call) -> Labels | tuple[Labels, ...]:
    x = call.of(call.arg("self"))
    dim = int(call.arg("dim")) % max(1, len(x.shape))
    if "cum" in str(call.op):
        call.constraints.pin([s for s in x.features if dim in support(s)], f"{call.op} is ordered")
        x = replace(x, fixed=(*x.fixed, *positions(x.shape, [dim])))
    y = _normalise(call, x, together(call.constraints, x, {dim}), ())
    return (y, y) if isinstance(call.result, tuple) else y


@rule("renorm")
def _renorm(call: Call) -> Labels:
    """Every slice is divided by its norm, if that is too large."""
    x = call.labels("self")
    dim = int(call.arg("dim")) % len(x.shape)
    return _normalise(call, x, together(call.constraints, x, set(range(len(x.shape))) - {dim}), ())


@rule("trace")
def _trace(call: Call) -> Labels:
    """The sum of a diagonal, whose entries have a row and a column each."""
    x, n = call.labels("self"), min(call.arg("self").shape)
    features, fixed = (
        tuple(narrow(s.expand(x.shape).diagonal().clone()) for s in slots)
        for slots in (x.features, x.fixed)
    )
    diagonal = join(call.constraints, [Labels((n,), features, fixed, x.kind)], (n,))
    y = together(call.constraints, diagonal, {0})
    return Labels((), tuple(s.squeeze(0) for s in y.features), (), x.kind)


@rule(
    "mean",
    "mean.dim",
    "sum",
    "sum.dim_IntList",
    "amax",
    "amin",
    "max",
    "min",
    "max.dim",
    "min.dim",
    "var.correction",
    "std.correction",
    "var_mean.correction",
    "linalg_vector_norm",
    "norm.ScalarOpt_dim",
    "norm.Scalar",
    "prod",
    "prod.dim_int",
    "logsumexp",
    "any",
    "any.dim",
    "all",
    "all.dim",
    "any.dims",
    "all.dims",
    "argmax",
    "argmin",
    "median",
    "median.dim",
    "nanmedian",
    "nanmedian.dim",
    "kthvalue",
    "mode",
    "std_mean.correction",
    "nansum",
    "aminmax",
    "count_nonzero",
    "count_nonzero.dim_IntList",
)
def _reduce(call: Call) -> Any:
    x = call.of(call.tensors()[0])
    dim = call.arg("dim")
    dims = [dim] if isinstance(dim, int) else (list(dim) if dim else range(len(x.shape)))
    reduced = {d % max(1, len(x.shape)) for d in dims}
    held = tuple(s for s in x.features if support(s) & reduced)
    if "arg" in str(call.op):
        call.constraints.pin(held, f"{call.op} gives the index of a feature")
    x = together(call.constraints, x, reduced)
    keep = sorted(set(range(len(x.shape))) - reduced)
    same = bool(call.arg("keepdim", False))
    out = {d: (d if same else i) for i, d in enumerate(keep)}
    ndim = len(x.shape) if same else len(keep)
    shape = tuple(first(call.result).shape)
    fixed = [place(s, out, ndim) for s in beyond(x.fixed, reduced)]
    y = Labels(shape, tuple(carried(x.features, out, ndim)), tuple(fixed), x.kind)
    if not isinstance(call.result, tuple):
        return y
    named = [r.name for r in call.op._schema.returns]
    return tuple(replace(y, pending=held) if name == "indices" else y for name in named)


@rule("sort", "sort.stable", "topk")
def _sort(call: Call) -> tuple[Labels, ...]:
    """All of an axis taken together; what comes out are ranks."""
    x = call.labels("self")
    dim = int(call.arg("dim")) % max(1, len(x.shape))
    held = tuple(s for s in x.features if dim in support(s))
    x, shape = together(call.constraints, x, {dim}), tuple(first(call.result).shape)
    ranks = positions(shape, [dim])
    y = Labels(shape, x.features, (*beyond(x.fixed, {dim}), *ranks), x.kind)
    return y, replace(y, pending=held)


@rule("_pdist_forward")
def _distances(call: Call) -> Labels:
    """Of every two rows, one after the other."""
    x, shape = call.labels("self"), tuple(call.result.shape)
    x = pinned_along(call.constraints, x, {0}, "rows are compared in pairs, in their order")
    together(call.constraints, x, {1})
    return Labels(shape, (), positions(shape), x.kind)


@rule("_euclidean_dist", "_cdist_forward")
def _distance(call: Call) -> Labels:
    """(..., n, k) and (..., m, k) give (..., n, m): met one by one, then summed over k."""
    x, y = (call.labels(n) for n in ("x1", "x2"))
    n, operands = len(x.shape) + 1, []
    for lab, at in ((x, n - 3), (y, n - 2)):
        dims = {d: d for d in range(n - 3)} | {n - 3: at, n - 2: n - 1}
        operands.append(placed(lab, dims, n))
    shape = (*call.result.shape, x.shape[-1])
    z = together(call.constraints, join(call.constraints, operands, shape), {n - 1})
    fixed = tuple(s.squeeze(-1) for s in beyond(z.fixed, {n - 1}))
    return Labels(shape[:-1], tuple(s.squeeze(-1) for s in z.features), fixed, z.kind)
