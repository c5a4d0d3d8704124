"""Features in another order: in parameters that hold them once, in blocks, or in parts of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.analysed import ids
from zipfx.analysis.spaces.reorder import axis_moves, by_rows, mix, moved, select
from zipfx.analysis.spaces.values import Axis, Role, Space
from zipfx.errors import ZipError

quick = settings(max_examples=40, deadline=None)


def axis(index: Tensor, dim: int = 0, **options: int) -> Axis:
    return Axis("w", dim, Role.CONSUMES, index, **options)


def test_every_occurrence_of_a_feature_moves() -> None:
    space = Space("s", 2, (axis(torch.tensor([[0, 2], [1, 3]]), 1),))
    moves = axis_moves([space], {"s": ids(1, 0)})
    assert moved(torch.tensor([[0, 1, 2, 3, 4]]), moves["w"]).tolist() == [[1, 0, 3, 2, 4]]


def test_blocks_move_with_what_is_inside() -> None:
    """Rows of two blocks of two: the blocks are exchanged, and the features of the first."""
    blocks = Space("b", 2, (axis(torch.tensor([[0, 1], [2, 3]])),))
    inside = Space("i", 4, (axis(torch.arange(4)[:, None]),), blocks=(2, 2))
    moves = axis_moves([blocks, inside], {"b": ids(1, 0), "i": ids(1, 0, 2, 3)})
    assert moved(torch.arange(4), moves["w"]).tolist() == [3, 2, 0, 1]


def test_parts_of_the_rows_move_on_their_own() -> None:
    """Of a grouped convolution: columns of the second group alone."""
    part = Space("p", 2, (axis(ids(2, 3)[:, None], 1, by=0, parts=2),))
    moves = axis_moves([part], {"p": ids(1, 0)})
    found = moved(torch.arange(8).view(4, 2), moves["w"])
    assert found.tolist() == [[0, 1], [2, 3], [5, 4], [7, 6]]


def test_values_of_parts_lie_beside_their_rows() -> None:
    found = by_rows(torch.arange(4), 1, 0, 2, (4, 2, 3))
    assert found.shape == (4, 2, 3)
    assert found[..., 0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert torch.equal(by_rows(torch.arange(4), 0, 1, 2, (2, 4)), found[..., 0].T)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([1, 0], "is a list: it must be a tensor"),
        (torch.tensor([1.0, 0.0]), r"must be a tensor \(2,\) of int64"),
        (ids(0, 0), r"is no permutation of 0\.\.1"),
        (ids(0, 1, 2), r"is no permutation of 0\.\.1"),
    ],
)
def test_what_is_no_order_is_refused(order: Tensor, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        axis_moves([Space("s", 2, ())], {"s": order})


def test_features_stay_in_their_blocks() -> None:
    with pytest.raises(ZipError, match="moves features from one block to another"):
        axis_moves([Space("s", 4, (), blocks=(2, 2))], {"s": ids(0, 2, 1, 3)})


@quick
@given(
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True), st.integers(0, 99)
)
def test_dimensions_taken_as_one(dims: list[int], seed: int) -> None:
    """Against numpy: the dimensions moved behind all others, in this order, and flattened."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 3, 4))
    rest = [d for d in range(3) if d not in dims]
    turned = x.transpose(*rest, *dims)
    flat = turned.reshape(*turned.shape[: len(rest)], -1)
    order, matrix = rng.permutation(flat.shape[-1]), rng.normal(size=(flat.shape[-1],) * 2)
    for found, wanted in (
        (select(torch.from_numpy(x), dims, torch.from_numpy(order)), flat[..., order]),
        (mix(torch.from_numpy(x), dims, torch.from_numpy(matrix)), flat @ matrix.T),
    ):
        back = np.argsort([*rest, *dims])
        np.testing.assert_allclose(found.numpy(), wanted.reshape(turned.shape).transpose(back))
