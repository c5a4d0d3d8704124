"""K-means: clusters of features, whatever their number and models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zipfx.checks import whole
from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.one_to_one import one_to_one
from zipfx.match.matchers.protocol import Options, check_merged
from zipfx.observe import Statistics

_MARGIN = 1e-12  # a smaller gain is rounding, and could go round in circles


@dataclass(frozen=True, repr=False)
class KMeans(Options):
    """Cluster all features into M (the K-means baseline of ZipIt!, section 5).

    Lloyd's iterations on features of unit length, whose squared distances are 2 - 2 times their
    similarity, so that similarities are all that is needed (kernel k-means: Dhillon et al. 2004).
    The first centres are found by farthest-first traversal (Gonzalez 1985) from the feature most
    similar to all, ties going to the first; an emptied cluster takes the feature that is farthest
    from its centre. Where only matches across models are allowed, it is `Permute`.

    Args:
        iterations: Lloyd's iterations at most.

    The other options are those of `Options`.

    Raises:
        ZipError: iterations is no whole number, or below 1.

    >>> correlation = torch.eye(4, dtype=torch.float64)
    >>> correlation[0, 3] = correlation[3, 0] = 0.9
    >>> correlation[1, 2] = correlation[2, 1] = 0.8
    >>> statistics = Statistics(9, torch.zeros(4, dtype=torch.float64), correlation, sizes=(2, 2))
    >>> KMeans()(statistics, 2).assignment
    tensor([0, 1, 1, 0])
    """

    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("iterations", self.iterations, 1)

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; the models may differ in size.

        Raises:
            ZipError: M is not in 1 .. N, or the models have other than M features while only
                matches across models are allowed.
        """
        check_merged(statistics, merged)
        if across_only:
            return one_to_one(self, statistics, merged)
        similarity = self.score(statistics)
        groups = _lloyd(similarity, _farthest_first(similarity, merged), self.iterations)
        return self.matching(groups.cpu().numpy(), statistics, merged)


def _farthest_first(similarity: Tensor, count: int) -> Tensor:
    """`count` features, each the least similar to those before it, and then the groups, (N,), of
    the features that are most similar to each."""
    centres = similarity.sum(1).argmax().reshape(1)
    nearest = similarity[centres[0]].clone()
    for _ in range(count - 1):
        nearest[centres[-1]] = torch.inf  # not twice
        following = nearest.argmin().reshape(1)
        centres = torch.cat([centres, following])
        nearest = torch.maximum(nearest, similarity[following[0]])
    groups = similarity[:, centres].argmax(1)
    groups[centres] = torch.arange(count, device=groups.device)
    return groups


def _lloyd(similarity: Tensor, groups: Tensor, iterations: int) -> Tensor:
    """Move every feature to the cluster with the nearest mean, until none moves."""
    count = int(groups.max()) + 1 if len(groups) else 0
    for _ in range(iterations):
        sizes = torch.bincount(groups, minlength=count).double()
        to = similarity.new_zeros(len(groups), count).index_add_(1, groups, similarity).div_(sizes)
        spread = to.new_zeros(count, count).index_add_(0, groups, to).diagonal() / sizes
        distance = (spread - 2 * to).add_(similarity.diagonal()[:, None])
        own = distance.gather(1, groups[:, None]).flatten()
        least, nearest = distance.min(1)
        moved = torch.where(least < own - _MARGIN, nearest, groups)
        for empty in (torch.bincount(moved, minlength=count) == 0).nonzero().flatten():
            shared = torch.bincount(moved, minlength=count)[moved] > 1
            moved[torch.where(shared, own, -torch.inf).argmax()] = empty
        if torch.equal(moved, groups):
            break
        groups = moved
    return groups
