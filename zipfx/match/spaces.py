"""Spaces: every space of a map is matched, blocks first, then the features inside matched blocks.

The blocks of K models (attention heads, convolution groups) are matched one to one, by how well
the features inside them can be.  Then each model's features are put in the order of the matched
blocks, and inside every block they are matched by the chosen matcher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from zipfx.analysis import Space
from zipfx.errors import ZipError, first_line
from zipfx.hashing import Ints
from zipfx.match.axis_maps import axis_map
from zipfx.match.matchers.matching import LinearMerge, Matching, Merge, Pairs, joined_pairs
from zipfx.match.matchers.one_to_one import Identity, Permute
from zipfx.match.matchers.protocol import Matcher
from zipfx.observe import Statistics, inside, observed
from zipfx.text import weighed

Matched = dict[str, tuple[Merge, Pairs]]
Take = Callable[[str], Statistics]

_CANDIDATES = 8  # blocks of another model that are compared in full with each one


def match_spaces(
    matcher: Matcher,
    spaces: Sequence[Space],
    take: Take | None,
    models: int,
    *,
    progress: bool = False,
) -> Matched:
    """The matching of every space, and the pairs it joined; blocks come before what is inside.

    Args:
        take: gives the statistics of a space that was observed, and is called once for each, so
            that no more than one is held at a time (and those of the blocks of one layer); None:
            nothing is known, and the matcher is told so.

    Raises:
        ZipError: a matcher that fails, or gives another number of features than the space has.
    """
    matched: Matched = {}
    if take is None:
        for space in spaces:
            sizes = (space.size,) * models
            found: Merge = Matching(torch.arange(space.size).repeat(models), sizes, space.size)
            if not isinstance(matcher, Identity):
                found = match_space(matcher, space, _nothing_known(sizes))
            matched[space.name] = found, joined_pairs(found, None)
        return matched
    held: dict[str, Statistics] = {}
    seen = observed(spaces)
    costs = [float(space.size) ** 2 for space in spaces]  # entries of what is compared
    for space in weighed(spaces, costs, "zipfx: match", shown=progress):
        inner = inside(space, seen) if space.of_blocks else []
        for s in inner:
            if s.name not in held:
                held[s.name] = take(s.name)
        if inner:
            parts = [(s, _aligned(s, held[s.name], matched)) for s in inner]
            of = block_similarity(space, parts)
        else:
            own = held.pop(space.name, None) or take(space.name)
            of = _aligned(space, own, matched)
        merge = match_space(matcher, space, of)
        matched[space.name] = merge, joined_pairs(merge, of)
    return matched


def _nothing_known(sizes: tuple[int, ...]) -> Statistics:
    """Statistics of features that all are alike, and none like another."""
    mean = torch.zeros(sum(sizes), dtype=torch.float64)
    alone = torch.eye(len(mean), dtype=torch.float64)
    return Statistics.trusted(count=1, mean=mean, covariance=alone, sizes=sizes)


def match_space(matcher: Matcher, space: Space, statistics: Statistics) -> Merge:
    """The merge of a space whose features lie in the order of the matched blocks."""
    if space.of_blocks and not isinstance(matcher, Identity):
        matcher = Permute()
    if not space.blocks:
        return _match(matcher, space, statistics, space.size)
    models = len(statistics.sizes)
    indices, parts = [], []
    start = 0
    for size in space.blocks:  # inside every block alone
        mine = torch.cat([torch.arange(size) + start + k * space.size for k in range(models)])
        parts.append(_match(matcher, space, statistics.select(mine, (size,) * models), size))
        indices.append((mine, torch.arange(start, start + size)))
        start += size
    return _joined(parts, indices, statistics.sizes, space.size)


def _aligned(space: Space, statistics: Statistics, matched: Matched) -> Statistics:
    """Statistics with every model's features in the order of the matched blocks."""
    if not space.within:
        return statistics
    models = range(len(statistics.sizes))
    orders = [_order(space, matched, k) + k * space.size for k in models]
    return statistics.select(torch.cat(orders), statistics.sizes)


def _order(space: Space, matched: Matched, model: int) -> Tensor:
    """(size,) int64: which feature of a model stands at each position once blocks are matched."""
    blocks = [(b.index, matched[b.space][0]) for b in space.within if b.space in matched]
    moves = [(index, m.of(model), None) for index, m in blocks if isinstance(m, Matching)]
    return torch.argsort(axis_map(space.size, 0, moves).target)


def _joined(
    parts: Sequence[Merge],
    indices: Sequence[tuple[Tensor, Tensor]],
    sizes: tuple[int, ...],
    merged: int,
) -> Merge:
    """The merges of several blocks as one; indices: the features and merged features of each."""
    total = sum(sizes)
    linear = any(isinstance(part, LinearMerge) for part in parts)
    unmerge: Tensor | None = None
    if linear or any(isinstance(part, Matching) and part.unmerge is not None for part in parts):
        unmerge = torch.zeros(total, merged, dtype=torch.float64)
        for part, (mine, new) in zip(parts, indices, strict=True):
            unmerge[mine[:, None], new] = part.unmerge_matrix()
    if linear:
        assert unmerge is not None
        merge = torch.zeros(merged, total, dtype=torch.float64)
        for part, (mine, new) in zip(parts, indices, strict=True):
            merge[new[:, None], mine] = part.merge_matrix()
        return LinearMerge(merge, unmerge, sizes)
    assignment = torch.zeros(total, dtype=torch.int64)
    for part, (mine, new) in zip(parts, indices, strict=True):
        assert isinstance(part, Matching)
        assignment[mine] = new[part.assignment]
    return Matching(assignment, sizes, merged, unmerge)


def _match(matcher: Matcher, space: Space, statistics: Statistics, size: int) -> Merge:
    try:
        found = matcher(statistics, size, across_only=space.tied or space.of_blocks)
    except ZipError as error:
        raise ZipError(f"space {space.name!r} ({size} features): {error}") from error
    except Exception as error:  # of a matcher of the caller's
        raise ZipError(
            f"the matcher fails for space {space.name!r} ({size} features): {first_line(error)}"
        ) from error
    if not isinstance(found, Matching | LinearMerge):
        raise ZipError(
            f"the matcher gave a {type(found).__name__} for space {space.name!r}: it must return a "
            "zipfx.Matching, or a zipfx.LinearMerge"
        )
    if found.merged != size or found.sizes != statistics.sizes:
        raise ZipError(
            f"the matcher gave {found.merged} merged features from {found.sizes} for space "
            f"{space.name!r}, which needs {size} from {statistics.sizes}"
        )
    return found


def block_similarity(blocks: Space, inner: Sequence[tuple[Space, Statistics]]) -> Statistics:
    """How alike the blocks of the models are: the mean similarity of their best matched features.

    Only blocks that may be exchanged with one another are compared.
    """
    n, models = blocks.size, len(inner[0][1].sizes)
    total = torch.eye(models * n, dtype=torch.float64)
    weight = sum(space.size for space, _ in inner)
    starts = np.cumsum([0, *(blocks.blocks or (n,))])
    for space, statistics in inner:
        alike = statistics.similarity().cpu()
        table = next(b.index for b in space.within if b.space == blocks.name)
        for a in range(models):
            for b in range(a + 1, models):
                cross = alike[a * space.size :][: space.size, b * space.size :][:, : space.size]
                for lo, hi in itertools.pairwise(starts):
                    best = torch.from_numpy(_best_sums(cross.numpy(), table[lo:hi].numpy()))
                    total[a * n + lo : a * n + hi, b * n + lo : b * n + hi] += best * n / weight
    total = torch.maximum(total, total.T)
    mean = torch.zeros(models * n, dtype=torch.float64)
    return Statistics.trusted(count=1, mean=mean, covariance=total, sizes=(n,) * models)


def _best_sums(cross: NDArray[np.float64], table: Ints) -> NDArray[np.float64]:
    """Sum of the best assignment between the features of every pair of blocks, (n, n).

    cross: similarity of the features of two models; table: (n, m) the features of each block.
    Where blocks are many, it is only found for pairs that could be the best of their row or column,
    by a bound; the others get less than they could have.
    """
    n, m = table.shape
    found = np.empty((n, n))
    for i in range(n):
        score = cross[table[i]][:, table.reshape(-1)].reshape(m, n, m).swapaxes(0, 1)
        if m <= 2:
            found[i] = np.trace(score, axis1=1, axis2=2)
            found[i] = np.maximum(found[i], np.trace(score[:, ::-1], axis1=1, axis2=2))
        else:
            found[i] = np.minimum(score.max(2).sum(1), score.max(1).sum(1))
    if m <= 2:
        return found
    few = min(n, _CANDIDATES)
    chosen = np.zeros((n, n), bool)
    np.put_along_axis(chosen, np.argsort(-found, axis=1)[:, :few], True, axis=1)
    np.put_along_axis(chosen, np.argsort(-found, axis=0)[:few], True, axis=0)
    found -= 4 * m  # below every sum of similarities
    for i, j in np.argwhere(chosen):
        score = cross[np.ix_(table[i], table[j])]
        found[i, j] = score[linear_sum_assignment(score, maximize=True)].sum()
    return found
