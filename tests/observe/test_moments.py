"""Sums over parts of the samples are those over all of them."""

from __future__ import annotations

import pytest
import torch

from zipfx.observe.moments import Moments


def test_moments_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40, 5).double() * 3 + 100
    for few in (0, 10, 25, 1000):
        parts, firsts = ([Moments(few, n) for _ in range(3)] for n in (None, 2))
        for part, first, piece in zip(parts, firsts, x.split([7, 20, 13], 1), strict=True):
            for one in (part, first):
                one.add(piece[:, :4])
                one.add(piece[:, 4:])
        both = parts[0].merged(parts[1]).merged(parts[2])
        assert both.count == 40
        assert torch.allclose(both.mean, x.mean(1))
        expected = torch.stack([torch.cov(one.T, correction=0) for one in x])
        assert torch.allclose(both.covariance(), expected)
        assert torch.allclose(both.variance(), expected.diagonal(dim1=1, dim2=2))
        some = firsts[0].merged(firsts[1]).merged(firsts[2])
        assert torch.allclose(some.covariance(), expected[:, :2])
        assert (both.samples is not None) == (few >= 40)


@pytest.mark.parametrize("few", [0, 30])
def test_samples_may_come_one_by_one(few: int) -> None:
    """They wait for one another, also when their sum is asked for in between."""
    torch.manual_seed(0)
    x = torch.randn(70, 40).double() + 5
    whole, single = Moments(few), Moments(few)
    whole.add(x)
    for i in range(70):
        single.add(x[i : i + 1])
        if i % 13 == 0:
            assert torch.allclose(single.covariance(), torch.cov(x[: i + 1].T, correction=0))
    assert torch.allclose(single.covariance(), whole.covariance())
    assert torch.allclose(single.merged(whole).mean, x.mean(0))
    assert single.samples is None
