"""Statistics of random features, and the groups that matchers make of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from zipfx import Matching, Statistics

KINDS = ("generic", "ties", "constants", "all constant", "all equal")
quick = settings(max_examples=40, deadline=None)


def correlated(correlation: Tensor, sizes: tuple[int, ...]) -> Statistics:
    """Unit variances, so that `correlation()` gives back the very numbers of the upper triangle."""
    upper = correlation.double().triu(1)
    total = len(upper)
    matrix = upper + upper.T + torch.eye(total, dtype=torch.float64)
    return Statistics(9, torch.zeros(total, dtype=torch.float64), matrix, sizes)


def random_statistics(seed: int, sizes: tuple[int, ...], kind: str = "generic") -> Statistics:
    """Covariances of random features; the kinds other than `generic` are full of ties."""
    rng, total = np.random.default_rng(seed), sum(sizes)
    features = rng.normal(size=(40, 5)) @ rng.normal(size=(5, total))
    features = np.tanh(features) + 0.3 * rng.normal(size=(40, total)) + rng.normal(size=total)
    if kind == "ties":
        grid = torch.from_numpy(rng.integers(-3, 4, (total, total)) / 3)
        return correlated(grid, sizes)
    if kind in ("constants", "all constant"):
        fixed = rng.random(total) < (0.4 if kind == "constants" else 1.0)
        features[:, fixed] = rng.integers(-1, 3, fixed.sum())
    if kind == "all equal":
        features = np.repeat(features[:, :1], total, axis=1)
    centred = features - features.mean(0)
    covariance = torch.from_numpy(centred.T @ centred / 40)
    return Statistics(40, torch.from_numpy(features.mean(0)), covariance, sizes)


def groups(matching: Matching) -> list[set[int]]:
    """Members of each merged feature."""
    assignment = matching.assignment.tolist()
    return [{i for i, a in enumerate(assignment) if a == m} for m in range(matching.merged)]


def partition(matching: Matching, names: Iterable[int]) -> set[frozenset[int]]:
    """The groups, with feature i called names[i]."""
    called = list(names)
    return {frozenset(called[i] for i in group) for group in groups(matching)}


def samples(seed: int, sizes: tuple[int, ...], ties: bool = False) -> Tensor:
    """(S, N) correlated features; with ties many are equal, and some constant."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = rng.normal(size=(40, n)) + rng.normal(size=(40, 3)) @ rng.normal(size=(3, n))
    if ties and n:
        x = np.where(rng.random(n) < 0.3, 1.0, x[:, rng.integers(0, n, n)])
    return torch.from_numpy(x)


def statistics_of(x: Tensor, sizes: tuple[int, ...]) -> Statistics:
    cov = torch.cov(x.T, correction=0).reshape(x.shape[1], x.shape[1])
    return Statistics(len(x), x.mean(0), cov, sizes)


def joined(similarity: Tensor, assignment: Tensor) -> float:
    """The sum over the pairs inside the groups."""
    same = assignment[:, None] == assignment
    return float(similarity[same.triu(1)].sum())
