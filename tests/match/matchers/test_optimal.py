"""The best pairs there are, against a search through all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zipfx
from tests.helpers.matching import joined, quick, samples, statistics_of
from zipfx import ZipError
from zipfx.match.matchers import optimal


def best_pairs(similarity: Tensor, free: list[int], count: int) -> float:
    """The largest sum of `count` disjoint pairs, by trying all."""
    if not count:
        return 0.0
    if len(free) < 2 * count:
        return -np.inf
    a, rest = free[0], free[1:]
    tried = (
        float(similarity[a, b]) + best_pairs(similarity, [f for f in rest if f != b], count - 1)
        for b in rest
    )
    return max([best_pairs(similarity, rest, count), *tried])


class TestOptimal:
    @quick
    @given(st.integers(0, 999), st.integers(1, 8), st.booleans(), st.data())
    def test_finds_the_best_pairs(self, seed: int, n: int, ties: bool, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, n // 2))
        s = statistics_of(samples(seed, (n,), ties), (n,))
        found = zipfx.Optimal()(s, n - count)
        similarity = s.similarity()
        assert int(found.counts.max()) <= 2
        wanted = best_pairs(similarity, list(range(n)), count)
        assert joined(similarity, found.assignment) == pytest.approx(wanted, abs=1e-9)

    @quick
    @given(st.integers(0, 99), st.integers(2, 24), st.booleans())
    def test_both_libraries_agree(self, seed: int, n: int, ties: bool) -> None:
        pytest.importorskip("rustworkx", reason="only networkx is installed")
        s = statistics_of(samples(seed, (n,), ties), (n,))
        with pytest.MonkeyPatch.context() as patch:
            fast = zipfx.Optimal()(s, n - n // 2).assignment
            patch.setattr(optimal, "rustworkx", None)
            assert torch.equal(zipfx.Optimal()(s, n - n // 2).assignment, fast)

    @quick
    @given(st.integers(0, 99), st.integers(1, 6))
    def test_is_never_worse_than_the_greedy_one(self, seed: int, n: int) -> None:
        s = statistics_of(samples(seed, (n, n)), (n, n))
        best, greedy = zipfx.Optimal()(s, n), zipfx.Zip(alpha=0)(s, n)
        of = s.similarity()
        assert joined(of, best.assignment) >= joined(of, greedy.assignment) - 1e-9

    @quick
    @given(st.integers(0, 99), st.integers(2, 3), st.integers(1, 5))
    def test_across_models_only_it_is_permute(self, seed: int, models: int, n: int) -> None:
        s = statistics_of(samples(seed, (n,) * models), (n,) * models)
        for found in (zipfx.Optimal(beta=0)(s, n), zipfx.Optimal()(s, n, across_only=True)):
            assert torch.equal(found.assignment, zipfx.Permute()(s, n).assignment)

    @quick
    @given(st.integers(0, 99), st.integers(1, 9), st.data())
    def test_any_number_of_merged_features(self, seed: int, n: int, data: st.DataObject) -> None:
        merged = data.draw(st.integers(1, n))
        s = statistics_of(samples(seed, (n,)), (n,))
        assert zipfx.Optimal()(s, merged).merged == merged

    def test_says_how_long_it_would_take(self) -> None:
        s = statistics_of(samples(0, (20,)), (20,))
        with pytest.raises(ZipError, match=r"of 20 features .* minutes \(at most 10 .*'zip'"):
            zipfx.Optimal(most=10)(s, 10)

    def test_knows_no_budget(self) -> None:
        with pytest.raises(ZipError, match=r"beta is 0\.5: .*use matcher 'zip'"):
            zipfx.Optimal(beta=0.5)
