"""Ways to write one aten call have one form; what makes a difference does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zipfx.trace.align.spelling import AtenCall

aten: Any = torch.ops.aten
X, Y = torch.rand(2, 3, 4), torch.rand(2, 3, 4)


def of(op: Any, *args: Any, **kwargs: Any) -> AtenCall:
    return AtenCall.of(op, args, kwargs)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of(aten.relu.default, X), of(aten.relu_.default, X)),
        (of(aten.softmax.int, X, -1), of(aten.softmax.int, X, 2)),
        (of(aten.mean.dim, X, [1, -1]), of(aten.mean.dim, X, [2, 1])),
        (of(aten.mean.dim, X, [1]), of(aten.mean.dim, X, [1], True)),  # keepdim is a view
        (of(aten.add.Tensor, X, Y), of(aten.add.Tensor, X, Y, alpha=1)),
        (of(aten.max_pool2d.default, X, [2, 2]), of(aten.max_pool2d.default, X, [2, 2], [2, 2])),
        (of(aten.to.dtype, X, torch.float32), of(aten.to.dtype, X, torch.float32, False, True)),
        (of(aten.batch_norm.default, X, None, None, None, None, False, 0.1, 1e-5, True),
         of(aten.batch_norm.default, X, None, None, None, None, False, 0.7, 1e-3, False)),
    ],
)  # fmt: skip
def test_two_ways_to_write_the_same(a: AtenCall, b: AtenCall) -> None:
    assert (a.name, a.settings) == (b.name, b.settings)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of(aten.softmax.int, X, 1), of(aten.softmax.int, X, 2)),
        (of(aten.permute.default, X, [0, 2, 1]), of(aten.permute.default, X, [1, 0, 2])),
        (of(aten.max_pool2d.default, X, [2, 2]), of(aten.max_pool2d.default, X, [2, 2], [1, 1])),
        (of(aten.add.Tensor, X, Y), of(aten.add.Tensor, X, Y, alpha=2)),
        (of(aten.add.Tensor, X, Y), of(aten.sub.Tensor, X, Y)),
        (of(aten.to.dtype, X, torch.float64), of(aten.to.dtype, X, torch.float32)),
        (of(aten.gelu.default, X), of(aten.gelu.default, X, approximate="tanh")),
        (of(aten.leaky_relu.default, X), of(aten.leaky_relu.default, X, 0.2)),
    ],
)
def test_what_makes_a_difference(a: AtenCall, b: AtenCall) -> None:
    assert (a.name, a.settings) != (b.name, b.settings)


def test_settings_can_be_looked_up() -> None:
    found = of(aten.convolution.default, X, X, None, [1], [0], [1], False, [0], 1)
    assert len({found.settings: 1}) == 1
    assert dict(found.settings)["stride"] == (1,)


@pytest.mark.parametrize(
    ("call", "commutes"),
    [
        (of(aten.add.Tensor, X, Y), True),
        (of(aten.mul_.Tensor, X, Y), True),
        (of(aten.add.Tensor, X, Y, alpha=2), False),
        (of(aten.add.Tensor, X, 1), False),
        (of(aten.sub.Tensor, X, Y), False),
        (of(aten.maximum.default, X, Y), True),
    ],
)
def test_which_operands_may_change_places(call: AtenCall, commutes: bool) -> None:
    assert call.commutes == commutes


def test_views_randomness_and_elementwise_calls_are_told_apart() -> None:
    assert of(aten.view.default, X, [6, 4]).is_view
    assert not of(aten.select.int, X, 0, 1).is_view  # a part that is cut out
    assert of(aten.bernoulli.default, X).is_random
    assert not of(aten.relu.default, X).is_random
    assert of(aten.add.Tensor, X, Y).is_plain
    assert not of(aten.add.Tensor, X, Y[0]).is_plain  # one of them is repeated
    assert not of(aten.mm.default, X[0], Y[0].T).is_plain


@pytest.mark.parametrize(
    ("call", "reads", "writes"),
    [
        (of(aten.add_.Tensor, X, Y), [X, Y], [X]),
        (of(aten.copy_.default, X, Y), [Y], [X]),
        (of(aten.zero_.default, X), [], [X]),
        (of(aten.add.Tensor, X, Y), [X, Y], []),
    ],
)
def test_what_is_read_and_what_is_only_written(
    call: AtenCall, reads: list[Tensor], writes: list[Tensor]
) -> None:
    assert [id(t) for t in call.operands] == [id(t) for t in reads]
    assert [id(t) for t in call.written] == [id(t) for t in writes]
