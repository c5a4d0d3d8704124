"""Least squares from moments is that of the books."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.helpers.strangers import moments
from zipfx.repair.ridge import Missed, Normal, fit


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("samples", [5, 60])
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_ridge_regression_is_that_of_the_books(few: int, samples: int, ridge: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, samples, 6).double() + 3
    y = torch.randn(2, samples, 3).double() - 2
    anchor = torch.randn(2, 3, 6).double()
    index = torch.tensor([2, 0])
    normal = Normal.of(moments(x, y, few), 6, index)
    weight, bias = normal.solve(*normal.start(anchor[:, index]), ridge)
    for g in range(2):
        a, b = x[g] - x[g].mean(0), (y[g] - y[g].mean(0))[:, index]
        drawn = anchor[g, index]
        drawn = drawn * ((a @ drawn.T * b).sum(0) / (a @ drawn.T).square().sum(0))[:, None]
        least = ridge * a.var(0, correction=0).mean() * samples
        stacked = torch.cat([a, least.sqrt() * torch.eye(6).double()])
        target = torch.cat([b, least.sqrt() * drawn.T])
        expected = torch.linalg.lstsq(stacked, target).solution.T
        assert torch.allclose(weight[g], expected, rtol=1e-7, atol=1e-9)
        level = y[g].mean(0)[index] - expected @ x[g].mean(0)
        assert torch.allclose(bias[g], level, rtol=1e-7, atol=1e-8)
        output = x[g] @ weight[g].T + bias[g]
        loss = (output - y[g][:, index]).square().mean(0)
        assert torch.allclose(normal.loss((weight, bias))[g], loss, rtol=1e-8)


@pytest.mark.parametrize("few", [0, 1000])
def test_without_a_bias_nothing_is_centred(few: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1, 50, 4).double() + 2, torch.randn(1, 50, 2).double() + 1
    normal = Normal.of(moments(x, y, few), 4, torch.arange(2), centred=False)
    weight, bias = normal.solve(*normal.start(torch.zeros(1, 2, 4).double()), 0.0)
    assert not bias.any()
    expected = torch.linalg.lstsq(x[0], y[0]).solution.T
    assert torch.allclose(weight[0], expected, atol=1e-9)


def test_an_activation_s_flat_side_asks_for_nothing() -> None:
    """Alternating: outputs that are on the flat side with their targets are left where they are."""
    torch.manual_seed(0)
    x, y = torch.randn(1, 400, 6).double(), torch.randn(1, 400, 3).double()
    y[..., 0] = (x[..., 0] * 3).clamp(min=-0.1)  # beyond the bend anything is right
    asked = [torch.ones(1, 3, dtype=torch.bool)]
    start = torch.zeros(1, 3, 6).double(), torch.zeros(1, 3).double()
    solution = fit([moments(x, y, 0)], [moments(x, y, 0)], 6, asked, start, (0.0,))

    def loss(weights: tuple[Tensor, Tensor]) -> Tensor:
        output = x @ weights[0].mT + weights[1].unsqueeze(1)
        return (output.relu() - y.relu()).square().mean(1)[0]

    losses = [loss(solution.weights)]
    for _ in range(30):
        missed = Missed(solution.parts[0].normal.x, 3)
        output = x @ solution.weights[0].mT + solution.weights[1].unsqueeze(1)
        eased = torch.where(y <= 0, output.clamp(max=0), y)
        missed.add(x, eased - output)
        solution = solution.corrected(start[0], [missed])
        losses.append(loss(solution.weights))
    assert float(losses[-1][0]) < 0.05 * float(losses[0][0])
    assert all(float((b - a).max()) < 0.05 for a, b in itertools.pairwise(losses))
