"""Zip: greedy pairs within and across models, the matching of ZipIt!."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np

from zipfx.errors import ZipError
from zipfx.match.matchers.greedy import join_in_rounds, join_one_by_one
from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.protocol import Options, check_merged
from zipfx.observe import Statistics


@dataclass(frozen=True, repr=False)
class Zip(Options):
    """Join the most similar pair, N - M times (ZipIt!, section 4).

    The joined group takes the place of the two, and its similarity to every other is alpha times
    the smaller of theirs; only copies (similarity 1, up to rounding) are one feature as before, so
    that all copies of a feature end in one group whatever alpha is. Ties go to the smallest (i, j),
    a group counting as its first member.
    The groups are numbered by their first member, those with features of model 0 first.

    Args:
        alpha: from 0 (join what is joined already only when nothing else is left) to 1 (as
            readily as anything). A negative similarity is kept as it is, since alpha times it
            would be a reward. Alpha 0 is the limit of a small alpha: similarities rank by the
            number of joins first, so that no joined group ties with an uncorrelated pair.
        beta: from 0 (across models only) to 1 (no limit). In between, each of the K models may
            have floor(beta * (N - M) / K) matches that join two groups which both hold features
            of it. More is allowed only where no matching could do with less: a model with more
            than M features needs the difference.

    The other options are those of `Options`.

    Raises:
        ZipError: alpha or beta outside 0 .. 1.

    With beta < 1 (or across_only) there are never more than M joined groups at a time: at M, pairs
    of two single features wait, and ties go to the smallest joined group, then to its smallest
    partner. It keeps the greedy out of dead ends such as {a, b}, {a, c}, {b, c}, for any K, sizes
    and beta. Proof: suppose there are more than M groups and no pair is admissible. At most M are
    joined, so one is a single feature; say of model k. Every joined group holds k, or the single
    could be added to it. If fewer than M are joined, every other single is of k too, since
    singles of two models may be paired. Either way more than M groups hold k, and its budget is
    used up. But each within-match of k leaves one group less that holds k, n_k at the start, so
    after a budget of at least n_k - M they are at most M. For K = 2 and M = N / 2 the rule never
    acts, as N features cannot make more than N / 2 joined groups.

    >>> import torch
    >>> correlation = torch.eye(4, dtype=torch.float64)
    >>> correlation[0, 1] = correlation[1, 0] = 0.9  # two features of model 0
    >>> correlation[0, 2] = correlation[2, 0] = 0.8
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), correlation, sizes=(2, 2))
    >>> Zip()(statistics, 3).assignment
    tensor([0, 0, 1, 2])
    >>> Zip(beta=0)(statistics, 3).assignment
    tensor([0, 1, 0, 2])
    """

    alpha: float = 0.3
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(value, numbers.Real) or not 0 <= value <= 1:
                raise ZipError(f"{name} is {value}: choose a value from 0 to 1")

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; the models may differ in size.

        Time and memory are O(N^2) on correlations, ties or not. Only where nearly all rows lose
        their partner at every match, without a tie, does time come near O(N^3). Statistics on a
        GPU are matched there, with the same result, where no budget can run out on the way.

        Raises:
            ZipError: M is not in 1 .. N, or below the size of a model while beta is 0 or
                across_only is set.
        """
        sizes = statistics.sizes
        total = sum(sizes)
        check_merged(statistics, merged)
        budgets = self._budgets(sizes, merged, 0 if across_only else self.beta)
        if merged == total:
            return self.matching(np.arange(total), statistics, merged)
        model = np.repeat(np.arange(len(sizes)), sizes)
        similarity = self.score(statistics)
        if similarity.device.type != "cpu" and self._is_free(sizes, merged, budgets):
            first = join_in_rounds(similarity, self.alpha, merged, model, not max(budgets))
        else:
            most_joined = merged if across_only or self.beta < 1 else total
            first = join_one_by_one(
                similarity.cpu().numpy(), self.alpha, merged, model, budgets, most_joined
            )
        return self.matching(first, statistics, merged)

    def _is_free(self, sizes: tuple[int, ...], merged: int, budgets: list[int]) -> bool:
        """Whether what may be joined never depends on what was: no budget, or none to spend."""
        total = sum(sizes)
        pairs_of_two = len(sizes) == 2 and total == 2 * merged
        return min(budgets) == total or (max(budgets) == 0 and pairs_of_two)

    def _budgets(self, sizes: tuple[int, ...], merged: int, beta: float) -> list[int]:
        """How many within-matches each model may have."""
        if beta == 0 and max(sizes) > merged:
            raise ZipError(
                f"models of {sizes} features cannot be matched down to {merged} across models "
                f"only: {max(sizes)} features of one model need as many groups; allow "
                "within-model matches (beta > 0, across_only=False) or keep more features"
            )
        total = sum(sizes)
        if beta == 1:
            return [total] * len(sizes)
        share = math.floor(beta * (total - merged) / len(sizes) + 1e-9)  # 0.29 * 100 < 29
        return [max(share, size - merged) for size in sizes]
