"""Pairing: match every space of a map, blocks first, then the features inside matched blocks.

The blocks of K models (attention heads, convolution groups) are matched one to one, by how well
the features inside them can be.  Then each model's features are put in the order of the matched
blocks, and inside every block they are matched by the chosen matcher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.fuse import axis_map
from zipfx.labels import Ints
from zipfx.match import Identity, Matcher, Permute
from zipfx.matrices import Matching, Pairs, joined_pairs
from zipfx.spaces import Space
from zipfx.statistics import Statistics

Matched = dict[str, tuple[Matching, Pairs]]
Take = Callable[[str], Statistics]

_CANDIDATES = 8  # blocks of another model that are compared in full with each one


def observed(spaces: Sequence[Space]) -> list[Space]:
    """The spaces whose own places are observed: blocks are known by the features inside them."""
    known = {block.space for s in spaces if not s.of_blocks and s.places for block in s.within}
    return [s for s in spaces if s.name not in known]


def match_spaces(
    matcher: Matcher, spaces: Sequence[Space], take: Take | None, models: int
) -> Matched:
    """The matching of every space, and the pairs it joined; blocks come before what is inside.

    Args:
        take: gives the statistics of a space that was observed, and is called once for each, so
            that no more than one is held at a time (and those of the blocks of one layer); None:
            match by position.

    Raises:
        ZipError: a matcher that fails, or gives another number of features than the space has.
    """
    matched: Matched = {}
    held: dict[str, Statistics] = {}
    seen = observed(spaces)
    for space in spaces:
        inner = [s for s in seen if _lies_in(s, space)]
        if take is None:
            sizes = (space.size,) * models
            by_position = torch.arange(space.size).repeat(models)
            found, of = Matching(by_position, sizes, space.size), None
        elif space.of_blocks and inner:
            held.update({s.name: take(s.name) for s in inner if s.name not in held})
            of = _similarity(space, inner, held, matched, models)
            found = _in_blocks(_one_to_one(matcher), space, of)
        else:
            own = held.pop(space.name, None) or take(space.name)
            of = _aligned(space, own, matched, models)
            found = _in_blocks(_one_to_one(matcher) if space.of_blocks else matcher, space, of)
        matched[space.name] = found, joined_pairs(found, of)
    return matched


def _one_to_one(matcher: Matcher) -> Matcher:
    return matcher if isinstance(matcher, Identity) else Permute()


def _lies_in(space: Space, blocks: Space) -> bool:
    return any(block.space == blocks.name for block in space.within)


def _order(space: Space, matched: Matched, model: int) -> Tensor:
    """(size,) int64: which feature of a model stands at each position once blocks are matched."""
    moves = [
        (b.index, matched[b.space][0].of(model), None) for b in space.within if b.space in matched
    ]
    return torch.argsort(axis_map(space.size, 0, moves).target)


def _aligned(space: Space, statistics: Statistics, matched: Matched, models: int) -> Statistics:
    """Statistics with every model's features in the order of the matched blocks."""
    if not space.within:
        return statistics
    orders = [_order(space, matched, k) + k * space.size for k in range(models)]
    return statistics.select(torch.cat(orders), statistics.sizes)


def _in_blocks(matcher: Matcher, space: Space, statistics: Statistics) -> Matching:
    """Match inside every block of a space alone."""
    models = len(statistics.sizes)
    assignment = torch.zeros(space.size * models, dtype=torch.int64)
    start = 0
    for size in space.blocks or (space.size,):
        mine = torch.cat([torch.arange(size) + start + k * space.size for k in range(models)])
        part = statistics.select(mine, (size,) * models) if space.blocks else statistics
        assignment[mine] = start + _match(matcher, space, part, size).assignment
        start += size
    return Matching(assignment, statistics.sizes, space.size)


def _match(matcher: Matcher, space: Space, statistics: Statistics, size: int) -> Matching:
    try:
        found = matcher(statistics, size, across_only=space.tied or space.of_blocks)
    except ZipError as error:
        raise ZipError(f"space {space.name!r} ({size} features): {error}") from error
    if found.merged != size or found.sizes != statistics.sizes:
        raise ZipError(
            f"the matcher gave {found.merged} merged features from {found.sizes} for space "
            f"{space.name!r}, which needs {size} from {statistics.sizes}"
        )
    return found


def _similarity(
    blocks: Space,
    inner: Sequence[Space],
    statistics: Mapping[str, Statistics],
    matched: Matched,
    models: int,
) -> Statistics:
    """How alike the blocks of the models are: the mean correlation of their best matched features.

    Only blocks that may be exchanged with one another are compared.
    """
    n = blocks.size
    total = torch.eye(models * n, dtype=torch.float64)
    weight = sum(space.size for space in inner)
    starts = np.cumsum([0, *(blocks.blocks or (n,))])
    for space in inner:
        correlation = _aligned(space, statistics[space.name], matched, models).correlation()
        correlation = correlation.cpu()
        table = next(b.index for b in space.within if b.space == blocks.name)
        for a in range(models):
            for b in range(a + 1, models):
                cross = correlation[a * space.size :][: space.size, b * space.size :][
                    :, : space.size
                ]
                for lo, hi in itertools.pairwise(starts):
                    best = torch.from_numpy(_best_sums(cross.numpy(), table[lo:hi].numpy()))
                    total[a * n + lo : a * n + hi, b * n + lo : b * n + hi] += best * n / weight
    total = torch.maximum(total, total.T)
    mean = torch.zeros(models * n, dtype=torch.float64)
    return Statistics(1, mean, total, (n,) * models, trusted=True)


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
    found -= 2 * m  # below every sum of correlations
    for i, j in np.argwhere(chosen):
        score = cross[np.ix_(table[i], table[j])]
        found[i, j] = score[linear_sum_assignment(score, maximize=True)].sum()
    return found
