"""Matrices that are inverted, solved with, taken apart: what follows any order of their axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, linalg, nn

import zipfx
from tests.helpers.blocks import (
    Net,
    Size,
    data,
    join_heads,
    law1,
    law3,
    parameter,
    sizes,
    split_heads,
)

I8 = torch.eye(8, dtype=torch.float64)
I6 = torch.eye(6, dtype=torch.float64)
EIGHT: Size = (8, ())


def positive(x: Tensor) -> Tensor:
    """Of the tokens of the input, with no features."""
    return x @ x.mT + 3 * I6


def gram(y: Tensor) -> Tensor:
    """Of features with themselves."""
    return y.mT @ y + 3 * I8


#: what becomes of features y (B, 6 tokens, 8) of the input x (B, 6, 5), and the spaces found
FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], list[Size]]] = {
    # matrices of tokens: features are a batch, or right sides
    "inverse of tokens": (lambda s, y, x: linalg.inv(positive(x)) @ y, [EIGHT]),
    "pseudoinverse of tokens": (lambda s, y, x: linalg.pinv(positive(x)) @ y, [EIGHT]),
    "solved for tokens": (lambda s, y, x: linalg.solve(positive(x), y), [EIGHT]),
    "solved from the right": (
        lambda s, y, x: linalg.solve(positive(x), y.mT, left=False).mT, [EIGHT],
    ),
    "one right side": (
        lambda s, y, x: linalg.solve(positive(x), y.mean(2)).unsqueeze(-1) * y, [EIGHT],
    ),
    "least squares": (lambda s, y, x: linalg.lstsq(positive(x), y)[0], [EIGHT]),
    "cholesky": (lambda s, y, x: linalg.cholesky(positive(x)) @ y, [EIGHT]),
    "solved by cholesky": (
        lambda s, y, x: torch.cholesky_solve(y, linalg.cholesky(positive(x))), [EIGHT],
    ),
    "triangular": (
        lambda s, y, x: linalg.solve_triangular(positive(x).tril(), y, upper=False), [EIGHT],
    ),
    "lu": (lambda s, y, x: linalg.lu(positive(x))[2] @ y, [EIGHT]),
    "solved by lu": (lambda s, y, x: linalg.lu_solve(*linalg.lu_factor(positive(x)), y), [EIGHT]),
    "qr": (lambda s, y, x: linalg.qr(positive(x))[1] @ y, [EIGHT]),
    "eigenvectors": (lambda s, y, x: linalg.eigh(positive(x))[1].abs() @ y, [EIGHT]),
    "exponential of tokens": (lambda s, y, x: torch.matrix_exp(0.1 * positive(x)) @ y, [EIGHT]),
    "power": (lambda s, y, x: linalg.matrix_power(0.1 * positive(x), 3) @ y, [EIGHT]),
    # a learned matrix: its rows and its columns each have features
    "inverse of a weight": (lambda s, y, x: y @ linalg.inv(s.w + 3 * s.w @ s.w), [EIGHT]),
    "inverse of a weight alone": (lambda s, y, x: y @ linalg.inv(s.w), [EIGHT, EIGHT]),
    "pseudoinverse of a weight": (lambda s, y, x: y @ linalg.pinv(s.u), [(4, ()), EIGHT]),
    "solved with a weight": (lambda s, y, x: linalg.solve(s.w, y.mT).mT, [EIGHT, EIGHT]),
    "exponential of a weight": (lambda s, y, x: y @ torch.matrix_exp(s.w), [EIGHT]),
    "rotation by a weight": (lambda s, y, x: y @ torch.matrix_exp(s.w - s.w.mT), [EIGHT]),
    "cayley": (lambda s, y, x: y @ linalg.solve(I8 + s.w - s.w.mT, I8 - s.w + s.w.mT), [EIGHT]),
    # matrices of features
    "whitened": (lambda s, y, x: y @ linalg.inv(gram(y)), [EIGHT]),
    "solved for features": (lambda s, y, x: linalg.solve(gram(y), y.mT).mT, [EIGHT]),
    "exponential of features": (
        lambda s, y, x: y @ torch.matrix_exp(0.1 * gram(y.tanh())), [EIGHT],
    ),
    "determinant": (lambda s, y, x: y * linalg.det(gram(y.tanh()) / 9)[:, None, None], [EIGHT]),
    "log determinant": (lambda s, y, x: y * linalg.slogdet(gram(y))[1][:, None, None], [EIGHT]),
    "singular values": (lambda s, y, x: y / linalg.svdvals(y)[:, :1, None], [EIGHT]),
    "nuclear norm": (lambda s, y, x: y / linalg.matrix_norm(y, "nuc", keepdim=True), [EIGHT]),
    "eigenvalues": (lambda s, y, x: y * linalg.eigvalsh(gram(y))[:, None, -1:], [EIGHT]),
    "trace": (lambda s, y, x: y * torch.trace(y[0].mT @ y[0]), [EIGHT]),
    # what depends on the order
    "cholesky of features": (lambda s, y, x: y @ linalg.cholesky(gram(y)), []),
    "triangular of features": (
        lambda s, y, x: linalg.solve_triangular(gram(y).tril(), y.mT, upper=False).mT, [],
    ),
    "qr of features": (lambda s, y, x: linalg.qr(y)[1].expand(-1, 6, 8), []),
    "eigenvectors of features": (lambda s, y, x: y @ linalg.eigh(gram(y))[1], []),
    "singular vectors": (lambda s, y, x: linalg.svd(y, full_matrices=False)[2], []),
    "lu of features": (lambda s, y, x: y @ linalg.lu(gram(y))[2], []),
    "determinant with the input": (
        lambda s, y, x: y * linalg.det(torch.cat([x, y[..., :1]], 2))[:, None, None], [(7, ())],
    ),
}  # fmt: skip


def build(name: str) -> Net:
    function, _ = FUNCTIONS[name]
    width = 4 if "pseudoinverse of a weight" in name else 8
    layers = {"a": nn.Linear(5, 8), "h": nn.Linear(width, 3)}
    weights = {"w": parameter(8, 8), "u": parameter(4, 8)}
    return Net(lambda s, x: s.h(function(s, s.a(x), x).tanh()), **layers, **weights)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_matrices(name: str) -> None:
    model = build(name)
    assert sizes(model, data(6, 5)) == FUNCTIONS[name][1]
    if name not in ("trace", "determinant with the input"):
        law1(model, 6, 5)
    reasons = {p.reason for p in zipfx.analyze(model, data(6, 5), verify=False).pinned}
    assert not any("not understood" in r for r in reasons)


@pytest.mark.parametrize(
    "name",
    "solved for tokens,inverse of a weight alone,solved with a weight,whitened,cayley".split(","),
)
def test_law_3_of_matrices(name: str) -> None:
    law3(build(name), 6, 5, seeds=range(2))


def test_heads_are_a_batch_of_matrices() -> None:
    """Attention that inverts: (I + k k^T)^-1 of every head, applied to its values."""

    def forward(s: Any, x: Tensor) -> Tensor:
        k, v = split_heads(s.k(x)), split_heads(s.v(x))
        weights = linalg.inv(torch.eye(5, dtype=x.dtype) + k @ k.mT)
        scale = linalg.slogdet(torch.eye(5, dtype=x.dtype) + k @ k.mT)[1]
        return s.o(join_heads(weights @ v * scale[..., None, None]))

    layers = {"k": nn.Linear(8, 12), "v": nn.Linear(8, 12), "o": nn.Linear(12, 3)}
    model = Net(forward, **layers)
    assert sizes(model, data(5, 8)) == [(3, ()), (12, (4, 4, 4)), (12, (4, 4, 4))]
    law1(model, 5, 8)
    law3(model, 5, 8, seeds=[0])


def test_the_sign_of_a_determinant_depends_on_the_order_of_its_rows() -> None:
    """Rows are exchanged alone: the columns are the input's."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(x) * linalg.det(s.w @ x.mT @ x)[:, None, None]

    model = Net(forward, w=parameter(5, 5), h=nn.Linear(5, 3))
    assert sizes(model, data(6, 5)) == []
    law1(model, 6, 5)


@pytest.mark.parametrize("map_name", ["matrix_exp", "householder", "cayley"])
def test_an_orthogonal_layer_keeps_its_order(map_name: str) -> None:
    """It is made of the triangle of a parameter: nothing to exchange, and nothing unknown."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=map_name)
    model = Net(lambda s, x: s.h(s.o(s.a(x))), a=nn.Linear(5, 8), o=layer, h=nn.Linear(8, 3))
    reasons = {p.reason for p in zipfx.analyze(model, data(6, 5), verify=False).pinned}
    assert not any("not understood" in r for r in reasons)
    law1(model, 6, 5)
