"""Algebra: inverses, solutions, and factors of matrices, the last two axes of a tensor.

What lies on other axes is a batch. An inverse follows every order of rows and columns; factors come
in an order of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Labels, beyond, by_value, place, placed, positions, support
from zipfx.analysis.rules.call import Call, carried, pinned_along, rule
from zipfx.analysis.rules.contraction import contract, without
from zipfx.analysis.rules.convolution import slide
from zipfx.analysis.rules.pointwise import join, reduce
from zipfx.model.tensors import inexact


def _one_to_one(constraints: Constraints, slots: Iterable[Tensor]) -> None:
    """What is not linear stays exact only if merged features have one feature of each model."""
    constraints.trait("mixes")
    constraints.bilinear.extend((torch.unique(s).numpy(), constraints.node) for s in slots)


def _results(call: Call) -> list[Tensor]:
    return [t for t in tree_leaves(call.result) if isinstance(t, Tensor)]


def _of_batches(call: Call, x: Labels, start: int = 0) -> tuple[Labels, ...]:
    """Results from number `start` on: of every matrix of x one, whose entries are in an order of
    their own."""
    found = []
    for t in _results(call)[start:]:
        shape, batch = tuple(t.shape), len(x.shape) - 2
        told = inexact(t) and shape[:batch] == x.shape[:batch]  # not flags, which are looked at
        dims = {d: d for d in range(batch)} if told else {}
        features, fixed = (
            tuple(carried(slots, dims, len(shape))) for slots in (x.features, x.fixed)
        )
        others = positions(shape, range(len(dims), len(shape)))
        found.append(Labels(shape, features, (*fixed, *others), x.kind))
    return tuple(found)


def _rows_are_columns(call: Call, x: Labels) -> Labels:
    """A square matrix whose rows and columns are in one order, as for the identity."""
    last = len(x.shape) - 1
    both = [s for s in x.features if {last - 1, last} <= support(s)]
    call.constraints.pin(both, f"{call.op.name()} needs rows and columns in one order")
    own = tuple(s for s in x.features if all(s is not b for b in both))
    identity = placed(by_value(torch.eye(x.shape[-1])), {0: last - 1, 1: last}, last + 1)
    y = join(call.constraints, [replace(x, features=own), identity], x.shape)
    _one_to_one(call.constraints, (s for s in y.features if support(s) & {last - 1, last}))
    return y


@rule("linalg_inv_ex", "linalg_pinv.atol_rtol_tensor")
def _inverse(call: Call) -> Labels | tuple[Labels, ...]:
    """Rows of a matrix are columns of its inverse."""
    x, results = call.of(call.tensors()[0]), _results(call)
    y = replace(
        x,
        shape=tuple(results[0].shape),
        features=tuple(s.mT for s in x.features),
        fixed=tuple(s.mT for s in x.fixed),
    )
    last = len(x.shape) - 1
    _one_to_one(call.constraints, (s for s in x.features if support(s) & {last - 1, last}))
    return (y, *_of_batches(call, x, 1)) if len(results) > 1 else y


@rule("_linalg_solve_ex", "linalg_lstsq")
def _solve(call: Call) -> tuple[Labels, ...]:
    """A X = B, or X A = B: as a product with the inverse, which is summed over what they share."""
    least = "lstsq" in str(call.op)
    a, b = (call.labels(name) for name in (("self", "b") if least else ("A", "B")))
    shape, left = tuple(_results(call)[0].shape), bool(call.arg("left", True))
    vector = len(b.shape) == 1 or b.shape == a.shape[:-1]
    b = placed(b, {d: d for d in range(len(b.shape))}, len(b.shape) + vector)
    # the frame is (batch ..., rows of X, columns of X, what is summed over)
    k = max(len(a.shape), len(b.shape))
    rows, columns = k - 2, k - 1
    where = ((k, rows), (k, columns)) if left else ((columns, k), (rows, k))
    dims = tuple(
        {d: d + k - len(lab.shape) for d in range(len(lab.shape) - 2)}
        | {len(lab.shape) - 2: at[0], len(lab.shape) - 1: at[1]}
        for lab, at in zip((a, b), where, strict=True)
    )
    y = without(contract(call.constraints, a, b, (dims[0], dims[1]), k), k, (1,) * k)
    _one_to_one(call.constraints, (s for s in a.features if max(support(s)) >= len(a.shape) - 2))
    x = placed(y, {d: d for d in range(len(shape))}, len(shape))
    return (replace(x, shape=shape), *_of_batches(call, a, 1))


@rule("linalg_matrix_exp")
def _exponential(call: Call) -> Labels:
    """A sum of powers, of which the first is the identity."""
    return _rows_are_columns(call, call.labels("self"))


@rule("_linalg_det", "_linalg_slogdet")
def _determinant(call: Call) -> tuple[Labels, ...]:
    """The same for all orders of the rows, but for its sign, if the columns are in that order."""
    x = _rows_are_columns(call, call.labels("A"))
    n = len(x.shape) - 2
    features, _ = reduce(call.constraints, x.features, {n, n + 1}, x.fixed)
    return _of_batches(call, replace(x, features=features))


@rule("_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals")
def _spectrum(call: Call) -> tuple[Labels, ...]:
    """Values are sorted, whatever the order of rows and columns; the signs of vectors depend on
    it."""
    x = call.of(call.tensors()[0])
    n, singular = len(x.shape) - 2, "svd" in str(call.op)
    held = tuple(s for s in x.features if support(s) & {n, n + 1})
    x = x if singular else _rows_are_columns(call, x)
    features, _ = reduce(call.constraints, x.features, {n, n + 1}, x.fixed)
    found = _of_batches(call, replace(x, features=features))
    values = {1} if singular else {0}
    return tuple(y if i in values else replace(y, pending=held) for i, y in enumerate(found))


@rule(
    *"linalg_cholesky_ex cholesky_inverse linalg_qr geqrf linalg_householder_product".split(),
    *"linalg_lu_factor_ex linalg_lu lu_unpack linalg_ldl_factor_ex".split(),
)
def _factors(call: Call) -> Labels | tuple[Labels, ...]:
    """Computed row by row, or column by column."""
    last = len(call.of(call.tensors()[0]).shape) - 1
    reason = f"{call.op.name()} goes through rows and columns in their order"
    x = pinned_along(call.constraints, call.of(call.tensors()[0]), {last - 1, last}, reason)
    for t in call.tensors()[1:]:
        call.constraints.pin(call.of(t).features, reason)
    found = _of_batches(call, x)
    return found if isinstance(call.result, tuple) else found[0]


@rule(
    *"cholesky_solve linalg_solve_triangular triangular_solve linalg_lu_solve".split(),
    "linalg_ldl_solve",
)
def _solve_by_factors(call: Call) -> Labels | tuple[Labels, ...]:
    """Right sides, each by itself; the factors, and rows of X and B, are in an order of theirs."""
    sides = "B" if any(a.name == "B" for a in call.op._schema.arguments) else "self"
    b, reason = call.arg(sides), f"{call.op.name()} goes through rows in their order"
    n, left = b.ndim, bool(call.arg("left", True))
    for t in call.tensors():
        if t is not b:
            lab = call.of(t)
            along = set(range(max(0, len(lab.shape) - 2), len(lab.shape)))
            pinned_along(call.constraints, lab, along, reason)
    x = pinned_along(call.constraints, call.of(b), {n - 2 if left else n - 1}, reason)
    shape = tuple(_results(call)[0].shape)
    x = placed(x, {d: d + len(shape) - n for d in range(n)}, len(shape))
    rows = len(shape) - (2 if left else 1)
    y = replace(x, shape=shape, fixed=(*x.fixed, *positions(shape, [rows])))
    return (y, *_of_batches(call, y, 1)) if isinstance(call.result, tuple) else y


def paired(constraints: Constraints, pairs: Labels) -> Labels:
    """Labels of complex numbers whose real and imaginary parts lie along the last dimension.

    Where these are two features, as in a rotary embedding, the pair moves as a whole.
    """
    last = len(pairs.shape) - 1
    x = slide(
        constraints, pairs, {last}, "two features are one complex number: they keep their order"
    )
    shape = pairs.shape[:-1]
    features = tuple(s.squeeze(last) for s in x.features)
    fixed = tuple(s.squeeze(last) for s in beyond(x.fixed, {last}))
    return Labels(shape, features, fixed, pairs.kind)


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(call: Call) -> Labels:
    """Every frequency is a sum over all of an axis, each term with a factor of its own."""
    x, shape = call.labels("self"), tuple(call.result.shape)
    along = {d % len(shape) for d in call.arg("dim")}
    reason = f"{call.op.name()} mixes all that lies along an axis, in its order"
    x = slide(call.constraints, x, along, reason)
    return Labels(shape, x.features, (*beyond(x.fixed, along), *positions(shape, along)), x.kind)


@rule("unfold_backward")
def _overlapping_sum(call: Call) -> Labels:
    """Windows, (..., count, ..., width), are added up where they lie, as at the end of an istft."""
    x, shape = call.labels("grad_in"), tuple(call.result.shape)
    dim, last = call.arg("dim") % len(shape), len(shape)
    x = slide(call.constraints, x, {dim, last})
    keep = {d: d for d in range(last)}
    fixed = (place(s, keep, last) for s in beyond(x.fixed, {dim, last}))
    features = tuple(carried(x.features, keep, last))
    return Labels(shape, features, (*fixed, *positions(shape, [dim])), x.kind)
