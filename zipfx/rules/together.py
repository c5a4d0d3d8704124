"""Norms, softmax and reductions: what takes the features of an axis together.

Taken together over a whole axis, features stay exchangeable; over a part of it they become blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.labels import Labels, beyond, place, placed, positions, support
from zipfx.ledger import Ledger
from zipfx.rules.call import Call, carried, first, rule
from zipfx.rules.pointwise import join, reduce


def _normalise(
    call: Call,
    x: Labels,
    dims: set[int],
    params: Sequence[tuple[Tensor | None, int]],
) -> Labels:
    """Features normalised together stay exchangeable if all of them are; then per-feature affine.

    params: parameters with the dimension of x at which their own first dimension lies.
    """
    ledger, ndim = call.ledger, len(x.shape)
    together(ledger, x, dims)
    operands = [x]
    for t, at in params:
        if t is not None:
            lab = call.of(t)
            operands.append(placed(lab, {i: at + i for i in range(len(lab.shape))}, ndim))
    return join(ledger, operands, x.shape)


def together(ledger: Ledger, x: Labels, dims: set[int]) -> Labels:
    """Features are taken together over `dims`: symmetric if all of an axis takes part, else blocks.

    Returns what is left after a reduction over `dims`: the blocks, and features that lie elsewhere.
    """
    if any(support(slot) & dims for slot in x.features):
        ledger.trait("mixes")
    features, fixed = reduce(ledger, x.features, dims, x.fixed)
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
        call.ledger.variances.update(_names(call.ledger, call.of(variance)))
    y = _normalise(call, x, set(), params)
    return (y, *_rest(call))


def _names(ledger: Ledger, lab: Labels) -> set[tuple[str, int]]:
    axes = (ledger.axis(s) for s in lab.features)
    return {(axis.name, ledger.node) for axis in axes if axis is not None}


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
    if 1 < groups < channels:
        for slot in x.features:
            if 1 in support(slot):
                parts = slot.unflatten(1, (groups, -1))
                call.ledger.block(parts, set(range(2, parts.ndim)))
    dims = set(range(2, len(x.shape))) | ({1} if groups == 1 else set())
    y = _normalise(call, x, dims, [(call.arg(n), 1) for n in ("weight", "bias")])
    return (y, *_rest(call))


@rule("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "logcumsumexp")
def _softmax(call: Call) -> Labels:
    x = call.of(call.arg("self"))
    dim = int(call.arg("dim")) % max(1, len(x.shape))
    if "cum" in str(call.op):
        call.ledger.pin([s for s in x.features if dim in support(s)], f"{call.op} is ordered")
        x = replace(x, fixed=(*x.fixed, *positions(x.shape, [dim])))
    together(call.ledger, x, {dim})
    return x


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
        call.ledger.pin(held, f"{call.op} gives the index of a feature")
    x = together(call.ledger, x, reduced)
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
    x, shape = together(call.ledger, x, {dim}), tuple(first(call.result).shape)
    ranks = positions(shape, [dim])
    y = Labels(shape, x.features, (*beyond(x.fixed, {dim}), *ranks), x.kind)
    return y, replace(y, pending=held)


@rule("_euclidean_dist", "_cdist_forward")
def _distance(call: Call) -> Labels:
    """(..., n, k) and (..., m, k) give (..., n, m): met one by one, then summed over k."""
    x, y = (call.labels(n) for n in ("x1", "x2"))
    n, operands = len(x.shape) + 1, []
    for lab, at in ((x, n - 3), (y, n - 2)):
        dims = {d: d for d in range(n - 3)} | {n - 3: at, n - 2: n - 1}
        operands.append(placed(lab, dims, n))
    shape = (*call.result.shape, x.shape[-1])
    z = together(call.ledger, join(call.ledger, operands, shape), {n - 1})
    fixed = tuple(s.squeeze(-1) for s in beyond(z.fixed, {n - 1}))
    return Labels(shape[:-1], tuple(s.squeeze(-1) for s in z.features), fixed, z.kind)
