"""What all matchers take and give, whatever they match by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zipfx
from tests.helpers.laws import error
from tests.helpers.matching import quick, samples, statistics_of
from zipfx import LinearMerge, Matching, Statistics, ZipError
from zipfx.match import Identity, Matcher, Permute, Zip
from zipfx.match.matchers.protocol import UNMERGES


@pytest.mark.parametrize("matcher", [Identity(), Permute(), Zip()])
def test_no_features_at_all(matcher: Matcher) -> None:
    none = torch.zeros(0, dtype=torch.float64)
    matching = matcher(Statistics(1, none, none.reshape(0, 0), (0, 0)), 0)
    assert (matching.merged, matching.within, matching.across) == (0, 0, 0)


class TestUnmerge:
    @quick
    @given(st.integers(0, 99), st.integers(1, 6), st.data())
    def test_is_the_least_squares_solution(self, seed: int, n: int, data: st.DataObject) -> None:
        merged = data.draw(st.integers(1, 2 * n))
        x = samples(seed, (n, n)) + 0.5
        found = zipfx.Zip(unmerge="lstsq", ridge=1e-12)(statistics_of(x, (n, n)), merged)
        y = x @ found.merge_matrix().T
        wanted = torch.linalg.lstsq(y, x, driver="gelsd").solution.T
        assert error(wanted, found.unmerge_matrix()) < 1e-6

    @quick
    @given(st.integers(0, 99), st.integers(1, 6), st.floats(1e-9, 1))
    def test_changes_nothing_where_nothing_is_lost(self, seed: int, n: int, ridge: float) -> None:
        x = samples(seed, (n,))
        s = statistics_of(torch.cat([x, x.flip(1)], 1), (n, n))
        plain, better = (zipfx.Permute(unmerge=u, ridge=ridge)(s, n) for u in UNMERGES)
        assert torch.equal(plain.assignment, better.assignment)
        assert torch.equal(plain.unmerge_matrix(), better.unmerge_matrix())

    def test_goes_into_the_weights_of_the_heads(self) -> None:
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
            for _ in range(2)
        ]
        data = [torch.randn(64, 3)]
        seen = {}
        for matcher in (zipfx.Zip(), zipfx.Zip(unmerge="lstsq")):
            merged = zipfx.zip(
                models, data, matcher=matcher, partial="3", repair="none", progress=False
            )
            with torch.no_grad():
                wanted = [m(data[0]) for m in models]
                seen[matcher] = sum(
                    float((a - b).square().sum())
                    for a, b in zip(merged(data[0]), wanted, strict=True)
                )
        plain, better = seen.values()
        assert better < plain

    @pytest.mark.parametrize("option", [{"unmerge": "pin"}, {"similarity": "angle"}])
    def test_unknown_options(self, option: dict[str, str]) -> None:
        with pytest.raises(ZipError, match="is unknown; choose one of"):
            zipfx.Zip(**option)  # type: ignore[arg-type]

    @pytest.mark.parametrize("ridge", [0, -1, 2, float("nan")])
    def test_ridge_out_of_range(self, ridge: float) -> None:
        with pytest.raises(ZipError, match="ridge is"):
            zipfx.Permute(ridge=ridge)


class TestOwnMatchers:
    def models(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)]

    def zipped(self, matcher: object) -> object:
        return zipfx.zip(
            self.models(),
            [torch.randn(9, 3)],
            matcher=matcher,
            progress=False,  # type: ignore[arg-type]
        )

    def test_a_function_is_enough(self) -> None:
        def reverse(s: Statistics, merged: int, *, across_only: bool = False) -> Matching:
            return Matching(torch.cat([torch.arange(4), torch.arange(4).flip(0)]), s.sizes, merged)

        torch.manual_seed(0)
        models = self.models()
        options = {"matcher": reverse, "repair": "none", "progress": False}
        merged = zipfx.zip(models, [torch.randn(9, 3)], **options)
        wanted = (models[0][0].weight + models[1][0].weight.flip(0)) / 2
        assert torch.allclose(merged.get_submodule("0").weight, wanted, atol=1e-6)

    def test_any_matrices(self) -> None:
        """M takes model 1 alone, and U gives its features back."""

        def second(s: Statistics, merged: int, *, across_only: bool = False) -> LinearMerge:
            zero, eye = torch.zeros(4, 4).double(), torch.eye(4).double()
            return LinearMerge(torch.cat([zero, eye], 1), torch.cat([zero, 2 * eye]), s.sizes)

        torch.manual_seed(0)
        models = self.models()
        options = {"matcher": second, "repair": "none", "progress": False}
        merged = zipfx.zip(models, [torch.randn(9, 3)], **options)
        x = torch.randn(5, 3)
        assert torch.allclose(merged.get_submodule("0").weight, models[1][0].weight, atol=1e-6)
        assert torch.allclose(merged.get_submodule("2").weight, models[1][2].weight, atol=1e-6)
        assert merged(x).shape == (5, 2)

    def test_nothing_else(self) -> None:
        with pytest.raises(ZipError, match=r"gave a tuple for space '0'.*zipfx.LinearMerge"):
            self.zipped(lambda s, merged, across_only: (1, 2))

    def test_wrong_shapes(self) -> None:
        def small(s: Statistics, merged: int, *, across_only: bool = False) -> LinearMerge:
            return LinearMerge(torch.zeros(3, 8).double(), torch.zeros(8, 3).double(), s.sizes)

        with pytest.raises(ZipError, match=r"gave 3 merged features from \(4, 4\).*needs 4"):
            self.zipped(small)
        with pytest.raises(ZipError, match=r"unmerge matrix has shape \(3, 8\).*must be \(8, 3\)"):
            LinearMerge(torch.zeros(3, 8).double(), torch.zeros(3, 8).double(), (4, 4))
        broken = torch.zeros(3, 8).double()
        broken[0, :2] = torch.nan
        with pytest.raises(ZipError, match="2 of 24 entries of the merge matrix are not finite"):
            LinearMerge(broken, torch.zeros(8, 3).double(), (4, 4))
