"""One to one: across models only, by optimal assignment or by position."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from zipfx.hashing import Ints
from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.protocol import Needs, Options, check_one_to_one
from zipfx.observe import Statistics


@dataclass(frozen=True)
class Identity:
    """Feature i of every model becomes merged feature i, whatever the statistics say.

    >>> eye = torch.eye(4, dtype=torch.float64)
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), eye, sizes=(2, 2))
    >>> Identity()(statistics, 2).assignment
    tensor([0, 1, 0, 1])
    """

    needs: ClassVar[Needs] = "nothing"

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; `across_only` changes nothing.

        Raises:
            ZipError: a model has not exactly `merged` features.
        """
        check_one_to_one(statistics, merged, "identity")
        sizes = statistics.sizes
        return Matching(torch.arange(merged).repeat(len(sizes)), sizes, merged)


Order = Ints  # (n,): the feature of one model in each group
_MARGIN = 1e-12  # a smaller gain is rounding, and could go round in circles


@dataclass(frozen=True, repr=False)
class Permute(Options):
    """Permute the features of each model so that the similarity between models is largest.

    Two models: the optimal assignment (Li et al. 2015; ZipIt!, section 3). More: the
    sum over all pairs of models is raised by re-assigning one model at a time against all others,
    always the one that gains most, until none gains; once from each model as the reference, and
    the best end wins. So the groups do not depend on the order of the models, exact ties aside.
    Merged feature i holds feature i of model 0. Its options are those of `Options`.

    >>> import torch
    >>> correlation = torch.eye(4, dtype=torch.float64)
    >>> correlation[0, 3] = correlation[3, 0] = 0.9
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), correlation, sizes=(2, 2))
    >>> Permute()(statistics, 2).assignment
    tensor([0, 1, 1, 0])
    """

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; the result is always across models only.

        Raises:
            ZipError: a model has not exactly `merged` features.
        """
        check_one_to_one(statistics, merged, "permute")
        models = len(statistics.sizes)
        similarity = self.score(statistics).cpu().numpy()
        blocks = similarity.reshape(models, merged, models, merged).swapaxes(1, 2)
        # With two models every start gives the one optimum.
        starts = [_ascend(blocks, model) for model in range(models if models > 2 else 1)]
        orders = max(starts, key=lambda orders: _objective(blocks, orders))
        groups = np.concatenate([np.argsort(order) for order in orders])
        return self.matching(groups, statistics, merged)


def one_to_one(options: Options, statistics: Statistics, merged: int) -> Matching:
    """What `Permute` gives with the options of another matcher."""
    same = Permute(similarity=options.similarity, unmerge=options.unmerge, ridge=options.ridge)
    return same(statistics, merged)


def _ascend(blocks: NDArray[np.float64], reference: int) -> list[Order]:
    """Best orders found from `reference`; blocks[a, b] is the (n, n) similarity of models a, b."""
    models = range(len(blocks))
    orders = [_assign(blocks[reference, model]) for model in models]
    orders[reference] = np.arange(blocks.shape[-1])
    while len(blocks) > 2:
        moves = [_reassign(blocks, orders, model) for model in models]
        best = max(models, key=lambda model: moves[model][0])
        gain, order = moves[best]
        if gain <= _MARGIN:
            break
        orders[best] = order
    return orders


def _reassign(blocks: NDArray[np.float64], orders: list[Order], model: int) -> tuple[float, Order]:
    """Gain and new order of one model when it is assigned against all others."""
    others = (other for other in range(len(orders)) if other != model)
    score = np.sum([blocks[other, model][orders[other]] for other in others], axis=0)
    order = _assign(score)
    groups = np.arange(len(order))
    return float((score[groups, order] - score[groups, orders[model]]).sum()), order


def _assign(score: NDArray[np.float64]) -> Order:
    """Column of each row in the assignment with the largest sum."""
    return np.asarray(linear_sum_assignment(score, maximize=True)[1], dtype=np.int64)


def _objective(blocks: NDArray[np.float64], orders: list[Order]) -> float:
    """Similarity summed over groups and pairs of models."""
    pairs = itertools.combinations(range(len(orders)), 2)
    return float(sum(blocks[a, b][orders[a], orders[b]].sum() for a, b in pairs))
