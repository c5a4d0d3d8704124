"""A layer seen as y = W x + b computes what the module computes, also once others are written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zipfx.observe.moments import Moments
from zipfx.repair.layers.convolution import Convolution, Transposed
from zipfx.repair.layers.kinds import layer_of
from zipfx.repair.layers.layer import Layer, samples
from zipfx.repair.layers.linear import LinearLayer
from zipfx.repair.layers.scaled import BatchNorm, GroupNorm, LayerNorm

CLOSE = 1e-11


def convolutions() -> list[tuple[nn.Module, tuple[int, ...]]]:
    found: list[tuple[nn.Module, tuple[int, ...]]] = []
    for groups, stride, apart, padding, mode in itertools.product(
        (1, 2), (1, 2), (1, 2), (0, 1, "same"), ("zeros", "reflect")
    ):
        if padding != "same" or stride == 1:
            conv = nn.Conv2d(4, 6, 3, stride, padding, apart, groups, padding_mode=mode)
            found.append((conv, (4, 9, 8)))
    for groups, stride, apart, padding, more in itertools.product(
        (1, 2), (1, 2, 3), (1, 2), (0, 1, 3), (0, 1)
    ):
        if more < max(stride, apart):
            conv = nn.ConvTranspose2d(4, 6, (3, 2), stride, padding, more, groups, dilation=apart)
            found.append((conv, (4, 5, 6)))
    found += [
        (nn.Conv1d(4, 4, 3, groups=4), (4, 9)),
        (nn.Conv2d(4, 6, (3, 2), bias=False), (4, 7, 7)),
        (nn.Conv3d(4, 4, 2), (4, 4, 5, 3)),
        (nn.ConvTranspose1d(4, 6, 3, 2, groups=2), (4, 7)),
        (nn.ConvTranspose3d(2, 4, 2, 2), (2, 3, 2, 3)),
    ]
    return found


LAYERS = [
    *convolutions(),
    (nn.Linear(5, 7), (5,)),
    (nn.Linear(5, 7, bias=False), (3, 5)),
    (nn.Linear(5, 7), (2, 3, 5)),
    (nn.BatchNorm2d(5), (5, 4, 3)),
    (nn.BatchNorm1d(5), (5,)),
    (nn.LayerNorm(5), (5,)),
    (nn.LayerNorm(5, bias=False), (2, 3, 5)),
    (nn.RMSNorm(5), (3, 5)),
    (nn.GroupNorm(3, 6), (6, 4, 3)),
]
KINDS = [
    (nn.Linear(2, 2), LinearLayer),
    (nn.Conv1d(2, 2, 3), Convolution),
    (nn.ConvTranspose2d(2, 2, 3), Transposed),
    (nn.BatchNorm3d(2), BatchNorm),
    (nn.RMSNorm(2), LayerNorm),
    (nn.GroupNorm(1, 2), GroupNorm),
]
SCALES = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def norms(module: nn.Module) -> list[nn.Module | None]:
    """Norms that can follow a module."""
    outputs = getattr(module, "out_channels", None) or getattr(module, "out_features", None)
    if isinstance(module, SCALES):
        return [None]
    rank = len(getattr(module, "kernel_size", (1,)))
    kind: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[rank]
    return [None, kind(outputs), kind(outputs, affine=False)]


def randomised(module: nn.Module) -> nn.Module:
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if t.is_floating_point():
            t.data.normal_()
            if name.endswith("running_var"):
                t.data.abs_().add_(0.5)
    return module.double().eval()


def matrices(layer: Layer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """All inputs (G, S, n) and outputs (G, S, o)."""
    results = layer.results(y)
    dims = results.ndim - 3
    where: Any = (dims, 1, [0] * dims, torch.arange(len(results)))
    return samples(layer.patches(x), *where), samples(results, *where)


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=[str(m) for m, _ in LAYERS])
def test_a_layer_is_its_weight_and_bias(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for norm in norms(module):
        if len(shape) > 1 and isinstance(module, nn.Linear) and norm is not None:
            continue  # there a BatchNorm is of positions, not of features
        whole = nn.Sequential(randomised(module), *([] if norm is None else [randomised(norm)]))
        layer = layer_of(module, norm)
        assert layer is not None
        x = torch.randn(3, *shape).double()
        inputs, outputs = matrices(layer, x, whole(x).detach())
        weight, bias = layer.folded()
        assert float((inputs @ weight.mT + bias.unsqueeze(1) - outputs).abs().max()) < CLOSE
        # some of the outputs get other weights
        other, shift = torch.randn_like(weight), torch.randn_like(bias) * layer.takes_bias
        rows = torch.rand(bias.shape) < 0.7
        moments = Moments()
        moments.add(inputs)
        measured = layer.measured(other)
        mean = (measured @ moments.mean.unsqueeze(-1)).squeeze(-1)
        variance = ((measured @ moments.covariance()) * measured).sum(-1)
        layer.write(other, shift, rows, mean, variance)
        _, outputs = matrices(layer, x, whole(x).detach())
        weight = torch.where(rows.unsqueeze(-1), other, weight)
        bias = torch.where(rows, shift, bias)
        assert float((inputs @ weight.mT + bias.unsqueeze(1) - outputs).abs().max()) < CLOSE


def test_a_norm_gets_the_statistics_of_the_outputs() -> None:
    torch.manual_seed(0)
    conv, norm = randomised(nn.Conv2d(3, 4, 3)), randomised(nn.BatchNorm2d(4))
    layer, x = layer_of(conv, norm), torch.randn(5, 3, 8, 8).double()
    assert layer is not None
    inputs, _ = matrices(layer, x, conv(x))
    weight, bias = torch.randn_like(layer.weight()), torch.randn_like(layer.bias)
    mean, variance = (inputs @ weight.mT).mean(1), (inputs @ weight.mT).var(1, correction=0)
    layer.write(weight, bias, torch.ones_like(bias, dtype=torch.bool), mean, variance)
    y = conv(x)
    assert torch.allclose(norm.running_mean, y.mean((0, 2, 3)))
    assert torch.allclose(norm.running_var, y.var((0, 2, 3), correction=0))
    # so training goes on where it was
    assert torch.allclose(norm(y), norm.train()(y), rtol=1e-9, atol=1e-9)


def test_some_positions_are_those_of_a_grid() -> None:
    x = torch.arange(2 * 1 * 5 * 6, dtype=torch.float64).reshape(2, 1, 5, 6)
    layer = layer_of(nn.Conv2d(1, 1, 1).double())
    assert layer is not None
    found = samples(layer.patches(x), 2, 2, [1, 0], torch.tensor([1]))
    assert found.flatten().tolist() == x[1, 0, 1::2, 0::2].flatten().tolist()


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "module",
    [
        Own(2, 2),
        nn.BatchNorm1d(3, affine=False),
        nn.LayerNorm(3, elementwise_affine=False),
        nn.GroupNorm(1, 3, affine=False),
        nn.Embedding(3, 2),
    ],
)
def test_what_is_no_such_layer_is_none(module: nn.Module) -> None:
    assert layer_of(module) is None


@pytest.mark.parametrize(("module", "kind"), KINDS, ids=[str(m) for m, _ in KINDS])
def test_of_what_kind_a_layer_is(module: nn.Module, kind: type[Layer]) -> None:
    assert type(layer_of(module)) is kind


def test_a_norm_of_several_dimensions_is_left_alone() -> None:
    layer = layer_of(nn.LayerNorm([4, 5]))
    assert layer is not None
    assert not layer.takes(torch.Size([2, 4, 5]))
