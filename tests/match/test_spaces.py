"""Space by space: statistics are taken once, blocks come before what is inside, runs stay apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn

import zipfx
from tests.helpers.matching import correlated, random_statistics
from zipfx import LinearMerge, Matching, Statistics, ZipError
from zipfx.match import Identity, Permute, Zip, resolve
from zipfx.match.spaces import _best_sums, block_similarity, match_space, match_spaces


def layer(**changes: Any) -> zipfx.Space:
    """The one space of 6 features of a small network."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    (found,) = zipfx.analyze(model, torch.randn(2, 3))
    return replace(found, **changes)


class Heads(nn.Module):
    """Attention of 3 heads of 2 features each, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, 6), nn.Linear(6, 2)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inp(x).relu()
        z: torch.Tensor = self.out(self.attention(y, y, y, need_weights=False)[0])
        return z


def test_statistics_of_a_space_are_taken_once_and_in_turn() -> None:
    spaces = list(zipfx.analyze(Heads(), torch.randn(2, 4, 3)))
    assert any(s.of_blocks for s in spaces)
    taken: list[str] = []

    def take(name: str) -> Statistics:
        taken.append(name)
        size = next(s.size for s in spaces if s.name == name)
        return random_statistics(len(taken), (size, size))

    found = match_spaces(Permute(), spaces, take, 2)
    assert list(found) == [s.name for s in spaces]
    assert len(taken) == len(set(taken))
    assert set(taken) == {s.name for s in spaces if not s.of_blocks}


def test_features_follow_their_blocks() -> None:
    """Head i of model 1 is head 2 - i of model 0: its features are found behind it."""
    spaces = list(zipfx.analyze(Heads(), torch.randn(2, 4, 3)))
    blocks = next(s for s in spaces if s.of_blocks)
    inner = {s.name: s for s in spaces if s.within}
    move = torch.tensor([4, 5, 2, 3, 0, 1])

    def take(name: str) -> Statistics:
        if name not in inner:
            return random_statistics(1, (6, 6))
        cross = torch.zeros(12, 12)
        cross[torch.arange(6), 6 + move] = 0.9
        return correlated(cross, (6, 6))

    found = match_spaces(Permute(), spaces, take, 2)
    heads = found[blocks.name][0]
    assert isinstance(heads, Matching)
    assert heads.of(1).tolist() == [2, 1, 0]
    for name in inner:
        merge, pairs = found[name]
        assert isinstance(merge, Matching)
        assert torch.equal(merge.of(0), merge.of(1))  # in the order of the matched blocks
        assert pairs


def test_of_nothing_known_features_stay_in_order() -> None:
    spaces = [layer()]
    for matcher in (Identity(), Permute()):
        ((merge, _),) = match_spaces(matcher, spaces, None, 3).values()
        assert isinstance(merge, Matching)
        assert [merge.of(k).tolist() for k in range(3)] == [list(range(6))] * 3


@pytest.mark.parametrize("matcher", ["zip", "permute", "optimal", "svd", "kmeans"])
def test_runs_of_features_are_matched_apart(matcher: str) -> None:
    runs = layer(blocks=(4, 2))
    statistics = random_statistics(3, (6, 6))
    found = match_space(resolve(matcher), runs, statistics)
    merge, unmerge = found.merge_matrix(), found.unmerge_matrix()
    for mine, new in (([0, 1, 2, 3, 6, 7, 8, 9], [0, 1, 2, 3]), ([4, 5, 10, 11], [4, 5])):
        outside = [i for i in range(12) if i not in mine]
        assert not merge[new][:, outside].any()
        assert not unmerge[outside][:, new].any()
        of = statistics.select(torch.tensor(mine), (len(new),) * 2)
        alone = match_space(resolve(matcher), layer(size=len(new)), of)
        assert torch.allclose(merge[new][:, mine], alone.merge_matrix())
        assert torch.allclose(unmerge[mine][:, new], alone.unmerge_matrix())


def test_blocks_are_matched_one_to_one_whatever_the_matcher() -> None:
    found = match_space(Zip(), layer(of_blocks=True), random_statistics(5, (6, 6)))
    assert isinstance(found, Matching)
    assert all(sorted(found.of(k).tolist()) == list(range(6)) for k in range(2))


def test_tied_features_are_joined_across_only() -> None:
    asked: list[bool] = []

    def own(statistics: Statistics, merged: int, *, across_only: bool = False) -> Matching:
        asked.append(across_only)
        return Permute()(statistics, merged)

    match_space(own, layer(tied=True), random_statistics(5, (6, 6)))
    match_space(own, layer(), random_statistics(5, (6, 6)))
    assert asked == [True, False]


# ------------------------------------------------------------------ matchers of others
def broken(statistics: Statistics, merged: int, *, across_only: bool = False) -> Matching:
    raise IndexError("of mine")


def wrong_type(statistics: Statistics, merged: int, *, across_only: bool = False) -> Any:
    return [0] * merged


def too_few(statistics: Statistics, merged: int, *, across_only: bool = False) -> LinearMerge:
    eye = torch.eye(merged - 1, 2 * merged, dtype=torch.float64)
    return LinearMerge(eye, eye.T, statistics.sizes)


@pytest.mark.parametrize(
    ("matcher", "message"),
    [
        (broken, "the matcher fails for space '0' (6 features): of mine"),
        (wrong_type, "the matcher gave a list for space '0': it must return a zipfx.Matching"),
        (too_few, "the matcher gave 5 merged features from (6, 6) for space '0', which needs 6"),
    ],
)
def test_what_goes_wrong_in_a_matcher_names_it_and_the_space(matcher: Any, message: str) -> None:
    with pytest.raises(ZipError, match=re.escape(message)):
        match_space(matcher, layer(), random_statistics(5, (6, 6)))


# ------------------------------------------------------------------ blocks
def best_sums(cross: np.ndarray, table: np.ndarray) -> np.ndarray:
    """One assignment for every pair of blocks."""
    found = np.empty((len(table),) * 2)
    for i, rows in enumerate(table):
        for j, columns in enumerate(table):
            score = cross[np.ix_(rows, columns)]
            found[i, j] = score[linear_sum_assignment(score, maximize=True)].sum()
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 5))
def test_blocks_are_as_alike_as_their_best_matched_features(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.permutation(n * m).reshape(n, m)
    cross = rng.uniform(-1, 1, (n * m, n * m))
    assert np.allclose(_best_sums(cross, table), best_sums(cross, table))


def test_of_many_blocks_the_best_are_found_all_the_same() -> None:
    rng = np.random.default_rng(0)
    n, m = 40, 3
    table, order = rng.permutation(n * m).reshape(n, m), rng.permutation(n)
    cross = rng.uniform(-0.5, 0.5, (n * m, n * m))
    for i, j in enumerate(order):
        cross[table[i], table[j][::-1]] = 0.9
    found = _best_sums(cross, table)
    assert (found.argmax(1) == order).all()
    assert np.allclose(found.max(1), best_sums(cross, table).max(1))


def test_blocks_of_unlike_runs_are_not_compared() -> None:
    spaces = list(zipfx.analyze(Heads(), torch.randn(2, 4, 3)))
    blocks = next(s for s in spaces if s.of_blocks)
    inner: Sequence[Any] = [(s, random_statistics(2, (6, 6))) for s in spaces if s.within]
    found = block_similarity(replace(blocks, blocks=(1, 2)), inner).covariance
    assert not found[0, 4:].any()
    assert not found[1:3, 3].any()
    assert bool((found[0, 3] != 0) & (found[1:3, 4:] != 0).all())
    assert torch.equal(found, found.T)
