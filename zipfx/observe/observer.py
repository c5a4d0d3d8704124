"""Observer: moments of the features at one place of a space, and several places as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zipfx.analysis import Place
from zipfx.model.tensors import inexact
from zipfx.observe.moments import Moments
from zipfx.observe.padding import spread
from zipfx.observe.similarity import Similarity
from zipfx.observe.statistics import Statistics

_COLUMNS = 16  # that tell rows apart


class Observer(nn.Module):
    """Accumulates the moments of the features of K models at one place."""

    index: Tensor

    def __init__(self, place: Place, models: int) -> None:
        super().__init__()
        index = place.index
        self.node, self.inner = place.node, place.inner
        self.dims, self.blurred, self.mixed = place.dims, place.blurred, place.mixed
        self.read, self.sizes = place.read, place.sizes
        self.models, self.size = models, len(index)
        self.moments = Moments(few=models * len(index))
        self.resolution = torch.finfo(torch.float32).eps
        plain = bool((index.flatten() == torch.arange(index.numel())).all())
        self.register_buffer("index", index.flatten(), persistent=False)
        self.whole = index.numel() if plain else -1
        self.mask: Tensor | None = None  # of the batch: which positions are samples
        self.unplaced = False  # whether there were positions, and a mask of others
        self.turned: bool | None = False  # whether rows are by position, see `spread`
        #: while it is tried in what order rows are: a few columns of what has so many of them
        self.tried: dict[int, Tensor | None] | None = None

    def _samples(self, x: Tensor) -> Tensor:
        """(..., n, ...) -> (S, n), samples being batch, positions and occurrences; of complex
        numbers the real and the imaginary parts."""
        if self.blurred:
            x = x.mean(self.blurred, keepdim=True)
        dims = [d % x.ndim for d in self.dims]
        kept = None if self.mask is None else spread(self.mask, x.shape, dims, self.turned)
        positions = [d for d in range(1, x.ndim) if d not in dims and x.shape[d] > 1]
        self.unplaced |= self.mask is not None and kept is None and bool(positions)
        x = x.movedim(self.dims, tuple(range(-len(self.dims), 0)))
        index = self._index(tuple(x.shape[-len(self.dims) :]))
        x = x.flatten(-len(self.dims))
        if x.shape[-1] != self.whole or index is not self.index:
            x = x.index_select(-1, index.to(x.device))
        if kept is not None:
            kept = kept.movedim(self.dims, tuple(range(-len(self.dims), 0))).flatten(-len(dims))
            x = x[kept.squeeze(-1).expand(x.shape[:-1]).to(x.device)]
        x = x.reshape(-1, self.size, len(index) // self.size)
        x = x.mean(2) if self.mixed else x.transpose(1, 2).reshape(-1, self.size)
        if x.is_complex():
            x = torch.cat([x.real, x.imag])
        return x if x.dtype in (torch.float32, torch.float64) else x.float()

    def _index(self, sizes: tuple[int, ...]) -> Tensor:
        """The index into a value of these sizes: where they are not those of the example inputs, it
        is what has the same coordinates, as far as all features have it."""
        if not self.sizes or sizes == self.sizes:
            return self.index
        at = torch.stack(torch.unravel_index(self.index, self.sizes))
        of = torch.tensor(sizes, device=at.device)[:, None]
        steps = of.flip(0).cumprod(0).flip(0) // of
        there = (at < of).all(0).reshape(self.size, -1).all(0)
        found: Tensor = (at * steps).sum(0).reshape(self.size, -1)[:, there].flatten()
        return found

    def forward(self, *features: Any) -> None:
        """Read the K models' activations at this place (of a place inside a node: what a `Probe`
        has heard in each model)."""
        several = [[f] if self.inner is None else f[self.inner] for f in features]
        if self.tried is not None:
            first = several[0][0]
            if len(first) in self.tried:
                self.tried[len(first)] = first.flatten(1)[:, :_COLUMNS].clone()
            return
        if inexact(several[0][0]):
            self.resolution = torch.finfo(several[0][0].dtype).eps
        x = torch.cat([torch.cat([self._samples(t) for t in f]) for f in several], 1)
        self.moments.add(x)

    def statistics(self) -> Statistics:
        """Count, mean (N,) and covariance (N, N) of all samples so far."""
        seen, sizes = self.moments, (self.size,) * self.models
        return Statistics.trusted(
            count=seen.count,
            mean=seen.mean,
            covariance=seen.covariance(),
            sizes=sizes,
            resolution=self.resolution,
        )

    def first_broken(self) -> int | None:
        """The first model whose activations were NaN or Inf; None if all were finite."""
        finite = self.moments.finite()
        return None if bool(finite.all()) else int((~finite).nonzero()[0]) // self.size


def combine(
    observers: Sequence[Observer], similarity: Similarity = "correlation", moment: bool = False
) -> Statistics:
    """Statistics of one space at several places as one: the mean of the similarities.

    A feature counts where it varies; it is constant only if it is constant everywhere.

    Args:
        similarity: what is averaged, as its place in the network scales it: correlations, cosines,
            or covariances relative to the mean variance.
        moment: keep the second moments where weights read the features, each place relative to its
            mean power.
    """
    statistics = [observer.statistics() for observer in observers]
    first, read = statistics[0], None
    if moment:
        reads = [s for s, o in zip(statistics, observers, strict=True) if o.read] or statistics[-1:]
        read = sum((_scaled(s.second_moment()) for s in reads), torch.zeros_like(first.covariance))
    if len(statistics) == 1:
        return Statistics.trusted(**{**vars(first), "moment": read})
    mean = torch.stack([s.mean for s in statistics]).mean(0)
    covariance = torch.zeros_like(first.covariance)
    for s in statistics:
        covariance += _scaled(s.covariance) if similarity == "covariance" else _alike(s, similarity)
    if similarity == "cosine":
        mean.zero_()  # they are in the cosines
    return Statistics.trusted(
        count=first.count,
        mean=mean,
        covariance=covariance,
        sizes=first.sizes,
        resolution=0.0,
        moment=read,
    )


def _alike(statistics: Statistics, similarity: Similarity) -> Tensor:
    """Correlations or cosines, 0 for features that have none, also on the diagonal."""
    if similarity == "cosine":
        power = statistics.covariance.diagonal() + statistics.mean.square()
        found, known = statistics.cosine(), (power > 0).double()
    else:
        found, known = statistics.correlation(), (~statistics.constant).double()
    return found.mul_(torch.outer(known, known))


def _scaled(moments: Tensor) -> Tensor:
    """Second moments in units of their mean diagonal entry."""
    return moments / moments.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)


class Seen:
    """Statistics of the spaces, given out one by one and freed.

    names: of the spaces of which something was observed, of those that were given out, too;
    batches: how many were read; samples: of each space that was given out, how many it had;
    unplaced: those in which what only fills a batch up counts as samples, since a batch's mask is
    not of their positions.
    """

    def __init__(self, observers: Mapping[str, Sequence[Observer]], batches: int) -> None:
        self._observers = dict(observers)
        self.names, self.batches = frozenset(observers), batches
        self.unplaced = sorted(
            n for n, group in observers.items() if any(o.unplaced for o in group)
        )
        self.samples: dict[str, int] = {}

    def observers(self, name: str) -> Sequence[Observer]:
        """Of a space that was not given out yet."""
        return self._observers[name]

    def take(
        self, name: str, similarity: Similarity = "correlation", moment: bool = False
    ) -> Statistics:
        """The statistics of a space (see `combine`), once: they are not kept."""
        found = combine(self._observers.pop(name), similarity, moment)
        self.samples[name] = found.count
        return found
