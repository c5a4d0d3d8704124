"""SVD: the best linear merge of all; an upper limit for study, not a matching."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zipfx.errors import ZipError
from zipfx.match.matchers.matching import LinearMerge
from zipfx.match.matchers.protocol import check_merged
from zipfx.observe import Statistics


@dataclass(frozen=True)
class Svd:
    """M and U of rank M that lose least variance: U M projects on the leading principal components.

    By Eckart, Young and Mirsky no other merge with M features, linear or a matching, restores the
    features with a smaller mean squared error (`lost_variance`). Merged features are mixtures, so
    that an activation does not act on them as on features: a network merged so is of no use unless
    nothing but linear layers follows. Where only matches across models are allowed, it is an error.

    >>> covariance = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> statistics = Statistics(9, torch.zeros(2, dtype=torch.float64), covariance, sizes=(1, 1))
    >>> found = Svd()(statistics, 1)
    >>> (found.unmerge @ found.merge).round(decimals=3)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> LinearMerge:
        """See `Matcher`; the models may differ in size.

        Raises:
            ZipError: M is not in 1 .. N, or across_only is set.
        """
        check_merged(statistics, merged)
        if across_only:
            raise ZipError(
                "matcher 'svd' mixes all features, which is not possible where only matches across "
                "models keep the network exact; use another matcher"
            )
        covariance = (statistics.covariance + statistics.covariance.T) / 2
        vectors = torch.linalg.eigh(covariance)[1].flip(1)[:, :merged]
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = (vectors * largest.sign()).cpu().contiguous()  # signs are free: it is positive
        return LinearMerge(vectors.T.contiguous(), vectors, statistics.sizes)
