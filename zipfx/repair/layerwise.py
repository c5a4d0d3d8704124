"""Layerwise: every layer of a merge once more, by least squares on what it really reads.

In the order of the graph a layer's weights become those with which its inputs, as the merged
network computes them, come closest to what it should compute (`targets`). What earlier layers got
wrong is corrected along the way. No labels, no gradients, nothing but linear algebra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, fx

from zipfx.checks import flag, real, whole
from zipfx.errors import ZipError
from zipfx.merge import Fused
from zipfx.model.running import State, evaluating, state_of
from zipfx.observe import Calibration, Moments, spread
from zipfx.repair.batches import Batch, Line, Room, Run, gathered
from zipfx.repair.exposed.bake import bake, with_plain_weights
from zipfx.repair.exposed.splice import title
from zipfx.repair.exposed.unfold import unfold
from zipfx.repair.layers.layer import samples
from zipfx.repair.ridge import Missed, Solution, fit
from zipfx.repair.targets import RefitStep, plan_targets
from zipfx.text import weighed
from zipfx.trace import TracedModels
from zipfx.values import ByValue

_HELD_OUT = 10  # every tenth image is
_CHUNK = 2**24  # entries of patches at a time
_TURNS = 8  # grids of positions, taken in turns
_LOGIT_ROUNDS = 20

Easing = Callable[[Tensor, Tensor], Tensor]  # of targets and outputs: targets that are as good


@dataclass(frozen=True)
class Refit:
    """Settings of repair="refit".

    Args:
        ridges: how strongly weights are drawn to the zipped ones, relative to the mean variance of
            a layer's inputs; each layer takes what is best on held-out data (a tenth of the images
            of each loader, chosen by content; one of fewer; with one image nothing changes).
            inf: the zipped weights, scaled and shifted output by output.
        rounds: how often targets are set anew where an activation follows that is flat on one
            side: there, outputs that are beyond its bend already are left alone.
        oversampling: samples for each unknown of an output that are enough: where images have more
            positions, a regular grid of them is taken, another for every image.
        memory: bytes; how large the values may be, in all, that batches keep for the layers to
            come. Batches for which that is not enough are run from their inputs again for every
            layer; the outcome is the same, unless forward draws random numbers.
        logits: whether the outputs are logits: a layer that gives them is then solved for the
            probabilities that the models give (least divergence), where else all logits count
            alike, those of what never happens as much as any.

    Raises:
        ZipError: one of them is out of range.
    """

    ridges: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, math.inf)
    rounds: int = 1
    oversampling: float = 25
    memory: float = math.inf
    logits: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.ridges, Sequence) or isinstance(self.ridges, str) or not self.ridges:
            raise ZipError(f"ridges are {self.ridges!r}: give a tuple of at least one")
        for ridge in self.ridges:
            real("a ridge", ridge, 0)
        whole("rounds", self.rounds, 0)
        if real("oversampling", self.oversampling, 0) == 0:
            raise ZipError(f"oversampling is {self.oversampling}: it must be above 0")
        real("memory", self.memory, 0)
        flag("logits", self.logits)

    def __call__(
        self, fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        """See `Repair`: all layers of the merge towards what the models compute."""
        merged = fused.module
        state = state_of(merged, traced.inputs)
        plain, bakeable = with_plain_weights(merged, traced.inputs, state.tensors)
        wide = unfold(plain, traced.inputs)
        wides = [unfold(m, traced.inputs, to_write=False) for m in traced.modules]
        bounds = fused.limits([one.parameter for one in bakeable if not one.is_view])
        loaders = len(data.loaders)
        steps, left = plan_targets(
            wide, fused.assembly, fused.plans, loaders, wides, state.tensors, bounds
        )
        states = [state, *traced.states]
        refits, batches = refit(wide, wides, steps, data, self, states, progress=progress)
        notes = [
            *[f"not refitted: {', '.join(left)}"] * bool(left),
            *_unfitted(refits),
            *bake(merged, bakeable),
        ]
        return Repaired(batches, tuple(refits), tuple(notes))


@dataclass(frozen=True, eq=False)
class Refitted(ByValue):
    """One layer: mean square error on held-out data before and after, relative to the variance of
    the targets; the ridge that was chosen; how many outputs changed, of all, and for how many there
    was not enough data (two samples)."""

    name: str
    before: float
    after: float
    ridge: float
    changed: int
    outputs: int
    unseen: int = 0


@dataclass(frozen=True, eq=False)
class Repaired(ByValue):
    """What a repair did: batches it has read (None: it needs none), layers it has refitted, and
    notes for the report."""

    batches: int | None
    refits: tuple[Refitted, ...] = ()
    notes: tuple[str, ...] = ()


def _unfitted(refits: Sequence[Refitted]) -> list[str]:
    """What refitting left as it was for want of data."""
    unseen = [r.name for r in refits if r.unseen]
    notes = []
    if unseen:
        notes.append(
            "not refitted for want of data (each loader takes two samples, one to be held out): "
            f"{', '.join(unseen)}"
        )
    if not any(r.changed for r in refits):
        notes.append(
            "the repair changed nothing: no layer that it could change got better on held-out data"
        )
    return notes


def refit(
    merged: fx.GraphModule,
    modules: Sequence[fx.GraphModule],
    steps: Sequence[RefitStep],
    data: Calibration,
    settings: Refit,
    states: Sequence[State] = (),
    *,
    progress: bool = False,
) -> tuple[list[Refitted], int]:
    """Refit the layers of `merged` in place.

    states: of `merged` and of the modules: what their forwards write to.

    All batches are run side by side, layer by layer, so the values that later nodes still wait for
    are kept for all of them: time is that of one pass, memory that of one moment of it. Early
    layers have the largest values, and are the ones that are soon run again where memory is short.

    Returns:
        What became of each layer, and the number of batches.

    Raises:
        ZipError: no data, or a layer that reads NaN or Inf on it.
    """
    done = []
    with evaluating(merged, *modules), torch.no_grad():
        batches = gathered(merged.forward, data)
        line, *lines = (Line(m, s) for m, s in zip_longest((merged, *modules), states))
        paths = [
            {k: lines[k] for step in steps if step.asked[j].any() for k in step.matrices[j]}
            for j in range(len(data.loaders))
        ]
        room = Room(settings.memory)
        costs = [_cost(step, batches, settings) for step in steps]
        for step in weighed(steps, costs, "zipfx: refit", shown=progress):
            solution = _Fit(step, batches, line, paths, settings, room).solve()
            changed = solution.changed
            if solution.parts:
                weight, bias = solution.weights
                weight = weight if solution.stored is None else solution.stored
                measured = solution.statistics(step.layer.measured(weight))
                step.layer.write(weight, bias, changed, *measured, solution.scale)
            losses = solution.before, solution.after, solution.ridge
            numbers = int(changed.sum()), changed.numel(), int(solution.unseen.sum())
            done.append(Refitted(title(step.node), *losses, *numbers))
        for state in states:
            state.reset()
    return done, len(batches)


def _cost(step: RefitStep, batches: Sequence[Batch], settings: Refit) -> float:
    """About how many operations a step takes; letters as in `layers.layer`."""
    groups, outputs = step.asked[0].shape
    n = step.inputs
    positions = sum(len(b.images) for b in batches) * step.positions
    some = min(positions, max(settings.oversampling * n, positions * outputs / n))
    least, tried = min(n, some), min(3, len(settings.ridges))
    run = (1 + len(step.matrices[0])) * positions * outputs * n
    moments = (1 + settings.rounds * (step.flat is not None)) * some * n * (n + outputs)
    solved = (1 + 2 * tried) * least * (least**2 / 3 + 2 * outputs * n)
    uses = 1 + len(step.others)
    return float(groups * (uses * (run + moments) + 2 * solved))  # these are in float64


class _Fit:
    """One layer: gathers moments over all batches, and solves."""

    def __init__(
        self,
        step: RefitStep,
        batches: Sequence[Batch],
        line: Line,
        paths: Sequence[Mapping[int, Line]],
        settings: Refit,
        room: Room,
    ) -> None:
        self.step, self.layer, self.settings, self.room = step, step.layer, settings, room
        self.line, self.paths = line, paths
        self.batches = [b for b in batches if bool(step.asked[b.source].any())]
        self.images = sum(len(b.images) for b in self.batches)
        self.n = step.inputs
        self.matrices = [dict(of_source) for of_source in step.matrices]

    def solve(self) -> Solution:
        was = self.layer.folded()
        solution = fit(
            *self._moments(), self.n, self.step.asked, was, self.settings.ridges,
            takes_bias=self.layer.takes_bias, limited=self.layer.limit is not None,
        )  # fmt: skip
        for eased in _easings(self.step, self.settings) if solution.parts else ():
            # drawn to what it is by then, no round leads away from what the models give
            anchor = solution.weights[0] if eased is _as_likely else was[0]
            solution = solution.corrected(anchor, self._missed(solution, eased))
        if self.layer.limit is not None and solution.parts:
            return solution.limited(was, self.layer.nearest, self.layer.scales)
        return solution

    def _moments(self) -> tuple[list[Moments], list[Moments]]:
        """Of inputs and targets side by side, for each source: (most of the data, held out)."""
        parts = [[Moments(self.n // 2, self.n) for _ in self.step.asked] for _ in range(2)]
        for batch in self.batches:
            for x, y, _, held in self._samples(batch):
                parts[held][batch.source].add(torch.cat([x, y], -1))
        if not all(bool(m.finite().all()) for part in parts for m in part if m.count):
            raise ZipError(
                f"layer {title(self.step.node)!r} reads or should give NaN or Inf on the "
                "calibration data, and can not be refitted; check the models' weights and the "
                "input normalisation"
            )
        return parts[0], parts[1]

    def _missed(self, solution: Solution, eased: Easing) -> list[Missed | None]:
        """What the weights miss of the targets, where what follows makes it matter."""
        w, b = solution.weights
        found: list[Missed | None] = [None] * len(self.step.asked)
        for batch in self.batches:
            mine = found[batch.source] or Missed(solution.parts[0].normal.x, w.shape[1])
            found[batch.source] = mine
            for x, y, older, _ in self._samples(batch):
                output = x @ w.mT.to(x) + b.unsqueeze(1).to(x)
                mine.add(x, eased(y + older, output + older) - output - older)
        return found

    def _advanced(self, step: RefitStep, batch: Batch) -> Run:
        """Up to what the layer reads in the merged graph, and what models have in its place."""
        run = batch.start(self.line, self.paths[batch.source])
        run.advance(step.node, inclusive=False)
        for k in step.matrices[batch.source]:
            batch.runs[k].advance(batch.runs[k].line.named[step.target])
        return run

    def _samples(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        """Inputs (G, S, n), targets (G, S, o), what is added to these (G, S, o), some at a time,
        and whether they are held out."""
        if not self.step.apart:
            yield from self._samples_at(self.step, batch)
            self.room.settle(batch)
            return
        again = batch.again()  # beyond layers that are yet to be refitted
        for step in (self.step, *self.step.others):
            yield from self._samples_at(step, again)

    def _samples_at(
        self, step: RefitStep, batch: Batch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        layer, run = self.layer, self._advanced(step, batch)
        patches = layer.patches(run.values[step.node.args[0]])  # type: ignore[index]
        patches = patches.movedim(step.images, 0)
        targets = {k: batch.runs[k].value(step.target) for k in step.matrices[batch.source]}
        made = {k: layer.results(t).movedim(step.images, 0) for k, t in targets.items()}
        skip = None
        if step.skip is not None:
            skip = run.values[step.skip].expand(next(iter(targets.values())).shape)
            skip = layer.results(skip).movedim(step.images, 0)
        shape = next(iter(made.values())).shape
        grid = list(shape[1:-2])
        mask = None if batch.mask is None else spread(batch.mask, (shape[0], *grid))
        if mask is not None:
            mask = mask.expand(shape[0], *grid).reshape(shape[0], *grid, 1, 1)
        stride = self._stride(batch, shape[0], grid)
        image = _image(shape[0], batch)
        cells = stride ** len(grid)
        turns = min(_TURNS, cells)
        turn = image % turns
        every = max(2, min(_HELD_OUT, batch.of))
        key = 2 * turn + (image % every == every - 1)
        rows = max(1, math.prod(grid) // cells)
        chunk = max(1, _CHUNK // (rows * layer.groups * self.n))
        for which in key.unique().tolist():
            cell = which // 2 * cells // turns
            offset = [cell // stride**d % stride for d in range(len(grid))]

            def taken(view: Tensor, index: Tensor, offset: list[int] = offset) -> Tensor:
                found = samples(view, len(grid), stride, offset, index)
                return found.to(torch.promote_types(found.dtype, torch.float32))

            for index in (key == which).nonzero().flatten().split(chunk):
                index = index.to(patches.device)
                x = taken(patches, index)
                y = self._targets(batch.source, {k: taken(v, index) for k, v in made.items()})
                older = torch.zeros_like(y[:, :1]) if skip is None else taken(skip, index)
                if mask is not None:
                    kept = taken(mask.to(x.device), index)[0, :, 0] > 0
                    x, y = x[:, kept], y[:, kept]
                    older = older if skip is None else older[:, kept]
                yield x, y - older, older, bool(which % 2)

    def _stride(self, batch: Batch, rows: int, grid: Sequence[int]) -> int:
        """Of the positions that are taken, along each dimension of the grid.

        Taking S samples costs S n^2 for every group, running the layer n o for each of all.
        """
        if not grid:
            return 1
        every = self.images * (rows / len(batch.images)) * math.prod(grid)
        outputs = self.step.asked[0].shape[1]
        enough = max(self.settings.oversampling * self.n, every * outputs / self.n)
        return max(1, min(int((every / enough) ** (1 / len(grid))), *grid))

    def _targets(self, source: int, features: dict[int, Tensor]) -> Tensor:
        """M times the models' features, (G, S, o)."""
        total: Tensor | None = None
        for k, value in features.items():
            matrix = self.matrices[source][k] = self.matrices[source][k].to(value)
            flat = value.movedim(0, 1).flatten(1)
            flat = flat * matrix if matrix.ndim == 1 else flat @ matrix.T
            total = flat if total is None else total.add_(flat)
        assert total is not None
        grouped: Tensor = total.unflatten(1, (self.layer.groups, -1))
        return grouped.movedim(1, 0)


def _easings(step: RefitStep, settings: Refit) -> list[Easing]:
    """How the targets of a layer are set anew, round by round."""
    if step.flat is not None:
        return [partial(_eased, low=step.flat[0], high=step.flat[1])] * settings.rounds
    every = step.layer.groups == 1 and all(bool(a.all()) or not a.any() for a in step.asked)
    return [_as_likely] * (_LOGIT_ROUNDS * (settings.logits and step.given and every))


def _eased(target: Tensor, output: Tensor, low: float, high: float) -> Tensor:
    """Targets beyond a bend, where the output is beyond it, too, become that output."""
    target = torch.where(target <= low, output.clamp(max=low), target)
    return (
        torch.where(target >= high, output.clamp(min=high), target) if high < math.inf else target
    )


def _as_likely(target: Tensor, output: Tensor) -> Tensor:
    """Targets (G, S, o) of which least squares lessens the divergence of the outputs' softmax from
    the targets': that of logits is bent by no more than half the identity (Boehning, "Multinomial
    logistic regression algorithm", 1992)."""
    return output + 2 * (target.softmax(-1) - output.softmax(-1))


def _image(rows: int, batch: Batch) -> Tensor:
    """The image that each row of a tensor comes from: windows of one are side by side. Rows that
    are not of images are numbered themselves."""
    if not rows or rows % len(batch.images):
        return torch.arange(rows)
    return batch.images.repeat_interleave(rows // len(batch.images))
