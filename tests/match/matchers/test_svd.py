"""The merge of least loss in the features themselves, which no other one beats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zipfx
from tests.helpers.laws import error
from tests.helpers.matching import quick, samples, statistics_of
from zipfx import ZipError


class TestSVD:
    @quick
    @given(st.integers(0, 99), st.integers(1, 5), st.data())
    def test_no_merge_keeps_more(self, seed: int, n: int, data: st.DataObject) -> None:
        sizes, merged = (n, n), data.draw(st.integers(1, 2 * n))
        s = statistics_of(samples(seed, sizes), sizes)

        def lost(found: zipfx.Matching | zipfx.LinearMerge) -> float:
            m = found.merge_matrix()
            best = torch.linalg.lstsq(  # the best U for this M
                m @ s.covariance @ m.T, m @ s.covariance, driver="gelsd"
            ).solution.T
            rest = torch.eye(2 * n).double() - best @ m
            return float((rest @ s.covariance @ rest.T).trace())

        best = zipfx.Svd()(s, merged)
        rest = torch.eye(2 * n).double() - best.unmerge @ best.merge
        mine = float((rest @ s.covariance @ rest.T).trace())
        largest = torch.linalg.eigvalsh(s.covariance).flip(0)
        assert mine == pytest.approx(float(largest[merged:].sum()), abs=1e-9)
        for other in (zipfx.Zip(), zipfx.KMeans(), zipfx.Optimal()):
            assert mine <= lost(other(s, merged)) + 1e-9

    def test_needs_freedom(self) -> None:
        with pytest.raises(ZipError, match="mixes all features"):
            zipfx.Svd()(statistics_of(samples(0, (2, 2)), (2, 2)), 2, across_only=True)

    def test_is_exact_in_a_linear_network_of_low_rank(self) -> None:
        """Nothing but linear layers, and no more directions than merged features."""
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).double() for _ in range(2)]
        data = [torch.randn(64, 3).double()]
        merged = zipfx.zip(models, data, matcher="svd", repair="none", progress=False)
        with torch.no_grad():
            mean = (models[0](data[0]) + models[1](data[0])) / 2
            # a constant part has no variance: it is what the merge may lose
            kept, wanted = merged(data[0]), mean
            assert error(wanted - wanted.mean(0), kept - kept.mean(0)) < 1e-10
