"""Blocks: features that are used as a whole here and in parts there; each was once got wrong.

Law 1 where features of two blocks meet, law 3 where a merge restores blocks, and the spaces that
must be found although the blocks hide them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import zipfx
from tests.helpers.blocks import (
    Net,
    data,
    join_heads,
    law1,
    law3,
    parameter,
    projections,
    sizes,
    split_heads,
)
from tests.helpers.cases import CASES
from tests.helpers.laws import EXACT, error, merge

FOLDED = "restored features are counted at the example's batch size"


def test_differential_attention() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x), 6), split_heads(s.k(x), 6), split_heads(s.v(x), 3)
        w = (q @ k.mT).softmax(-1).unflatten(1, (3, 2))
        w = w[:, :, 0] - s.scale * w[:, :, 1]
        return s.o(join_heads(w @ v))

    parts = {**projections(), "q": nn.Linear(8, 24), "k": nn.Linear(8, 24)}
    law1(Net(forward, **parts, scale=parameter(1)), 5, 8)


# ----------------------------------------------------------- law 1: features behind complex numbers
def test_complex_rotary_embedding() -> None:
    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 10 ** (torch.arange(0, 4, 2) / 4)
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2)

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        return s.o(join_heads(F.scaled_dot_product_attention(rotated(q), rotated(k), v)))

    law1(Net(forward, **projections()), 5, 8)


# -------------------------------------- law 3: a value's copies lie in another order in every model
@pytest.mark.slow
@pytest.mark.parametrize(
    "repeat",
    [lambda t: t.repeat_interleave(2, 1), lambda t: t.repeat(1, 2, 1, 1)],
    ids=["interleave", "repeat"],
)
def test_merge_of_grouped_queries(repeat: Callable[[Tensor], Tensor]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q = split_heads(s.q(x), 4)
        k, v = repeat(split_heads(s.k(x), 2)), repeat(split_heads(s.v(x), 2))
        return s.o(join_heads((q @ k.mT).softmax(-1) @ v))

    parts = {"q": nn.Linear(8, 16), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8)}
    law3(Net(forward, **parts, o=nn.Linear(16, 3)), 5, 8)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
def test_merge_of_the_case_of_grouped_queries(seed: int) -> None:
    case = CASES["grouped queries"]
    model, x = case.make(), case.inputs[0].double()
    spaces = zipfx.analyze(model, x)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(30, *x.shape, generator=generator, dtype=torch.float64)
    twin = spaces.permuted(model, spaces.random_permutations(seed))
    merged = merge([model, twin], [(batch,) for batch in noise], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


@pytest.mark.xfail(strict=True, reason=FOLDED)
@pytest.mark.parametrize("cut", ["q", "k", "act"])
def test_cut_where_heads_are_folded_into_the_batch(cut: str) -> None:
    def fold(x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, 3, 4).transpose(1, 2).reshape(b * 3, n, 4)

    def forward(s: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = fold(s.q(x)), fold(s.k(x)), fold(s.v(x))
        w = s.act(torch.bmm(q, k.transpose(1, 2)))
        return s.o(torch.bmm(w, v).view(b, 3, n, 4).transpose(1, 2).reshape(b, n, 12))

    model = Net(forward, **projections(), act=nn.Softmax(-1))
    law3(model, 5, 8, partial=cut, seeds=range(2))


@pytest.mark.xfail(strict=True, reason=FOLDED)
def test_cut_where_groups_are_folded_into_the_batch() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        b, c, h, w = y.shape
        return s.h(F.relu(s.n(y.reshape(b * 4, 2, h, w)).reshape(b, c, h, w)))

    model = Net(forward, a=nn.Conv2d(3, 8, 1), n=nn.GroupNorm(1, 2), h=nn.Conv2d(8, 3, 1))
    law3(model, 3, 5, 5, partial="a", seeds=range(2))


# ---------------------------------------------- merges: a view of a parameter is handed to a module
@pytest.mark.parametrize(
    "view",
    [lambda p, x: p.expand(x.shape[0], -1, -1), lambda p, x: p[:, :1]],
    ids=["expand", "slice"],
)
def test_a_view_of_a_parameter_is_handed_to_a_module(
    view: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(view(s.p, x)) + s.a(x))

    parts = {"a": nn.Linear(4, 6), "b": nn.Linear(5, 6), "h": nn.Linear(6, 2)}
    model, x = Net(forward, p=parameter(1, 1, 5), **parts), data(3, 4, batch=8)
    merged = merge([model, copy.deepcopy(model)], [(x,)], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


def test_a_learned_start_of_a_recurrent_cell() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.c(x, s.p.expand(x.shape[0], 5)))

    model = Net(forward, p=parameter(5), c=nn.GRUCell(4, 5), h=nn.Linear(5, 2))
    x = data(4, batch=8)
    merged = merge([model, copy.deepcopy(model)], [(x,)], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


@pytest.mark.xfail(strict=True, reason="an operation on some heads tells them from the others")
def test_heads_in_a_loop() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x).split(4, -1), s.k(x).split(4, -1), s.v(x).split(4, -1)
        return s.o(torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v)], -1))

    assert (3, ()) in sizes(Net(forward, **projections()), data(5, 8))


# ------------------------------------------------------ completeness: operations and their features
def test_spectral_norm() -> None:
    torch.manual_seed(0)
    parts = {"a": spectral_norm(nn.Conv2d(3, 6, 3)), "b": spectral_norm(nn.Conv2d(6, 3, 1))}
    model = Net(lambda s, x: s.b(F.relu(s.a(x))), **parts)
    assert sizes(model, data(3, 5, 5)) == [(6, ())]


@pytest.mark.xfail(
    strict=True,
    reason="a float buffer counts as a weight, and weights alone do not make a space",
)
def test_weights_made_by_a_network_of_constants() -> None:
    """The continuous position bias of Swin v2."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        bias = s.m2(F.relu(s.m1(s.places)))[s.index].permute(2, 0, 1)
        return s.o(join_heads((q @ k.mT + bias).softmax(-1) @ v))

    index = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
    network = {"m1": nn.Linear(2, 7), "m2": nn.Linear(7, 3, bias=False)}
    model = Net(forward, **network, **projections(), places=data(2, batch=9), index=index)
    assert (7, ()) in sizes(model, data(5, 8))


# ------------------------------------------------- law 3: where features are observed, and restored
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(5, elementwise_affine=False), nn.Softmax(-1), nn.BatchNorm2d(3)],
    ids=["layer_norm", "softmax", "batch_norm"],
)
def test_cut_where_padding_is_normalised(norm: nn.Module) -> None:
    """The zeros then hold something of their row, or the bias of their channel; they move, too."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.a(x).view(-1, 3, 3, 3), (1, 1, 1, 1))
        return s.h(s.n(y))

    model = Net(forward, a=nn.Linear(4, 27), n=norm, h=nn.Conv2d(3, 2, 1))
    law3(model, 4, partial="n")
    assert sizes(model, data(4)) == [(3, ())]


def test_cut_after_the_features_of_tokens_were_multiplied_with_themselves() -> None:
    """Rows and columns are the same features; the tokens are exchangeable all the same."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 3, 4)
        return s.h(y.mT @ y.tanh())

    law3(Net(forward, a=nn.Linear(4, 12), h=nn.Linear(4, 2)), 4, partial="h")


def test_merge_of_features_that_are_the_rows_and_the_columns() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).flatten(2).mT
        gram = torch.cat([s.p.expand(x.shape[0], -1, -1), y.mT @ y.tanh()], 1)
        return s.h(s.b(gram).mean(1))

    parts = {"a": nn.Conv2d(3, 6, 1), "b": nn.Linear(6, 3), "h": nn.Linear(3, 2)}
    law3(Net(forward, p=parameter(1, 1, 6), **parts), 3, 4, 4)


def test_cut_where_features_leave_unequally_often() -> None:
    """A head could not restore a corner where the trunk has the pixel that is repeated."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.a(x).view(-1, 3, 3, 3), (1, 1, 1, 1), mode="reflect")
        return s.h(s.act(y))

    model = Net(forward, a=nn.Linear(4, 27), act=nn.Dropout(), h=nn.Conv2d(3, 2, 1))
    law3(model, 4, partial="act")


def test_merge_where_a_part_of_the_channels_is_looked_at() -> None:
    """Channel 0 of one model is not channel 0 of another: no place to compare pixels."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.b(s.a(x).view(-1, 3, 3, 3))
        _ = y.chunk(2, 1)[1]
        return s.h(y.relu().mean((2, 3)))

    law3(Net(forward, a=nn.Linear(4, 27), b=nn.Conv2d(3, 2, 1), h=nn.Linear(2, 2)), 4)


def test_pinned_features_of_another_axis_are_samples() -> None:
    """The tokens leave, so that they stay where they are: no need for means over them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(s.a(x).view(-1, 3, 4)).softmax(1))

    law3(Net(forward, a=nn.Linear(4, 12), b=nn.Linear(4, 4), h=nn.Linear(4, 2)), 4)


def test_blocks_of_constant_features_are_matched_by_their_values() -> None:
    """A layer that sees nothing gives its bias, whatever comes in."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(0 * x).view(-1, 3, 4).tanh().mean(1))

    law3(Net(forward, b=nn.Linear(4, 12), h=nn.Linear(4, 2)), 4)
