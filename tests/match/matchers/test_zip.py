"""The greedy matching of ZipIt!, against its specification word for word."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.matching import KINDS, correlated, groups, partition, quick, random_statistics
from zipfx.errors import ZipError
from zipfx.match import Zip
from zipfx.match.matchers.matching import Matching
from zipfx.observe.statistics import Statistics


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
