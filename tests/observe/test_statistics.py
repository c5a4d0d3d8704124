from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.matching import quick, samples, statistics_of
from zipfx import Statistics, ZipError

EXTREME = st.sampled_from([0.0, 1.0, -1.0, 1e-320, 1e-160, 1e-8, 3.0, -7e154, 1.7e308, -1.7e308])


def of(features: Tensor, resolution: float = 2**-52) -> Statistics:
    covariance = torch.cov(features.T.double())
    return Statistics(len(features), features.double().mean(0), covariance, (features.shape[1],),
                      resolution)  # fmt: skip


def with_constants(mean: list[float], variance: list[float]) -> Statistics:
    covariance = torch.diag(torch.tensor(variance, dtype=torch.float64))
    return Statistics(9, torch.tensor(mean, dtype=torch.float64), covariance, (len(mean),))


def test_correlation_is_numpys() -> None:
    features = torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = features @ torch.randn(7, 7, generator=torch.Generator().manual_seed(1)).double() + 3
    correlation = of(features).correlation()
    assert correlation.dtype == torch.float64
    np.testing.assert_allclose(correlation, np.corrcoef(features.T), rtol=0, atol=1e-13)
    lost = correlation - of(features).similarity()  # by unequal means, to tell ties apart
    assert 0 <= lost.min() < lost.max() <= 1e-6


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_never_nan_exactly_symmetric_and_in_range(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 5))
    column = st.lists(EXTREME, min_size=total, max_size=total)
    mean = torch.tensor(data.draw(column), dtype=torch.float64)
    rows = data.draw(st.lists(column, min_size=total, max_size=total))
    lower = torch.tensor(rows, dtype=torch.float64).reshape(total, total).tril()
    covariance = lower + lower.tril(-1).T
    covariance.diagonal().abs_()
    statistics = Statistics(1, mean, covariance, (total,))
    correlation, similarity = statistics.correlation(), statistics.similarity()
    for matrix, lowest in ((correlation, -1), (similarity, -3)):
        assert matrix.shape == (total, total)
        assert not matrix.isnan().any()
        assert torch.equal(matrix, matrix.T)
        assert ((matrix >= lowest) & (matrix <= 1)).all()
        assert (matrix.diagonal() == 1).all()
    fixed = statistics.constant
    assert (similarity[fixed][:, ~fixed] <= -2).all()
    assert (similarity[fixed][:, fixed] >= 0).all()
    off = ~torch.eye(total, dtype=torch.bool)
    assert (correlation[(fixed[:, None] | fixed) & off] == 0).all()


def test_constant_allows_for_the_rounding_of_the_activations() -> None:
    eps = torch.finfo(torch.float32).eps
    statistics = with_constants(
        mean=[0.0, 0.0, 5.0, 5.0, 5.0, -5.0, 0.0],
        variance=[
            0.0, (3 * eps * 5) ** 2, 0.0, (15 * eps * 5) ** 2, (17 * eps * 5) ** 2,
            (15 * eps * 5) ** 2, (5 * eps * 5) ** 2,
        ],
    )  # fmt: skip
    assert statistics.constant.tolist() == [True, True, True, True, False, True, False]
    assert with_constants([0.0, 0.0], [0.0, 1e-300]).constant.tolist() == [True, False]


def test_rounding_noise_of_float32_constants_is_no_correlation() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 1 + torch.randint(-4, 5, (100, 2), generator=generator) * torch.finfo().eps
    assert of(noise * 3.7, torch.finfo(torch.float32).eps).constant.all()
    assert not of(noise * 3.7).constant.any()


def test_similarity_of_constants_worked() -> None:
    similarity = with_constants([0.0, 0.0, 1.0, 3.0, -3.0, 2.0], [0, 0, 0, 0, 0, 1]).similarity()
    assert similarity[0].tolist() == [1, 1, 0, 0, 0, 1 / 3 - 3]
    assert similarity[2].tolist() == [0, 0, 1, 0.5, 0, -2.5]
    assert similarity[3].tolist() == [0, 0, 0.5, 1, 0, -2.5]
    assert similarity[5, 5] == 1


def test_correlation_survives_rounding_above_one() -> None:
    covariance = torch.tensor([[1.0, 1.0 + 1e-7], [1.0 + 1e-7, 1.0]], dtype=torch.float64)
    statistics = Statistics(9, torch.zeros(2, dtype=torch.float64), covariance, (1, 1))
    assert statistics.correlation().tolist() == [[1, 1], [1, 1]]


def test_small_asymmetry_is_averaged_away() -> None:
    covariance = torch.tensor([[1.0, 0.5], [0.5 + 4e-7, 1.0]], dtype=torch.float64)
    statistics = Statistics(9, torch.zeros(2, dtype=torch.float64), covariance, (2,))
    correlation = statistics.correlation()
    assert correlation[0, 1] == correlation[1, 0] == pytest.approx(0.5 + 2e-7, abs=1e-15)


ZEROS = torch.zeros(2, dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"covariance": EYE[:1]}, r"shape \(1, 2\): it must be square"),
        ({"covariance": EYE[0]}, r"shape \(2,\): it must be square"),
        ({"sizes": (1, 2)}, r"\(1, 2\) sum to 3 .* shape \(2,\) .* \(2, 2\).*\(3,\) and \(3, 3\)"),
        ({"mean": ZEROS[:1]}, r"sum to 2 features, but the mean has shape \(1,\)"),
        ({"sizes": ()}, r"sizes are \(\)"),
        ({"sizes": (3, -1)}, r"sizes are \(3, -1\)"),
        ({"mean": ZEROS.float()}, r"mean is torch.float32 .* convert both to torch.float64"),
        ({"covariance": EYE.float()}, r"covariance torch.float32"),
        ({"covariance": EYE * math.nan}, r"4 of 4 entries of the covariance are not finite"),
        ({"mean": torch.tensor([0, math.inf]).double()}, r"1 of 2 entries of the mean are not fin"),
        ({"covariance": -EYE}, r"negative diagonal, -1 at feature 0"),
        (
            {"covariance": torch.tensor([[2.0, 0.5], [0.25, 1.0]]).double()},
            r"differs from its transpose by 0.25 at entries up to 2 \(relative 0.12, at most 1e-06",
        ),
        ({"count": 0}, r"of 0 samples"),
        ({"resolution": math.nan}, r"resolution is nan"),
        ({"resolution": -1e-7}, r"resolution is -1e-07"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"count": 9, "mean": ZEROS, "covariance": EYE, "sizes": (1, 1)}
    Statistics(**good)  # type: ignore[arg-type]
    with pytest.raises(ZipError, match=message):
        Statistics(**{**good, **change})  # type: ignore[arg-type]


class TestSimilarity:
    @quick
    @given(st.integers(0, 99), st.integers(2, 6))
    def test_equals_that_of_the_samples(self, seed: int, n: int) -> None:
        x = samples(seed, (n,)) + 0.3
        s = statistics_of(x, (n,))
        apart = 1e-6  # what a difference of means may cost
        cosine = nn.functional.cosine_similarity(x[:, :, None], x[:, None, :], dim=0)
        assert torch.allclose(s.similarity("cosine"), cosine, atol=apart)
        scaled = s.covariance / s.covariance.diagonal().max()
        scaled.fill_diagonal_(1)
        assert torch.allclose(s.similarity("covariance"), scaled, atol=apart)

    def test_no_nan_for_extreme_values(self) -> None:
        mean = torch.tensor([0, 1e200, -1e200, 1e-300], dtype=torch.float64)
        variance = torch.tensor([0, 1e300, 0, 1e-300], dtype=torch.float64)
        s = Statistics(9, mean, torch.diag(variance), (2, 2))
        for kind in ("correlation", "covariance", "cosine"):
            assert bool(s.similarity(kind).isfinite().all())  # type: ignore[arg-type]


def test_a_kind_of_similarity_that_is_unknown() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    statistics = Statistics(9, torch.zeros(2, dtype=torch.float64), eye, sizes=(1, 1))
    with pytest.raises(ZipError, match="similarity='angle' is unknown; choose one of"):
        statistics.similarity("angle")  # type: ignore[arg-type]
