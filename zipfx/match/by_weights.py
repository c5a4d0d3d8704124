"""By weights: match the spaces of K models by their weights, without data (Git Re-Basin).

The models' parameters are brought into the order of one another, one space at a time while the
others stay as they are, so that the sum of the inner products of all weights only ever grows
(Ainsworth et al. 2023, algorithm 1). Unlike there, nothing depends on the order in which the
features of the models come: in the first sweep a space is matched by the weights whose other axes
have been matched already (the network's inputs and outputs are, from the start), and, where those
leave it open, by the weights that stay when the axes that are still free are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from zipfx.analysis import Axis, Space
from zipfx.checks import whole
from zipfx.errors import ZipError
from zipfx.match.axis_maps import Move, columns, plan
from zipfx.match.matchers.matching import Matching, Merge, joined_pairs
from zipfx.match.matchers.one_to_one import Permute
from zipfx.match.matchers.protocol import Matcher, Needs
from zipfx.match.spaces import Matched, block_similarity, match_space
from zipfx.model.tensors import as_real, widened
from zipfx.observe import Statistics, inside


@dataclass(frozen=True)
class Weights:
    """Permute features so that the weights of the models are as alike as possible (Ainsworth et
    al., Git Re-Basin, ICLR 2023, section 3.2): no data needed.

    The sum of the inner products of all corresponding weights is raised by re-assigning one space
    at a time while all others stay, by `Permute`; see `match_weights`. The statistics it is called
    with are inner products of the features' weights.

    Args:
        sweeps: over all spaces at most; it ends earlier when nothing changes.

    Raises:
        ZipError: sweeps is no whole number, or below 1.

    >>> import torch, zipfx
    >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(4, 3)
    >>> spaces = zipfx.analyze(a, x)
    >>> b = spaces.permuted(a, spaces.random_permutations(1))
    >>> merged = zipfx.zip([a, b], None, matcher="weights", repair="none", example_inputs=x)
    >>> torch.allclose(merged(x), a(x), atol=1e-6)
    True
    """

    sweeps: int = 100
    needs: ClassVar[Needs] = "weights"

    def __post_init__(self) -> None:
        whole("sweeps", self.sweeps, 1)

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; the result is always across models only.

        Raises:
            ZipError: a model has not exactly `merged` features.
        """
        return Permute(similarity="covariance")(statistics, merged)


Tensors = Mapping[str, Sequence[Tensor]]

_FREE = 1e-3  # what weights with axes in no order count for


def match_weights(
    matcher: Matcher, spaces: Sequence[Space], tensors: Tensors, given: Matched | None = None
) -> Matched:
    """The matching of every space by the weights, until nothing changes.

    Args:
        matcher: called with inner products of the features' weights in place of covariances, space
            by space, over all of them at most `matcher.sweeps` times (if it says so).
        given: matchings of some of the spaces, which stay.
        tensors: the K corresponding tensors of every parameter, by its name in model 0. Axes of
            others do not count.
    """
    descent = _Descent(spaces, tensors)
    found: Matched = dict(given or {})
    left = [space for space in spaces if space.name not in found]
    for _ in range(whole("sweeps", getattr(matcher, "sweeps", Weights.sweeps), 1)):
        changed = False
        for space in left:
            before = found.get(space.name)
            inner = inside(space, spaces) if space.of_blocks else []
            known = {
                name: merge
                for name, (merge, _) in found.items()
                if name not in (space.name, *(s.name for s in inner))
            }
            if inner:
                of = block_similarity(space, [(s, descent.statistics(s, known)) for s in inner])
            else:
                if before:
                    known[space.name] = before[0]
                of = descent.statistics(space, known)
            merge = match_space(matcher, space, of)
            new = merge.unmerge_matrix()
            changed |= before is None or not torch.equal(new, before[0].unmerge_matrix())
            found[space.name] = merge, joined_pairs(merge, None)
        if not changed:
            break
    return found


class _Descent:
    def __init__(self, spaces: Sequence[Space], tensors: Tensors) -> None:
        self.tensors = tensors
        self.models = len(next(iter(tensors.values()), ()))
        self.on: dict[str, list[tuple[Space, Axis]]] = {}
        for space in spaces:
            for axis in space.axes:
                if axis.parameter in tensors and not axis.implied:
                    self.on.setdefault(axis.parameter, []).append((space, axis))

    def statistics(self, space: Space, known: Mapping[str, Merge]) -> Statistics:
        """Inner products of the weights of all features of all models, as second moments.

        known: merges of other spaces; those of the blocks that the space lies in move its features,
        its own only those on other axes.
        """
        n = space.size * self.models
        device = next(iter(self.tensors.values()))[0].device
        total = torch.zeros(n, n, dtype=torch.float64, device=device)
        for axis in space.axes:
            if axis.parameter in self.tensors and not axis.implied:
                rows, free = self._rows(space, axis, known)
                total.addmm_(rows, rows.T, alpha=_FREE if free else 1)
        mean = torch.zeros(n, dtype=torch.float64, device=device)
        sizes = (space.size,) * self.models
        return Statistics.trusted(count=1, mean=mean, covariance=total, sizes=sizes)

    def _rows(self, space: Space, axis: Axis, known: Mapping[str, Merge]) -> tuple[Tensor, bool]:
        """The weights of every feature on one axis, (N, d), and whether some were sorted since
        their own axes are in no order yet."""
        others = [(s, a) for s, a in self.on[axis.parameter] if s is not space or a.dim != axis.dim]
        free = {a.dim for s, a in others if s.name not in known and a.dim != axis.dim}
        moves = self._moves(axis.parameter, others, known)
        # rows of a square: its columns are the same features, in the order of their own model
        squares = [(a.parameter, a.dim) for a in space.axes].count((axis.parameter, axis.dim)) > 1
        rows = []
        for t, maps in zip(self.tensors[axis.parameter], moves, strict=True):
            moved = widened(t.detach())
            for move in maps:
                moved = move.apply(moved)
            moved = as_real(moved)  # inner products of complex weights are sums over their parts
            x = columns(_sorted(moved, free - {axis.by}), axis.dim, axis.by, axis.parts)
            if axis.by in free:  # the rows of each part alone
                x = _sorted(x, {x.ndim - 2})
            x = x[..., axis.index.to(x.device)].movedim(-2, 0)
            rows.append((x.sort(-1)[0] if squares else x).flatten(1))
        return torch.cat(rows), squares or bool(free)

    def _moves(
        self, parameter: str, axes: Sequence[tuple[Space, Axis]], known: Mapping[str, Merge]
    ) -> list[list[Move]]:
        spaces = [replace(s, axes=(a,)) for s, a in axes if s.name in known]
        shapes = {parameter: self.tensors[parameter][0].shape}
        maps = plan(spaces, known, shapes, self.models)
        return maps.get(parameter, [[] for _ in range(self.models)])


def _sorted(t: Tensor, dims: set[int]) -> Tensor:
    """Sort along some dimensions taken as one."""
    if not dims:
        return t
    order = tuple(sorted(dims))
    last = tuple(range(-len(order), 0))
    moved = t.movedim(order, last)
    return moved.flatten(-len(order)).sort(-1)[0].reshape(moved.shape).movedim(last, order)


def check_finite(parameters: Mapping[str, Sequence[Tensor]], spaces: Iterable[Space]) -> None:
    """Check the parameters along which features lie, where no activations were looked at.

    Args:
        parameters: of all models, by name.
    """
    for name in sorted({axis.parameter for space in spaces for axis in space.axes}):
        for k, t in enumerate(parameters.get(name, ())):
            if not bool(t.isfinite().all()):
                raise ZipError(f"parameter {name!r} of model {k} holds NaN or Inf")
