"""Ridge: least squares from moments, drawn to weights that are there already.

Letters: G groups, n inputs and o outputs of each, as in `layers`; J sources of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from zipfx.observe import Moments, pooled

Affine = tuple[Tensor, Tensor]  # (G, o, n) and (G, o), float64

_RIGHT = 1e-12  # of a target's variance: what is missed by less is left as it is,
_COARSE = 8  # or by this times the rounding of the samples, which their products share
_NOISE = 16  # times the rounding of a mean: what varies by less is constant


@dataclass(frozen=True, eq=False)
class Normal:
    """Moments of inputs x and targets y as least squares needs them; all float64.

    rows: (G, r, n) with rows^T rows the covariance of x, or None: power is the covariance itself,
    (G, n, n); xy: (G, o, n) covariances; yy: (G, o) variances; x: (G, n), y: (G, o) means; centred:
    whether these were taken off, else they count as 0; noise: (G, o), of y, a mean square that is
    nothing but rounding; factors: of what was solved, by ridge.
    """

    rows: Tensor | None
    power: Tensor | None
    xy: Tensor
    yy: Tensor
    x: Tensor
    y: Tensor
    centred: bool
    noise: Tensor
    factors: dict[float, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, moments: Moments, n: int, outputs: Tensor, centred: bool = True) -> Normal:
        """Of moments of [x, y] side by side, n of them inputs; outputs: (p,) which of y."""
        mean, few = moments.mean, moments.samples
        level = mean if centred else torch.zeros_like(mean)
        x, y = level[..., :n], level[..., n + outputs]
        eps = torch.finfo(moments.shift.dtype).eps
        noise = (_NOISE * eps * level).square()
        right = max(_RIGHT, _COARSE * eps)
        of_noise = noise[..., n + outputs]
        if few is not None:
            few = few + (moments.shift.double() - level).unsqueeze(-2)
            few /= math.sqrt(moments.count)
            few *= (few.square().sum(-2) > noise).unsqueeze(-2)
            rows, of_y = few[..., :n], few[..., n + outputs]
            yy = of_y.square().sum(-2)
            return cls(rows, None, of_y.mT @ rows, yy, x, y, centred, of_noise + right * yy)
        covariance, variance = moments.covariance()[..., :n, :], moments.variance()
        if not centred:
            covariance += mean[..., :n].unsqueeze(-1) * mean.unsqueeze(-2)
            variance += mean.square()
        varies = variance > noise
        covariance *= varies[..., :n].unsqueeze(-1) & varies.unsqueeze(-2)
        yy = (variance * varies)[..., n + outputs]
        xy = covariance[..., n + outputs].mT
        return cls(None, covariance[..., :n], xy, yy, x, y, centred, of_noise + right * yy)

    def times(self, w: Tensor) -> Tensor:
        """W times the covariance of x, (G, o, n)."""
        if self.rows is not None:
            return (w @ self.rows.mT) @ self.rows
        assert self.power is not None
        return w @ self.power

    def loss(self, weights: Affine) -> Tensor:
        """(G, o): mean square of W x + b - y."""
        w, b = weights
        varying = self.yy - 2 * (w * self.xy).sum(-1) + self.variance(w)
        return varying.clamp(min=0) + (self.level(w) + b - self.y).square()

    def variance(self, w: Tensor) -> Tensor:
        """(G, o), of W x."""
        if self.rows is not None:
            return (w @ self.rows.mT).square().sum(-1)
        return (self.times(w) * w).sum(-1).clamp(min=0)

    def level(self, w: Tensor) -> Tensor:
        """(G, o), mean of W x."""
        return (w @ self.x.unsqueeze(-1)).squeeze(-1)

    def start(self, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """The anchor with every output scaled for least mean square, since merging makes features
        smaller than they were, and the covariance of x with what that misses; both (G, o, n)."""
        known = self.times(anchor)
        power = (known * anchor).sum(-1)
        scale = (anchor * self.xy).sum(-1) / power.where(power > 0, 1)
        scale = scale.where(power > 0, 1).unsqueeze(-1)
        return anchor * scale, self.xy - known * scale

    def solve(self, anchor: Tensor, missed: Tensor, ridge: float) -> Affine:
        """The W and b of least mean square plus ridge * |W - A|^2, from what `start` gives; the
        ridge is relative to the mean variance of the inputs; b is free. Ridge inf: W = A."""
        w = anchor if ridge == math.inf else anchor + self._step(missed, ridge)
        return w, self.y - self.level(w)

    def _step(self, missed: Tensor, ridge: float) -> Tensor:
        """(y - A x) x^T (x x^T + r)^-1, by whichever of x x^T and x^T x is smaller."""
        rows = self.rows
        if rows is None or not ridge:
            power = self.power if rows is None else rows.mT @ rows
            assert power is not None
            return self._divided(missed, power, ridge)[0]
        inner, least = self._divided(missed @ rows.mT, self._gram, ridge)
        return (missed - inner @ rows) / least

    @cached_property
    def _gram(self) -> Tensor:
        assert self.rows is not None
        return self.rows @ self.rows.mT

    def _divided(self, t: Tensor, power: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """t (power + least)^-1, and what was added to the diagonal (G, 1, 1)."""
        size = power.diagonal(dim1=-2, dim2=-1).sum(-1) / self.x.shape[-1]
        least = ridge * size.clamp(min=torch.finfo().tiny)[:, None, None]
        if ridge not in self.factors:
            whole = power.clone()
            whole.diagonal(dim1=-2, dim2=-1).add_(least[..., 0])
            factor, failed = torch.linalg.cholesky_ex(whole)
            if bool(failed.any()):  # no ridge to speak of, and inputs that depend on one another
                inverse: Tensor = torch.linalg.pinv(whole, hermitian=True)
                return t @ inverse, least
            self.factors[ridge] = factor
        return torch.cholesky_solve(t.mT, self.factors[ridge]).transpose(-1, -2), least


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs with the same sources: index (p,) int64 of those that any group has; changed: (G, p)
    bool; what they solve, of all of the data, and the ridge that was chosen; check: of the data
    that was held out, where weights have a limit."""

    sources: tuple[int, ...]
    index: Tensor
    changed: Tensor
    normal: Normal
    ridge: float
    check: Normal | None = None


@dataclass(frozen=True, eq=False)
class Solution:
    """What became of a layer.

    weights: of all its outputs; parts: those that changed; before, after: mean square error on
    held-out data, relative to the targets' variance; unseen: (G, o) bool, outputs that no data, or
    none that could be held out, tells anything of; stored: (G, o, n), of which the weights are the
    rows scaled (None: the weights themselves).
    """

    weights: Affine
    parts: tuple[Outputs, ...]
    before: float
    after: float
    unseen: Tensor
    stored: Tensor | None = None

    def limited(
        self, current: Affine, nearest: Callable[[Tensor], Tensor], scales: bool
    ) -> Solution:
        """The weights that are possible, if these are better on held-out data than the current
        ones; the limit may be one on all of them together. scales: whether their rows can be."""
        stored = nearest(self.weights[0])
        w, b = stored.clone(), self.weights[1].clone()
        was = now = power = 0.0
        for part in self.parts:
            assert part.check is not None
            index, mine = part.index, part.changed
            own = stored[:, index]
            new = (part.normal.start(own)[0] if scales else own), part.normal.y
            new = new[0], new[1] - part.normal.level(new[0])
            was += float(part.check.loss((current[0][:, index], current[1][:, index]))[mine].sum())
            now += float(part.check.loss(new)[mine].sum())
            power += float(part.check.yy[mine].sum())
            _put(w, b, part, new)
        before, after = was / (power or 1.0), now / (power or 1.0)
        if self.unseen.any() or not now < was:
            return replace(self, weights=current, parts=(), before=before, after=before)
        return replace(self, weights=(w, b), before=before, after=after, stored=stored)

    @property
    def scale(self) -> Tensor | None:
        """(G, o): by what the stored weights are scaled."""
        if self.stored is None:
            return None
        size = self.stored.square().sum(-1)
        return (self.weights[0] * self.stored).sum(-1) / size.where(size > 0, 1)

    @property
    def changed(self) -> Tensor:
        """(G, o) bool."""
        found = torch.zeros_like(self.weights[1], dtype=torch.bool)
        for part in self.parts:
            found[:, part.index] |= part.changed
        return found

    def statistics(self, weight: Tensor) -> Affine:
        """Mean and variance (G, o) of weight (G, o, n) times x, of the outputs that changed."""
        mean, variance = torch.zeros_like(self.weights[1]), torch.zeros_like(self.weights[1])
        for part in self.parts:
            w, new = weight[:, part.index], part.normal
            mean[:, part.index] = torch.where(part.changed, new.level(w), mean[:, part.index])
            spread = torch.where(part.changed, new.variance(w), variance[:, part.index])
            variance[:, part.index] = spread
        return mean, variance

    @property
    def ridge(self) -> float:
        """The ridge that was chosen; nan where nothing changed."""
        return self.parts[0].ridge if self.parts else math.nan

    def corrected(self, anchor: Tensor, missed: Sequence[Missed | None]) -> Solution:
        """The same inputs with other targets; missed: (J,), what the weights now miss of them."""
        w, b = (t.clone() for t in self.weights)
        for part in self.parts:
            chosen = [m for j in part.sources if (m := missed[j]) is not None]
            level, crossed = Missed.mean(chosen, part.index)
            normal, own = part.normal, (w[:, part.index], b[:, part.index])
            if not normal.centred:
                level = torch.zeros_like(level)
            crossed = crossed - level.unsqueeze(-1) * (normal.x - chosen[0].shift).unsqueeze(-2)
            targets = replace(
                normal,
                xy=crossed + normal.times(own[0]),
                y=level + normal.level(own[0]) + own[1],
            )
            begin = targets.start(anchor[:, part.index])
            _put(w, b, part, targets.solve(*begin, part.ridge))
        return replace(self, weights=(w, b))


class Missed:
    """Accumulates what is missed of targets, e = y - W x - b, and its products with x.

    shift: (G, n), taken off x first.
    """

    def __init__(self, shift: Tensor, outputs: int) -> None:
        groups, n = shift.shape
        self.shift, self.count = shift, 0
        self.level = shift.new_zeros(groups, outputs)
        self.crossed = shift.new_zeros(groups, outputs, n)

    def add(self, x: Tensor, e: Tensor) -> None:
        """x: (G, S, n), e: (G, S, o)."""
        self.level += e.sum(-2, dtype=torch.float64)
        self.crossed += e.mT @ (x - self.shift.to(x).unsqueeze(-2))
        self.count += x.shape[-2]

    @staticmethod
    def mean(several: Sequence[Missed], index: Tensor) -> tuple[Tensor, Tensor]:
        """Means of e and of its products, for some of the outputs."""
        count = sum(m.count for m in several)
        level = torch.stack([m.level[:, index] for m in several]).sum(0)
        return level / count, torch.stack([m.crossed[:, index] for m in several]).sum(0) / count


def fit(
    train: Sequence[Moments],
    held: Sequence[Moments],
    n: int,
    asked: Sequence[Tensor],
    current: Affine,
    ridges: Sequence[float],
    *,
    takes_bias: bool = True,
    limited: bool = False,
) -> Solution:
    """Refit a layer; outputs for which that is not better on the held-out data, or for which there
    is none, stay as they are.

    Args:
        train, held: (J,) moments of [x, y], of two parts of each source's data.
        n: how many of the columns are inputs.
        asked: (J,) of (G, o) bool: whether a source has a target for an output.
        current: the weights as they are, to which the new ones are drawn.
        ridges: to choose from, by the largest set of outputs that have the same sources.
        takes_bias: whether b is free; else it is 0.
        limited: whether what comes out will be `limited`, which tells whether it is better.
    """
    patterns = torch.stack(list(asked), -1).to(current[0].device)
    w, b = (t.clone() for t in current)
    parts: list[Outputs] = []
    unseen = torch.zeros_like(b, dtype=torch.bool)
    before = after = power = 0.0
    ridge: float | None = None
    kinds, sizes = patterns.flatten(0, -2).unique(dim=0, return_counts=True)
    for pattern in kinds[sizes.argsort(descending=True, stable=True)]:
        sources = pattern.nonzero().flatten().tolist()
        seen, kept = (pooled(part[j] for j in sources) for part in (train, held))
        mine = (patterns == pattern).all(-1)
        if not seen.count or not kept.count:  # nothing tells whether it gets better
            unseen |= mine
            continue
        index = mine.any(0).nonzero().flatten()
        mine, own = mine[:, index], (current[0][:, index], current[1][:, index])
        known = Normal.of(seen, n, index, takes_bias)
        check = Normal.of(kept, n, index, takes_bias)
        ridge, new = _chosen(known, check, own[0], mine, ridges if ridge is None else (ridge,))
        was = float(check.loss(own)[mine].sum())
        whole = Normal.of(seen.merged(kept), n, index, takes_bias)
        wrong = whole.loss(own) > whole.noise
        part = Outputs(tuple(sources), index, mine & wrong, whole, ridge)
        if limited:
            part = replace(part, changed=mine, check=check)
        if limited or (new < was and bool(part.changed.any())):
            parts.append(part)
            _put(w, b, part, whole.solve(*whole.start(own[0]), ridge))
        before, after = before + was, after + min(was, new)
        power += float(check.yy[mine].sum())
    scale = power or 1.0
    return Solution((w, b), tuple(parts), before / scale, after / scale, unseen)


def _chosen(
    known: Normal, check: Normal, anchor: Tensor, mine: Tensor, ridges: Sequence[float]
) -> tuple[float, float]:
    """The ridge with the least error on other data, going downhill from the middle one, and that
    error."""
    ordered, begin = sorted(ridges), known.start(anchor)
    errors: dict[int, float] = {}

    def error(i: int) -> float:
        if i not in errors and 0 <= i < len(ordered):
            errors[i] = float(check.loss(known.solve(*begin, ordered[i]))[mine].sum())
            known.factors.clear()  # each is as large as the covariance
        return errors.get(i, math.inf)

    at = len(ordered) // 2
    for way in (-1, 1):
        while error(at + way) < error(at):
            at += way
    return ordered[at], error(at)


def _put(w: Tensor, b: Tensor, part: Outputs, new: Affine) -> None:
    """Write the outputs of a part that change."""
    w[:, part.index] = torch.where(part.changed.unsqueeze(-1), new[0], w[:, part.index])
    b[:, part.index] = torch.where(part.changed, new[1], b[:, part.index])
