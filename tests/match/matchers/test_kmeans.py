"""k-means of features: where Lloyd's iterations end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zipfx
from tests.helpers.matching import quick, samples, statistics_of
from zipfx import ZipError


class TestKMeans:
    @quick
    @given(st.integers(0, 999), st.integers(1, 10), st.booleans(), st.data())
    def test_no_feature_is_nearer_to_another_mean(
        self, seed: int, n: int, ties: bool, data: st.DataObject
    ) -> None:
        """The condition in which Lloyd's iterations end, computed on the features themselves."""
        merged = data.draw(st.integers(1, n))
        x = samples(seed, (n,))
        s = statistics_of(x[:, torch.randint(n, (n,))] if ties else x, (n,))
        found = zipfx.KMeans(similarity="cosine")(s, merged)
        values, vectors = torch.linalg.eigh(s.similarity("cosine"))
        points = vectors * values.clamp(min=0).sqrt()  # their inner products are the similarities
        means = found.merge_matrix() @ points
        distance = torch.cdist(points, means)
        own = distance.gather(1, found.assignment[:, None]).flatten()
        # up to ties, and to the last member of a cluster, which must stay
        single = found.counts[found.assignment] == 1
        assert bool(((own <= distance.min(1)[0] + 1e-5) | single).all())

    def test_groups_copies(self) -> None:
        x = samples(0, (6,))[:, [0, 1, 2, 0, 2, 1, 0, 0]]
        found = zipfx.KMeans()(statistics_of(x, (4, 4)), 3)
        assert found.assignment.tolist() == [0, 1, 2, 0, 2, 1, 0, 0]

    def test_refuses_no_iterations(self) -> None:
        with pytest.raises(ZipError, match="iterations is 0"):
            zipfx.KMeans(iterations=0)
