"""Matching without data, by what reads and what makes the features."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, run
from tests.helpers.matching import quick
from tests.helpers.models import NETS
from zipfx import ZipError


class TestWeights:
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", sorted(NETS))
    def test_finds_permuted_copies_without_data(self, name: str) -> None:
        net = NETS[name]
        model, x = net.build(), net.inputs(4)
        spaces = zipfx.analyze(model, x)
        twins = [spaces.permuted(model, spaces.random_permutations(seed)) for seed in (3, 4)]
        merged = merge([model, *twins], None, matcher="weights", example_inputs=x)
        assert error(run(model, x), run(merged, x)) < EXACT

    @pytest.mark.slow
    @quick
    @given(st.integers(0, 99))
    def test_reaches_the_best_of_all_permutations(self, seed: int) -> None:
        """One hidden layer: the coordinate descent is one assignment, and exact."""
        torch.manual_seed(seed)
        nets = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2)]
        rows = [torch.cat([n[0].weight, n[0].bias[:, None], n[2].weight.T], 1) for n in nets]
        with torch.no_grad():
            best = max(
                itertools.permutations(range(5)),
                key=lambda order: float((rows[0] * rows[1][list(order)]).sum()),
            )
            x = torch.randn(2, 3)
            merged = zipfx.zip(nets, None, matcher="weights", example_inputs=x, progress=False)
            wanted = (nets[0][0].weight + nets[1][0].weight[list(best)]) / 2
            assert torch.allclose(merged.get_submodule("0").weight, wanted, atol=1e-6)

    def test_the_order_of_the_features_does_not_matter(self) -> None:
        torch.manual_seed(0)
        net = NETS["BatchNorm"]
        a, b, x = net.build(), net.build(1000), net.inputs(4)
        spaces = zipfx.analyze(a, x)
        moved = [spaces.permuted(m, spaces.random_permutations(i)) for i, m in enumerate((a, b))]
        one, two = (merge(m, None, matcher="weights", example_inputs=x) for m in ([a, b], moved))
        assert error(run(one, x), run(two, x)) < 1e-10

    def test_input_is_guessed_and_said(self) -> None:
        models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)) for _ in "ab"]
        merged = zipfx.zip(models, None, matcher="weights")
        report = merged.meta["zipfx"]
        assert report.repair == "none"
        assert any("random inputs of shape (2, 3, 32, 32)" in note for note in report.notes)
        assert "nan" not in str(report)

    def test_no_shape_fits(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(3, 3)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                z: Tensor = self.a(x + y)
                return z

        with pytest.raises(ZipError, match=r"takes none of the shapes .*example_inputs"):
            zipfx.zip([Odd(), Odd()], None, matcher="weights")

    def test_refuses_no_sweeps(self) -> None:
        with pytest.raises(ZipError, match="sweeps is 0"):
            zipfx.Weights(sweeps=0)
