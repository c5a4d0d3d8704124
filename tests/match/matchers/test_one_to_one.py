"""Matching one to one: each feature has one partner in every other model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.helpers.matching import KINDS, groups, partition, quick, random_statistics
from zipfx import match
from zipfx.errors import ZipError
from zipfx.match import Identity, Permute
from zipfx.match.matchers.matching import Matching
from zipfx.observe.statistics import Statistics


def total_similarity(matching: Matching, similarity: NDArray[np.float64]) -> float:
    """Similarity summed over all pairs within the groups."""
    pairs = (pair for group in groups(matching) for pair in itertools.combinations(group, 2))
    return float(sum(similarity[pair] for pair in pairs))


class TestPermute:
    @quick
    @given(seed=st.integers(0, 10**6), n=st.integers(1, 5), kind=st.sampled_from(KINDS))
    def test_two_models_reach_the_optimum(self, seed: int, n: int, kind: str) -> None:
        statistics = random_statistics(seed, (n, n), kind)
        similarity = statistics.similarity().numpy()
        matching = Permute()(statistics, n)
        best = max(
            similarity[np.arange(n), [n + i for i in order]].sum()
            for order in itertools.permutations(range(n))
        )
        assert matching.of(0).tolist() == list(range(n))
        assert total_similarity(matching, similarity) == pytest.approx(best, abs=1e-12)

    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
    def test_no_single_model_can_be_improved(self, seed: int, kind: str) -> None:
        n, models = 4, 3
        statistics = random_statistics(seed, (n,) * models, kind)
        similarity = statistics.similarity().numpy()
        matching = Permute()(statistics, n)
        reached = total_similarity(matching, similarity)
        for model, order in itertools.product(range(models), itertools.permutations(range(n))):
            changed = matching.assignment.clone().reshape(models, n)
            changed[model] = changed[model][list(order)]
            other = Matching(changed.flatten(), statistics.sizes, n)
            assert total_similarity(other, similarity) <= reached + 1e-9

    @settings(max_examples=15, deadline=None)
    @given(seed=st.integers(0, 10**6), models=st.integers(2, 4))
    def test_does_not_depend_on_the_order_of_the_models(self, seed: int, models: int) -> None:
        n = 6
        statistics = random_statistics(seed, (n,) * models)
        expected = partition(Permute()(statistics, n), range(models * n))
        for order in itertools.permutations(range(models)):
            index = torch.arange(models * n).reshape(models, n)[list(order)].flatten()
            moved = Statistics(
                40, statistics.mean[index], statistics.covariance[index][:, index], (n,) * models
            )
            matching = Permute()(moved, n)
            assert matching.of(0).tolist() == list(range(n))
            assert partition(matching, index.tolist()) == expected

    @pytest.mark.parametrize("models", [1, 2, 3, 5])
    def test_finds_a_hidden_permutation(self, models: int) -> None:
        rng, n = np.random.default_rng(0), 20
        features = rng.normal(size=(100, n))
        orders = [rng.permutation(n) for _ in range(models)]
        side_by_side = np.concatenate([features[:, order] for order in orders], axis=1)
        noisy = torch.from_numpy(side_by_side + 0.5 * rng.normal(size=side_by_side.shape))
        statistics = Statistics(100, noisy.mean(0), torch.cov(noisy.T), (n,) * models)
        matching = Permute()(statistics, n)
        for model, order in enumerate(orders):
            assert torch.equal(torch.from_numpy(orders[0])[matching.of(model)],
                               torch.from_numpy(order))  # fmt: skip


def test_identity_matches_by_position() -> None:
    assert Identity()(random_statistics(0, (2, 2, 2)), 2).assignment.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("name", ["identity", "permute"])
@pytest.mark.parametrize(("sizes", "merged"), [((2, 3), 2), ((2, 2), 3), ((2, 2), 1)])
def test_one_to_one_needs_equal_sizes(name: str, sizes: tuple[int, ...], merged: int) -> None:
    with pytest.raises(ZipError, match=rf"'{name}' pairs .* have \({sizes[0]}, {sizes[1]}\)"):
        match.resolve(name)(random_statistics(0, sizes), merged)
