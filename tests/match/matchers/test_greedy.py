"""Joins that are made many at a time are those that are made one at a time, and at alpha = 1 they
are those of complete linkage."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

import zipfx
from tests.helpers.matching import partition, quick, samples, statistics_of
from zipfx import Statistics
from zipfx.match.matchers.greedy import join_in_rounds
from zipfx.observe import SIMILARITIES, Similarity


class TestRounds:
    @quick
    @given(st.integers(0, 999), st.integers(2, 16), st.booleans(), st.data())
    def test_equal_one_join_at_a_time(
        self, seed: int, n: int, ties: bool, data: st.DataObject
    ) -> None:
        alpha = data.draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))
        merged = data.draw(st.integers(1, n))
        s = statistics_of(samples(seed, (n,), ties), (n,))
        first = join_in_rounds(s.similarity(), alpha, merged, np.zeros(n, np.int64), False)
        rank = torch.from_numpy(np.unique(first, return_inverse=True)[1])
        assert torch.equal(rank, zipfx.Zip(alpha)(s, merged).assignment)

    @quick
    @given(st.integers(0, 999), st.integers(1, 9), st.booleans())
    def test_across_two_models(self, seed: int, n: int, ties: bool) -> None:
        s = statistics_of(samples(seed, (n, n), ties), (n, n))
        first = join_in_rounds(s.similarity(), 0.3, n, np.repeat([0, 1], n), True)
        rank = torch.from_numpy(np.unique(first, return_inverse=True)[1])
        assert torch.equal(rank, zipfx.Zip(0.3, beta=0)(s, n).assignment)


def complete_linkage(distance: NDArray[np.float64], merged: int) -> set[frozenset[int]]:
    """The clusters of scipy, all distances being different from one another."""
    tree = linkage(squareform(distance, checks=False), method="complete")
    clusters = cut_tree(tree, n_clusters=merged).flatten()
    return {frozenset(np.flatnonzero(clusters == c).tolist()) for c in np.unique(clusters)}


class TestCompleteLinkage:
    """A group is as similar to others as its least similar member, at alpha = 1: on distances
    1 - similarity that is complete linkage, whichever models the features are of (beta = 1)."""

    @quick
    @given(
        seed=st.integers(0, 10**6),
        sizes=st.sampled_from([(9,), (5, 5), (4, 4, 4), (2, 7, 3)]),
        kind=st.sampled_from(SIMILARITIES),
        data=st.data(),
    )
    def test_zip_is_that_of_scipy(
        self, seed: int, sizes: tuple[int, ...], kind: Similarity, data: st.DataObject
    ) -> None:
        total = sum(sizes)
        merged = data.draw(st.integers(2, total))  # scipy cuts no tree into one
        s = statistics_of(samples(seed, sizes), sizes)
        found = zipfx.Zip(alpha=1, beta=1, similarity=kind)(s, merged)
        wanted = complete_linkage(1 - s.similarity(kind).numpy(), merged)
        assert partition(found, range(total)) == wanted

    @quick
    @given(st.integers(0, 10**6), st.integers(2, 14), st.data())
    def test_so_are_rounds(self, seed: int, n: int, data: st.DataObject) -> None:
        merged = data.draw(st.integers(2, n))
        s = statistics_of(samples(seed, (n,)), (n,))
        first = join_in_rounds(s.similarity(), 1, merged, np.zeros(n, np.int64), False)
        found = {frozenset(np.flatnonzero(first == i).tolist()) for i in np.unique(first)}
        assert found == complete_linkage(1 - s.similarity().numpy(), merged)

    def test_a_smaller_alpha_or_beta_asks_for_more(self) -> None:
        """Complete linkage joins 2 to 0 and 1 first: alpha makes that dear, beta forbids it."""
        correlation = torch.eye(4, dtype=torch.float64)
        for i, j, value in ((0, 1, 0.9), (0, 2, 0.8), (1, 2, 0.85), (2, 3, 0.5), (1, 3, 0.2)):
            correlation[i, j] = correlation[j, i] = value
        s = Statistics(9, torch.zeros(4, dtype=torch.float64), correlation, (2, 2))
        linked = complete_linkage(1 - correlation.numpy(), 2)
        assert linked == {frozenset({0, 1, 2}), frozenset({3})}
        assert partition(zipfx.Zip(alpha=1, beta=1)(s, 2), range(4)) == linked
        for other in (zipfx.Zip(alpha=0.3, beta=1), zipfx.Zip(alpha=1, beta=0)):
            assert partition(other(s, 2), range(4)) != linked
