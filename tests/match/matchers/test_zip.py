from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from zipfx import match
from zipfx.errors import ZipError
from zipfx.match import Identity, Matcher, Permute, Zip
from zipfx.match.matchers.matching import Matching
from zipfx.observe.statistics import Statistics

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


@dataclass(frozen=True)
class PlainGreedy:
    """The specification of `Zip`, word for word: every pair looked at for every match."""

    alpha: float
    beta: float

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        sizes, total = statistics.sizes, sum(statistics.sizes)
        limited = self.beta < 1 or across_only
        share = 0 if across_only else math.floor(self.beta * (total - merged) / len(sizes) + 1e-9)
        budget = [max(share, size - merged) if limited else total for size in sizes]
        used = [0] * len(sizes)
        model = [k for k, size in enumerate(sizes) for _ in range(size)]
        members = {i: {i} for i in range(total)}
        matrix = statistics.similarity().tolist()
        value = {(i, j): matrix[i][j] for i in range(total) for j in range(total) if i != j}

        def shared(i: int, j: int) -> set[int]:
            return {model[a] for a in members[i]} & {model[b] for b in members[j]}

        while len(members) > merged:
            joined = {i for i in members if len(members[i]) > 1}
            waiting = limited and len(joined) == merged
            candidates = [
                (-value[i, j], i, j)
                for i in members
                for j in members
                if i != j and (i in joined if waiting else i < j)
                if all(used[k] < budget[k] for k in shared(i, j))
            ]
            _, first, second = min(candidates)
            for k in shared(first, second):
                used[k] += 1
            keep, gone = sorted((first, second))
            copies = value[keep, gone] >= 1 - 1e-9
            members[keep] |= members.pop(gone)
            for r in members.keys() - {keep}:
                low = min(value[keep, r], value[gone, r])
                rank = low - 5 if self.alpha == 0 else self.alpha * low if low > 0 else low
                value[keep, r] = value[r, keep] = low if copies else rank
        assert not limited or all(u <= b for u, b in zip(used, budget, strict=True))
        assignment = [0] * total
        for number, first in enumerate(sorted(members)):
            for i in members[first]:
                assignment[i] = number
        return Matching(torch.tensor(assignment, dtype=torch.int64), sizes, merged)


sizes_for_zip = st.sampled_from([(5, 5), (4, 4, 4), (3, 3, 3, 3), (8, 8, 8), (6,), (2, 5, 3)])


class TestZip:
    @quick
    @given(
        seed=st.integers(0, 10**6),
        sizes=sizes_for_zip,
        kind=st.sampled_from(KINDS),
        alpha=st.sampled_from([0.0, 0.3, 1.0]),
        beta=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
        spare=st.integers(-3, 4),
        across_only=st.booleans(),
    )
    def test_equals_the_plain_greedy(
        self, seed: int, sizes: tuple[int, ...], kind: str, alpha: float, beta: float,
        spare: int, across_only: bool,
    ) -> None:  # fmt: skip
        statistics = random_statistics(seed, sizes, kind)
        merged = min(max(1, max(sizes) + spare), sum(sizes))
        if spare < 0 and (beta == 0 or across_only):
            merged = max(sizes)
        fast = Zip(alpha, beta)(statistics, merged, across_only=across_only)
        plain = PlainGreedy(alpha, beta)(statistics, merged, across_only=across_only)
        assert fast.assignment.tolist() == plain.assignment.tolist()

    @quick
    @given(
        seed=st.integers(0, 10**6),
        models=st.integers(1, 5),
        n=st.integers(1, 7),
        kind=st.sampled_from(KINDS),
        beta_zero=st.booleans(),
    )
    def test_across_only_gives_each_group_one_feature_per_model(
        self, seed: int, models: int, n: int, kind: str, beta_zero: bool
    ) -> None:
        statistics = random_statistics(seed, (n,) * models, kind)
        matcher = Zip(beta=0) if beta_zero else Zip()
        matching = matcher(statistics, n, across_only=not beta_zero)
        assert matching.within == 0
        for model in range(models):
            assert sorted(matching.of(model).tolist()) == list(range(n))
        assert matching.of(0).tolist() == list(range(n))

    @quick
    @given(
        seed=st.integers(0, 10**6),
        models=st.integers(1, 4),
        n=st.integers(2, 6),
        beta=st.floats(0, 0.99),
    )
    def test_budget_is_kept(self, seed: int, models: int, n: int, beta: float) -> None:
        statistics = random_statistics(seed, (n,) * models, "all equal")
        matching = Zip(1.0, beta)(statistics, n)
        share = math.floor(beta * (models - 1) * n / models + 1e-9)
        for model in range(models):
            assert n - len(set(matching.of(model).tolist())) <= share

    @quick
    @given(
        seed=st.integers(0, 10**6),
        models=st.integers(2, 4),
        alpha=st.sampled_from([0.0, 0.3, 1.0]),
        beta=st.sampled_from([0.0, 0.4, 1.0]),
    )
    def test_permuting_features_only_reorders(
        self, seed: int, models: int, alpha: float, beta: float
    ) -> None:
        n = 6
        statistics = random_statistics(seed, (n,) * models)
        rng = np.random.default_rng(seed)
        order = np.concatenate([model * n + rng.permutation(n) for model in range(models)])
        permuted = Statistics(
            40, statistics.mean[order], statistics.covariance[order][:, order], statistics.sizes
        )
        matcher = Zip(alpha, beta)
        before = partition(matcher(statistics, n), range(models * n))
        assert partition(matcher(permuted, n), order.tolist()) == before

    @quick
    @given(
        seed=st.integers(0, 10**6),
        models=st.integers(1, 8),
        n=st.integers(2, 8),
        alpha=st.sampled_from([0, 0.1, 0.3, 1]),
    )
    def test_redundant_features_end_in_pure_groups(
        self, seed: int, models: int, n: int, alpha: float
    ) -> None:
        rng = np.random.default_rng(seed)
        distinct = int(rng.integers(1, n + 1))
        vectors = np.maximum(rng.normal(size=(60, distinct)), 0)
        vectors[:, rng.random(distinct) < 0.2] = 0  # dead features are copies of one another
        original = rng.integers(0, distinct, models * n)
        features = torch.from_numpy(vectors[:, original])
        covariance = torch.cov(features.T).reshape(models * n, models * n)
        statistics = Statistics(60, features.mean(0), covariance, (n,) * models)
        for group in groups(Zip(alpha=alpha, beta=1)(statistics, n)):
            assert len({vectors[:, original[i]].tobytes() for i in group}) == 1

    def test_alpha_worked(self) -> None:
        # 0-1 join first. Then {0, 1}-2 has alpha * 0.8 against 0.5 of 2-3.
        correlation = torch.tensor(
            [[0, 0.9, 0.8, 0.1], [0, 0, 0.85, 0.2], [0, 0, 0, 0.5], [0, 0, 0, 0]]
        )
        statistics = correlated(correlation, (2, 2))
        assert groups(Zip(alpha=0.6)(statistics, 2)) == [{0, 1}, {2, 3}]  # 0.48 < 0.5
        assert groups(Zip(alpha=0.7)(statistics, 2)) == [{0, 1, 2}, {3}]  # 0.56 > 0.5

    def test_alpha_does_not_reward_negative_similarity(self) -> None:
        # {0, 1}-2 keeps min(-0.6, 0.1) = -0.6: alpha times it, -0.06, would beat the -0.5 of 2-3.
        correlation = torch.tensor(
            [[0, 0.9, -0.6, -0.9], [0, 0, 0.1, -0.9], [0, 0, 0, -0.5], [0, 0, 0, 0]]
        )
        statistics = correlated(correlation, (2, 2))
        assert groups(Zip(alpha=0.1)(statistics, 2)) == [{0, 1}, {2, 3}]

    @pytest.mark.parametrize("second", [0.0, -0.9])
    def test_alpha_zero_joins_a_group_again_only_when_nothing_else_is_left(
        self, second: float
    ) -> None:
        correlation = torch.tensor(
            [[0, 0.9, 0.8, 0.7], [0, 0, 0.8, 0.7], [0, 0, 0, second], [0, 0, 0, 0]]
        )
        statistics = correlated(correlation, (2, 2))
        assert groups(Zip(alpha=0)(statistics, 2)) == [{0, 1}, {2, 3}]
        assert groups(Zip(alpha=0)(statistics, 1)) == [{0, 1, 2, 3}]

    @pytest.mark.parametrize(
        ("beta", "expected"),
        [
            (1, [{0, 1, 4}, {2, 3, 5}, {6}, {7}]),
            (0.5, [{0, 1, 4}, {2, 5}, {3, 6}, {7}]),  # one of the four matches for each model
            (0.49, [{0, 4}, {1, 7}, {2, 5}, {3, 6}]),  # none, rounded down
            (0, [{0, 4}, {1, 7}, {2, 5}, {3, 6}]),
        ],
    )
    def test_budget_worked(self, beta: float, expected: list[set[int]]) -> None:
        correlation = torch.zeros(8, 8)
        correlation[0, 1], correlation[2, 3] = 0.99, 0.98
        correlation[:2, 4], correlation[2:4, 5], correlation[3, 6] = 0.9, 0.8, 0.5
        assert groups(Zip(beta=beta)(correlated(correlation, (4, 4)), 4)) == expected

    def test_budget_is_not_lost_to_rounding(self) -> None:
        assert 0.29 * 100 < 29
        matching = Zip(alpha=1, beta=0.29)(correlated(torch.ones(400, 400), (200, 200)), 200)
        assert len(set(matching.of(0).tolist())) == 200 - 29

    def test_a_dead_end_is_avoided(self) -> None:
        # Features a b | c d | e f. Plain greedy would pair a-c, b-e, d-f, and none of the three
        # pairs can be joined: each shares a model with each.
        correlation = torch.zeros(6, 6)
        correlation[0, 2], correlation[1, 4], correlation[3, 5] = 0.9, 0.8, 0.7
        matching = Zip(beta=0)(correlated(correlation, (2, 2, 2)), 2)
        assert groups(matching) == [{0, 2, 5}, {1, 3, 4}]

    def test_constants_go_together_first_and_with_the_rest_last(self) -> None:
        statistics = random_statistics(0, (4, 4))
        covariance, mean = statistics.covariance.clone(), statistics.mean.clone()
        for dead in (1, 6):
            covariance[dead], covariance[:, dead], mean[dead] = 0, 0, 0
        statistics = Statistics(40, mean, covariance, (4, 4))
        assert {1, 6} in groups(Zip()(statistics, 7))
        assert {1, 6} in groups(Zip(alpha=1)(statistics, 2))

    @pytest.mark.parametrize("matcher", [Zip(), Zip(0, 0), Zip(1, 0.5)])
    def test_edges(self, matcher: Zip) -> None:
        statistics = random_statistics(0, (3, 3))
        assert matcher(statistics, 6).assignment.tolist() == list(range(6))
        assert matcher(random_statistics(0, (1, 1, 1)), 1).assignment.tolist() == [0, 0, 0]

    def test_leaves_the_statistics_alone(self) -> None:
        statistics = random_statistics(0, (3, 3))
        covariance = statistics.covariance.clone()
        Zip()(statistics, 3)
        assert torch.equal(statistics.covariance, covariance)

    @pytest.mark.parametrize("merged", [0, 5, -1])
    def test_refuses_an_impossible_number(self, merged: int) -> None:
        with pytest.raises(ZipError, match=rf"4 features down to {merged}: choose 1 .. 4"):
            Zip()(random_statistics(0, (2, 2)), merged)

    def test_refuses_too_few_groups_across_models(self) -> None:
        with pytest.raises(ZipError, match=r"\(2, 4\) features .* down to 3 .* 4 features of one"):
            Zip(beta=0)(random_statistics(0, (2, 4)), 3)

    @pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
    @pytest.mark.parametrize("name", ["alpha", "beta"])
    def test_refuses_parameters_out_of_range(self, name: str, value: float) -> None:
        with pytest.raises(ZipError, match=rf"{name} is {value}: choose a value from 0 to 1"):
            Zip(**{name: value})


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


@pytest.mark.parametrize("matcher", [Identity(), Permute(), Zip()])
def test_no_features_at_all(matcher: Matcher) -> None:
    none = torch.zeros(0, dtype=torch.float64)
    matching = matcher(Statistics(1, none, none.reshape(0, 0), (0, 0)), 0)
    assert (matching.merged, matching.within, matching.across) == (0, 0, 0)


def test_identity_matches_by_position() -> None:
    assert Identity()(random_statistics(0, (2, 2, 2)), 2).assignment.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("name", ["identity", "permute"])
@pytest.mark.parametrize(("sizes", "merged"), [((2, 3), 2), ((2, 2), 3), ((2, 2), 1)])
def test_one_to_one_needs_equal_sizes(name: str, sizes: tuple[int, ...], merged: int) -> None:
    with pytest.raises(ZipError, match=rf"'{name}' pairs .* have \({sizes[0]}, {sizes[1]}\)"):
        match.resolve(name)(random_statistics(0, sizes), merged)


def test_resolve() -> None:
    assert match.resolve("zip") == Zip()
    assert match.resolve("permute") == Permute()
    assert match.resolve("identity") == Identity()
    matcher = Zip(alpha=0.1, beta=0.8)
    assert match.resolve(matcher) is matcher


@pytest.mark.parametrize(
    ("matcher", "message"),
    [
        (
            "Permut",
            r"no matcher 'Permut'; did you mean 'permute'\? Known: identity, kmeans, optimal",
        ),
        ("xyz", r"no matcher 'xyz'\. Known: identity"),
        (Zip, r"the matcher is the class Zip: pass an instance"),
        (3, r"the matcher is a int: pass one of identity, .*, or a callable"),
    ],
)
def test_resolve_refuses(matcher: object, message: str) -> None:
    with pytest.raises(ZipError, match=message):
        match.resolve(matcher)  # type: ignore[arg-type]
