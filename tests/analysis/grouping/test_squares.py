"""Squares: matrices whose rows and columns are the same features, of which each entry is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, parameter, sizes
from tests.helpers.laws import error, merge
from zipfx.analysis.grouping.squares import closure, find_sides

I8 = torch.eye(8, dtype=torch.float64)
TRIANGLE = torch.tensor([0, 1, 2, 3, 5, 6, 7, 10, 11, 15])  # of a matrix of 4 x 4, flat


def gram(y: Tensor) -> Tensor:
    return y.mT @ y


def outer(y: Tensor, z: Tensor) -> Tensor:
    return y[:, :, None] * z[:, None]


def transformed(s: Any, x: Tensor) -> Tensor:
    """The features of PointNet, turned by a matrix that is predicted near the identity."""
    y = s.a(x).tanh()
    turn = s.t(F.relu(s.u(y.amax(1)))) + I8.view(1, 64)
    return s.h((y @ turn.view(-1, 8, 8)).tanh().amax(1))


def residual(s: Any, x: Tensor) -> Tensor:
    y = s.a(x).tanh()
    return s.h((y @ s.t(s.u(x.mean(1))).view(-1, 8, 8) + y).amax(1))


FOUR: Size = (4, ())
#: of 4 features y (B, 6, 4) of the input: a function of their Gram matrix, and the spaces
GRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Size]]] = {
    "flat": (lambda s, y: s.h(gram(y).flatten(1)), [FOUR]),
    "scaled": (lambda s, y: s.h((gram(y).flatten(1) * s.v).tanh()), [FOUR]),
    "softmax": (lambda s, y: s.h(gram(y).softmax(-1).flatten(1)), [FOUR]),
    "twice": (lambda s, y: s.h(gram(y).flatten(1)) + s.g((y.tanh().mT @ y).flatten(1)), [FOUR]),
    "and transposed": (
        lambda s, y: s.h((y.mT @ y.tanh() + y.tanh().mT @ y).flatten(1)), [FOUR],
    ),
    "rolled": (lambda s, y: s.h(gram(y).roll(1, 1).flatten(1)), [FOUR]),
    "in groups": (lambda s, y: s.h((s.n(y.mT) @ y).flatten(1)), [(2, ()), (4, (2, 2))]),
    "an image": (lambda s, y: s.k(s.c(gram(y)[:, None]).tanh().mean((2, 3))), [FOUR, (6, ())]),
    "gates": (lambda s, y: s.k(F.relu(s.q(gram(y).flatten(1) * s.r(y.mean(1) * 0)))),
              [FOUR, (6, ())]),
    "convolved": (lambda s, y: s.k(s.d(gram(y)[:, None]).mean((2, 3))), [(6, ())]),
    "triangle": (lambda s, y: s.j(gram(y).flatten(1)[:, TRIANGLE]), []),
    "without diagonal": (lambda s, y: s.i(gram(y)[:, (1 - torch.eye(4)).bool()]), []),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", GRAMS)
def test_gram_matrices(name: str) -> None:
    function, expected = GRAMS[name]
    layers = {"a": nn.Linear(5, 4), "h": nn.Linear(16, 3), "g": nn.Linear(16, 3)}
    more = {"k": nn.Linear(6, 3), "q": nn.Linear(16, 6), "r": nn.Linear(4, 16)}
    last = {"i": nn.Linear(12, 3), "j": nn.Linear(10, 3), "n": nn.GroupNorm(2, 4)}
    convs = {"c": nn.Conv2d(1, 6, 1), "d": nn.Conv2d(1, 6, 3)}
    model = Net(lambda s, x: function(s, s.a(x)), **layers, **more, **last, **convs,
                v=parameter(16))  # fmt: skip
    assert sizes(model, data(6, 5)) == expected
    law1(model, 6, 5)
    law3(model, 6, 5, seeds=range(2))
    law3(model, 6, 5, seeds=[0], partial="a")


def test_gram_matrix_of_heads() -> None:
    """Rows and columns lie in blocks, which move with them on both sides."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).unflatten(-1, (3, 4)).transpose(1, 2)
        return s.h(gram(y).flatten(1))

    model = Net(forward, a=nn.Linear(5, 12), h=nn.Linear(48, 3))
    assert sizes(model, data(6, 5)) == [(3, ()), (12, (4, 4, 4))]
    law1(model, 6, 5)
    law3(model, 6, 5, seeds=range(2))


def test_gram_matrix_across_heads() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.n(s.a(x)).flatten(2)
        return s.h((y @ y.mT).flatten(1))

    model = Net(forward, a=nn.Conv2d(3, 6, 1), n=nn.GroupNorm(3, 6), h=nn.Linear(36, 3))
    assert sizes(model, data(3, 4, 4)) == [(3, ()), (6, (2, 2, 2))]
    law1(model, 3, 4, 4)
    law3(model, 3, 4, 4, seeds=range(2))
    law3(model, 3, 4, 4, seeds=[0], partial="n")


@pytest.mark.parametrize(
    ("function", "expected"), [(transformed, [(7, ()), (8, ())]), (residual, [(7, ()), (8, ())])]
)
def test_predicted_transformations_of_features(function: Any, expected: list[Size]) -> None:
    layers = {"a": nn.Linear(5, 8), "t": nn.Linear(7, 64), "h": nn.Linear(8, 3)}
    model = Net(function, **layers, u=nn.Linear(8 if function is transformed else 5, 7))
    spaces = zipfx.analyze(model, data(6, 5), verify=False)
    assert sorted((s.size, s.blocks) for s in spaces) == expected
    (square,) = (s for s in spaces if s.size == 8)
    assert square.tied
    on = [a.index.tolist() for a in square.axes if a.parameter == "t.weight" and a.dim == 0]
    entries = np.arange(64).reshape(8, 8)
    assert sorted(on) == sorted([entries.tolist(), entries.T.tolist()])
    law1(model, 6, 5)
    law3(model, 6, 5, seeds=range(2))
    for cut in ("a", "u", "t"):
        law3(model, 6, 5, seeds=[0], partial=cut)


@pytest.mark.parametrize("matcher", ["weights", "zip", "optimal", "kmeans"])
def test_squares_are_matched_by_every_matcher(matcher: str) -> None:
    layers = {"a": nn.Linear(5, 8), "t": nn.Linear(7, 64), "h": nn.Linear(8, 3)}
    model = Net(transformed, **layers, u=nn.Linear(8, 7))
    spaces = zipfx.analyze(model, data(6, 5))
    twin = spaces.permuted(model, spaces.random_permutations(1))
    loader = [(data(6, 5, seed=i, batch=32),) for i in range(3)]
    merged = merge([model, twin], loader, matcher=matcher)
    assert error(model(data(6, 5)), merged(data(6, 5))) < 1e-11


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, y, z: s.h(outer(y, y).flatten(1)), [FOUR]),
        (lambda s, y, z: s.h(outer(y, z).flatten(1)), [FOUR, FOUR]),
        (lambda s, y, z: s.h(outer(y, z).flatten(1)) + s.g(y + z), [FOUR]),
        (lambda s, y, z: s.c((outer(y, y)[..., None] * y[:, None, None]).flatten(1)), []),
    ],
    ids=["itself", "another", "one that it meets", "three times"],
)
def test_outer_products(function: Any, expected: list[Size]) -> None:
    layers = {"a": nn.Linear(5, 4), "b": nn.Linear(5, 4), "h": nn.Linear(16, 3)}
    ends = {"g": nn.Linear(4, 3), "c": nn.Linear(64, 3)}
    model = Net(lambda s, x: function(s, s.a(x).tanh(), s.b(x)), **layers, **ends)
    assert [s for s in sizes(model, data(5)) if s != (4, ()) or s in expected][: len(expected)] == (
        expected
    )
    law1(model, 5)
    law3(model, 5, seeds=[0])


# ------------------------------------------------------------------ the square itself
def pairs(keep: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """The entries of a matrix that are kept, vertices 0.., with its features, which come last."""
    row, column = np.nonzero(keep)
    n, count = len(keep), len(row)
    child = np.tile(np.arange(count), 2)
    role = np.repeat([1, 2], count).astype(np.uint64)
    kind = np.array([0] * count + [1] * n)
    return child, np.concatenate([row, column]) + count, role, kind, np.zeros(count + n, np.int64)


def test_what_makes_a_square() -> None:
    whole, off = np.ones((4, 4), bool), ~np.eye(4, dtype=bool)
    for keep in (whole, off):
        side, bad = find_sides(*pairs(keep))
        assert not len(bad)
        assert sorted(set(side.tolist())) == [0, 1]
    for missing in (np.triu(off), np.diag([True, True, False, False]), np.eye(4, dtype=bool)[::-1]):
        assert len(find_sides(*pairs(whole & ~missing))[1]) == 4


def test_ancestors_by_rows_and_by_columns() -> None:
    """Entry 0 lies in row 1 and column 2, which lie in the blocks 3 and 4."""
    child, parent, side = np.array([0, 0, 1, 2]), np.array([1, 2, 3, 4]), np.array([0, 1, -1, -1])
    found = set(zip(*(ends.tolist() for ends in closure(child, parent, side, 5)), strict=True))
    assert found == {(0, 1, 0), (0, 2, 1), (1, 3, 0), (2, 4, 0), (0, 3, 0), (0, 4, 1)}


# ------------------------------------------------------------------ what is not found
@pytest.mark.xfail(strict=True, reason="an entry of a triangle lies in two rows, in no order")
def test_the_triangle_of_a_gram_matrix() -> None:
    model = Net(lambda s, x: s.h(gram(s.a(x)).flatten(1)[:, TRIANGLE]), a=nn.Linear(5, 4),
                h=nn.Linear(10, 3))  # fmt: skip
    assert sizes(model, data(6, 5)) == [FOUR]


@pytest.mark.xfail(strict=True, reason="an entry of a cube lies in three blocks of one class")
def test_products_of_three_features() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        return s.h((outer(y, y)[..., None] * y[:, None, None]).flatten(1))

    assert sizes(Net(forward, a=nn.Linear(5, 4), h=nn.Linear(64, 3)), data(5)) == [FOUR]
