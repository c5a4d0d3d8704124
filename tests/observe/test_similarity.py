"""Similarities: those of textbooks where features vary, and a rule where they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zipfx import ZipError
from zipfx.observe.similarity import (
    OF_VARYING,
    SIMILARITIES,
    correlation,
    cosine,
    relative_covariance,
    similarity,
)

kinds = st.sampled_from(SIMILARITIES)


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    covariance = torch.cov(x.T, correction=0).reshape(x.shape[1], x.shape[1])
    return x.mean(0), covariance, (x == x[:1]).all(0)


def drawn(seed: int, features: int, constant: int = 0) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(seed).normal(0.5, 1, (50, features)))
    x[:, :constant] = torch.arange(constant) % 3
    return x


def test_of_features_that_vary_they_are_those_of_numpy() -> None:
    x = drawn(0, 7)
    expected = torch.from_numpy(np.corrcoef(x.T.numpy()))
    assert torch.allclose(correlation(*moments(x)), expected, atol=1e-12)
    length = x.norm(dim=0)
    assert torch.allclose(cosine(*moments(x)), x.T @ x / torch.outer(length, length), atol=1e-12)
    covariance = torch.from_numpy(np.cov(x.T.numpy(), bias=True))
    relative = (covariance / covariance.diagonal().max()).fill_diagonal_(1)
    assert torch.allclose(relative_covariance(*moments(x)), relative, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 9), kinds)
def test_they_are_symmetric_bounded_and_never_nan(
    seed: int, features: int, constant: int, kind: str
) -> None:
    mean, covariance, fixed = moments(drawn(seed, features, min(constant, features)))
    given = [t.clone() for t in (mean, covariance, fixed)]
    found = similarity(kind, mean, covariance, fixed)  # type: ignore[arg-type]
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    assert bool(((found >= -3) & (found <= 1)).all())
    assert torch.equal(found.diagonal(), torch.ones_like(mean))
    assert all(torch.equal(a, b) for a, b in zip((mean, covariance, fixed), given, strict=True))


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_the_same_features_in_another_order_are_as_similar(kind: str) -> None:
    x, order = drawn(1, 8, 3), torch.randperm(8)
    found = similarity(kind, *moments(x))  # type: ignore[arg-type]
    other = similarity(kind, *moments(x[:, order]))  # type: ignore[arg-type]
    assert torch.allclose(other, found[order][:, order], atol=1e-12)


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_constants_are_alike_by_their_values_and_unlike_what_varies(kind: str) -> None:
    x = drawn(2, 5)
    x[:, 0], x[:, 1], x[:, 2] = 2.0, 2.0, -1.0
    found = similarity(kind, *moments(x))  # type: ignore[arg-type]
    assert found[0, 1] == 1
    assert -1 <= found[0, 2] < found[0, 1]
    assert bool((found[:3, 3:] < -1).all())  # a varying feature is the last choice of a constant


def test_of_features_with_equal_correlations_the_nearer_in_mean_comes_first() -> None:
    x = torch.randn(50, 1, dtype=torch.float64) + torch.tensor([[1.0, 1.2, 5.0]])
    found = similarity("correlation", *moments(x))
    assert 1 - 1e-5 < found[0, 2] < found[0, 1] < 1


def test_what_is_scaled_has_the_same_correlations_and_cosines() -> None:
    x, by = drawn(3, 6), torch.tensor([1e-3, 1.0, 7.0, 1e4, 0.5, 2.0]).double()
    for kind in (correlation, cosine):
        assert torch.allclose(kind(*moments(x * by)), kind(*moments(x)), atol=1e-9)


def test_more_features_than_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 11, 4)
    whole = {kind: similarity(kind, *moments(x)) for kind in SIMILARITIES}
    monkeypatch.setattr("zipfx.observe.similarity._ROWS", 3)
    for kind in SIMILARITIES:
        assert torch.equal(similarity(kind, *moments(x)), whole[kind])


def test_a_kind_that_is_none_is_an_error() -> None:
    assert set(OF_VARYING) == set(SIMILARITIES)
    with pytest.raises(ZipError, match=r"similarity='distance' is unknown; choose one of \['corr"):
        similarity("distance", *moments(drawn(0, 2)))  # type: ignore[arg-type]
