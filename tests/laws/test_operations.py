"""Operations that trunks use: what they leave of the features, and that none is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, parameter, sizes

Function = Callable[[Any, Tensor, Tensor], Tensor]


def order(x: Tensor) -> Tensor:
    """Two positions that the input chooses."""
    return x[0, :, 0].argsort()[:2]


def cells(x: Tensor) -> Tensor:
    """Of every token the cell that the input chooses, for each of 8 features."""
    return x.argmax(2).clamp(max=2)[..., None].expand(-1, -1, 8)


BOUNDS = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)

#: of features y (B, 6 tokens, 8) and the input x (B, 6, 5); all 8 features stay
TOKENS: dict[str, Function] = {
    "cumprod": lambda s, y, x: y.cumprod(1),
    "cumprod_": lambda s, y, x: y.clone().cumprod_(1),
    "cumsum_": lambda s, y, x: y.clone().cumsum_(1),
    "cummax": lambda s, y, x: y.cummax(1)[0],
    "cummin": lambda s, y, x: y.cummin(1)[0],
    "index of a running maximum": lambda s, y, x: y.gather(1, y.cummax(1)[1]),
    "floor_divide": lambda s, y, x: y // (1 + s.v.square()),
    "floor_divide_": lambda s, y, x: y.clone().floor_divide_(0.3),
    "bucketize": lambda s, y, x: y + torch.bucketize(y, BOUNDS),
    "searchsorted": lambda s, y, x: y + torch.searchsorted(BOUNDS, y.contiguous()),
    "searchsorted in rows": lambda s, y, x: torch.searchsorted(
        x.sort(2)[0][:, :1].expand(-1, 6, -1).contiguous(), y.contiguous()
    ) * y,
    "renorm": lambda s, y, x: torch.renorm(y, 2, 1, 1.0),
    "renorm of features": lambda s, y, x: torch.renorm(y, 2, 2, 1.0),
    "distances of pairs": lambda s, y, x: y * F.pdist(y[0]).sum(),
    "addmv": lambda s, y, x: y + torch.addmv(s.z, y.flatten(0, 1), s.v).view(-1, 6, 1),
    "addr": lambda s, y, x: y + torch.addr(y[0], x[0, :, 0], s.v),
    "addbmm": lambda s, y, x: y + torch.addbmm(y[0], x @ x.mT, y),
    "baddbmm": lambda s, y, x: torch.baddbmm(y, x @ x.mT, y),
    "index_copy": lambda s, y, x: y.index_copy(1, order(x), y[:, :2]),
    "index_fill": lambda s, y, x: y.index_fill(1, order(x), 0.5),
    "index_reduce": lambda s, y, x: y.index_reduce(1, order(x), y[:, :2], "prod"),
    "scatter_reduce": lambda s, y, x: y.scatter_reduce(1, cells(x), y, "amax"),
    "segment_reduce": lambda s, y, x: torch.segment_reduce(
        y[0].contiguous(), "max", lengths=torch.tensor([2, 4])
    ) + y.mean(1, keepdim=True),
    "softmax of cells": lambda s, y, x: y.exp() / torch.zeros(
        x.shape[0], 3, 8, dtype=y.dtype
    ).scatter_add(1, cells(x), y.exp()).gather(1, cells(x)),
    "masked_scatter": lambda s, y, x: y.masked_scatter(x[..., :1] > 0, y.flip(1)),
    "masked_scatter_": lambda s, y, x: y.clone().masked_scatter_(
        (x[..., :1] > 0).expand_as(y), s.t(x).flatten(0, 1)
    ),
    "cross": lambda s, y, x: torch.linalg.cross(y[:, :3], y[:, 3:], dim=1),
    "tril_": lambda s, y, x: (x @ x.mT).tril_() @ y,
    "circulant": lambda s, y, x: y.roll(1, 1) + y,
}  # fmt: skip

#: of features (B, 6, length ...) of a convolution; all 6 channels stay
IMAGES: dict[str, tuple[int, Function]] = {
    "reflection 3d": (3, lambda s, y, x: F.pad(y, (1, 1, 1, 1, 1, 1), mode="reflect")),
    "replication 3d": (3, lambda s, y, x: F.pad(y, (1, 1, 1, 1, 1, 1), mode="replicate")),
    "circular 3d": (3, lambda s, y, x: F.pad(y, (1, 1, 1, 1, 1, 1), mode="circular")),
    "lp pool 3d": (3, lambda s, y, x: F.lp_pool3d(y, 2.0, 2)),
    "lp pool 1d": (1, lambda s, y, x: F.lp_pool1d(y, 2.0, 2)),
    "area": (2, lambda s, y, x: F.interpolate(y, size=(3, 3), mode="area")),
    "antialiased": (
        2, lambda s, y, x: F.interpolate(y, size=(3, 3), mode="bilinear", antialias=True),
    ),
    "fractional pooling": (
        2,
        lambda s, y, x: F.fractional_max_pool2d(
            y, 2, 3, _random_samples=torch.full((x.shape[0], 6, 2), 0.5, dtype=y.dtype)
        ),
    ),
    "spatial transformer": (
        2,
        lambda s, y, x: F.grid_sample(
            y,
            F.affine_grid(s.theta(y.mean((2, 3))).view(-1, 2, 3), list(y.shape), False),
            align_corners=False,
        ),
    ),
    "steps first": (
        1, lambda s, y, x: torch.conv_tbc(y.permute(2, 0, 1).contiguous(), s.k, s.c, 1)
        .permute(1, 2, 0).contiguous(),
    ),
}  # fmt: skip


def of_tokens(function: Function, width: int = 8) -> Net:
    layers = {"a": nn.Linear(5, 8), "t": nn.Linear(5, 8), "h": nn.Linear(width, 3)}
    weights = {"v": parameter(8), "z": parameter(1)}
    return Net(lambda s, x: s.h(function(s, s.a(x), x)), **layers, **weights)


def unknown(model: nn.Module, x: Tensor) -> list[str]:
    pinned = zipfx.analyze(model, x, verify=False).pinned
    return [p.reason for p in pinned if "not understood" in p.reason]


@pytest.mark.sweep
@pytest.mark.parametrize("name", TOKENS)
def test_operations_on_tokens(name: str) -> None:
    model, x = of_tokens(TOKENS[name]), data(6, 5)
    assert sizes(model, x) == [(8, ())]
    assert unknown(model, x) == []
    example, other = data(6, 5), data(6, 5, seed=1)
    spaces = zipfx.analyze(model, example)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    for batch in (example, other):
        assert torch.allclose(model(batch), twin(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("name", IMAGES)
def test_operations_on_images(name: str) -> None:
    ndim, function = IMAGES[name]
    shape = (3, *(4,) * ndim)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(function(s, s.a(x), x).tanh().flatten(2).mean(2))

    layers = {"a": conv(3, 6, 1), "theta": nn.Linear(6, 6), "h": nn.Linear(6, 3)}
    model = Net(forward, **layers, k=parameter(3, 6, 6), c=parameter(6))
    expected: list[Size] = [(6, ())] * (2 if name == "steps first" else 1)
    assert sizes(model, data(*shape)) == expected
    assert unknown(model, data(*shape)) == []
    law1(model, *shape)
    if name == "steps first":
        law3(model, *shape, seeds=[0])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s, y, x: y.cumprod(2), "aten.cumprod.default is ordered"),
        (lambda s, y, x: y.masked_scatter(y > 0, y.flip(1)), "chosen by data"),
        (lambda s, y, x: y.masked_scatter(x[..., :1] > 0, y.flip(1).flatten()), "chosen by data"),
        (lambda s, y, x: y * F.pdist(y.mean(0).mT).mean(), "rows are compared in pairs"),
        (lambda s, y, x: y.unflatten(2, (2, 4))[..., :3].cross(
            y.unflatten(2, (2, 4))[..., 1:], dim=3).repeat(1, 1, 1, 2)[..., :4].flatten(2),
         "coordinates keep their order"),
        (lambda s, y, x: y * torch.bucketize(x[..., 0], s.v.sort()[0])[..., None],
         "boundaries are sorted"),
    ],
    ids="cumprod masked flattened pairs cross bounds".split(),
)  # fmt: skip
def test_operations_that_keep_an_order(function: Function, reason: str) -> None:
    model, x = of_tokens(function), data(6, 5)
    assert unknown(model, x) == []
    reasons = [p.reason for p in zipfx.analyze(model, x, verify=False).pinned]
    assert any(r.startswith(reason) for r in reasons) or reason == "boundaries are sorted"
    law1(model, 6, 5)


def test_random_numbers_are_no_features_and_touch_none() -> None:
    model, x = of_tokens(lambda s, y, x: y * torch.rand_like(y[..., :1]).gt(-1)), data(6, 5)
    assert sizes(model, x) == [(8, ())]


def test_blocks_on_a_diagonal() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h((s.a(x) @ torch.block_diag(s.u, s.w)).tanh())

    weights = {"u": parameter(3, 4), "w": parameter(5, 6)}
    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(10, 3), **weights)
    assert sizes(model, data(6, 5)) == [(3, ()), (4, ()), (5, ()), (6, ())]
    law1(model, 6, 5)
    law3(model, 6, 5, seeds=[0])


def test_an_operation_in_place_is_known_by_its_name() -> None:
    model, x = of_tokens(lambda s, y, x: y.clone().renorm_(2, 1, 1.0)), data(6, 5)
    assert sizes(model, x) == [(8, ())]
