"""Match by position: the baseline for models that share their initialisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.protocol import check_one_to_one
from zipfx.observe.statistics import Statistics


@dataclass(frozen=True)
class Identity:
    """Feature i of every model becomes merged feature i, whatever the statistics say.

    >>> eye = torch.eye(4, dtype=torch.float64)
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), eye, sizes=(2, 2))
    >>> Identity()(statistics, 2).assignment
    tensor([0, 1, 0, 1])
    """

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
