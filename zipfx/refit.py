"""Refit: every layer of the merged model once more, by least squares on what it really reads.

In the order of the graph a layer's weights become those with which its inputs, as the merged
network computes them, come closest to what it should compute (`targets`). What earlier layers got
wrong is corrected along the way. No labels, no gradients, nothing but linear algebra.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from zipfx.calibrate import Calibration, batch_size
from zipfx.errors import ZipError
from zipfx.layers import samples
from zipfx.moments import Moments
from zipfx.replay import Line, Run, evaluating, positional
from zipfx.ridge import Missed, Solution, fit
from zipfx.targets import Step
from zipfx.trace import clone_tensors
from zipfx.unfold import title
from zipfx.values import ByValue

_HELD_OUT = 10  # every tenth image is
_CHUNK = 2**24  # entries of patches at a time
_TURNS = 8  # grids of positions, taken in turns


@dataclass(frozen=True)
class Refit:
    """Settings of repair="refit".

    Args:
        ridges: how strongly weights are drawn to the zipped ones, relative to the mean variance of
            a layer's inputs; each layer takes what is best on held-out data (every tenth image, or
            the last of fewer; with one image nothing changes).
            inf: the zipped weights, scaled and shifted output by output.
        rounds: how often targets are set anew where an activation follows that is flat on one
            side: there, outputs that are beyond its bend already are left alone.
        oversampling: samples for each unknown of an output that are enough: where images have more
            positions, a regular grid of them is taken, another for every image.
        memory: bytes; how large the values may be, in all, that batches keep for the layers to
            come. Batches for which that is not enough are run from their inputs again for every
            layer; the outcome is the same, unless forward draws random numbers or writes to its own
            tensors.

    Raises:
        ZipError: one of them is out of range.
    """

    ridges: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, math.inf)
    rounds: int = 1
    oversampling: float = 25
    memory: float = math.inf

    def __post_init__(self) -> None:
        if not self.ridges or not min(self.ridges) >= 0:
            raise ZipError(f"ridges are {self.ridges}: give at least one, none below 0")
        if self.rounds < 0:
            raise ZipError(f"rounds is {self.rounds}: it must be at least 0")
        if not self.oversampling > 0:
            raise ZipError(f"oversampling is {self.oversampling}: it must be above 0")
        if not self.memory >= 0:
            raise ZipError(f"memory is {self.memory}: it must be at least 0 bytes")


@dataclass(frozen=True, eq=False)
class Refitted(ByValue):
    """One layer: mean square error on held-out data before and after, relative to the variance of
    the targets; the ridge that was chosen; and how many outputs changed, of all."""

    name: str
    before: float
    after: float
    ridge: float
    changed: int
    outputs: int


def refit(
    merged: fx.GraphModule,
    modules: Sequence[fx.GraphModule],
    steps: Sequence[Step],
    data: Calibration,
    settings: Refit,
    *,
    progress: bool = False,
) -> tuple[list[Refitted], int]:
    """Refit the layers of `merged` in place.

    All batches are run side by side, layer by layer, so the values that later nodes still wait for
    are kept for all of them: time is that of one pass, memory that of one moment of it. Early
    layers have the largest values, and are the ones that are soon run again where memory is short.

    Returns:
        What became of each layer, and the number of batches.

    Raises:
        ZipError: no data, or a layer that reads NaN or Inf on it.
    """
    done = []
    mine = {id(t) for step in steps for t in step.layer.buffers()}
    kept = [(t, t.clone()) for t in merged.buffers() if id(t) not in mine]  # forward may write
    with evaluating(merged, *modules), torch.no_grad():
        batches = _batches(merged, modules, data, steps)
        room = _Room(settings.memory)
        for step in tqdm(steps, desc="zipfx: refit", disable=not progress, leave=False):
            solution = _Fit(step, batches, settings, room).solve()
            changed = solution.changed
            if solution.parts:
                measured = solution.statistics(step.layer.measured(solution.weights[0]))
                step.layer.write(*solution.weights, changed, *measured)
            losses = solution.before, solution.after, solution.ridge
            number = int(changed.sum())
            done.append(Refitted(title(step.node), *losses, number, changed.numel()))
        for t, was in kept:
            t.copy_(was)
    return done, len(batches)


@dataclass
class _Batch:
    """A batch, and where it is on its way through the merged graph and through those of models.

    line, lines: of the merged graph, and by model of those that its source needs; inputs: of all;
    first: number of its first image among those of its source; every: so many images, the last is
    held out; run, runs: None until it starts.
    """

    source: int
    line: Line
    lines: dict[int, Line]
    inputs: tuple[Any, ...]
    first: int
    images: int
    every: int = _HELD_OUT
    run: Run | None = None
    runs: dict[int, Run] = field(default_factory=dict)

    def advance(self, step: Step) -> Run:
        """Up to what a layer reads in the merged graph, and what models have in its place."""
        if self.run is None:
            self.run = Run(self.line, clone_tensors(self.inputs))
            self.runs = {k: Run(n, clone_tensors(self.inputs)) for k, n in self.lines.items()}
        self.run.advance(step.node, inclusive=False)
        for k in step.matrices[self.source]:
            self.runs[k].advance(self.runs[k].line.named[step.target])
        return self.run

    def restart(self) -> None:
        """Forget all values."""
        self.run, self.runs = None, {}

    def nbytes(self) -> int:
        """Of the values that wait; views count once, the tensors of the modules do not."""
        found: dict[int, int] = {}
        runs = [run for run in (self.run, *self.runs.values()) if run is not None]
        for run in runs:
            leaves = tree_leaves(list(run.values.values()))
            storages = [t.untyped_storage() for t in leaves if isinstance(t, Tensor)]
            found |= {s._cdata: s.nbytes() for s in storages if s._cdata not in run.line.own}
        return sum(found.values())


class _Room:
    """What all batches may keep while others run."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.held: dict[int, int] = {}

    def settle(self, batch: _Batch) -> None:
        """A batch has been looked at: it keeps its values, or starts again when it is needed."""
        if self.memory == math.inf:
            return
        self.held.pop(id(batch), None)
        size = batch.nbytes()
        if sum(self.held.values()) + size > self.memory:
            batch.restart()
        else:
            self.held[id(batch)] = size


def _batches(
    merged: fx.GraphModule,
    modules: Sequence[fx.GraphModule],
    data: Calibration,
    steps: Sequence[Step],
) -> list[_Batch]:
    line, *lines = [Line(m) for m in (merged, *modules)]
    needed = [
        {k: lines[k] for step in steps if step.asked[j].any() for k in step.matrices[j]}
        for j in range(len(data.loaders))
    ]
    seen: dict[int, int] = {}
    found = []
    for j, (args, kwargs) in data.by_source():
        inputs = positional(merged.forward, args, kwargs)
        n = batch_size((args, kwargs))
        if n == 0:
            continue
        n = n or 1
        inputs = clone_tensors(inputs)  # a loader may fill the same memory again
        found.append(_Batch(j, line, needed[j], inputs, seen.get(j, 0), n))
        seen[j] = seen.get(j, 0) + n
    if not found:
        raise ZipError("the calibration data is empty: there is nothing to refit with")
    for batch in found:
        batch.every = max(2, min(_HELD_OUT, seen[batch.source]))
    return found


class _Fit:
    """One layer: gathers moments over all batches, and solves."""

    def __init__(self, step: Step, batches: Sequence[_Batch], settings: Refit, room: _Room) -> None:
        self.step, self.layer, self.settings, self.room = step, step.layer, settings, room
        self.batches = [b for b in batches if bool(step.asked[b.source].any())]
        self.images = sum(b.images for b in self.batches)
        self.n = self.layer.weight().shape[-1]
        self.matrices = [dict(of_source) for of_source in step.matrices]

    def solve(self) -> Solution:
        was = self.layer.folded()
        solution = fit(
            *self._moments(), self.n, self.step.asked, was, self.settings.ridges,
            takes_bias=self.layer.takes_bias,
        )  # fmt: skip
        flat = self.step.flat if solution.parts else None
        for _ in range(self.settings.rounds if flat is not None else 0):
            solution = solution.corrected(was[0], self._missed(solution))
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

    def _missed(self, solution: Solution) -> list[Missed | None]:
        """What the weights miss of the targets, where an activation makes it matter."""
        assert self.step.flat is not None
        w, b = solution.weights
        found: list[Missed | None] = [None] * len(self.step.asked)
        for batch in self.batches:
            mine = found[batch.source] or Missed(solution.parts[0].normal.x, w.shape[1])
            found[batch.source] = mine
            for x, y, older, _ in self._samples(batch):
                output = x @ w.mT.to(x) + b.unsqueeze(1).to(x)
                mine.add(x, _eased(y + older, output + older, *self.step.flat) - output - older)
        return found

    def _samples(self, batch: _Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        """Inputs (G, S, n), targets (G, S, o), what is added to these (G, S, o), some at a time,
        and whether they are held out."""
        step, layer = self.step, self.layer
        run = batch.advance(step)
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
        stride = self._stride(batch, shape[0], grid)
        image = _image(shape[0], batch)
        cells = stride ** len(grid)
        turns = min(_TURNS, cells)
        turn = image % turns
        key = 2 * turn + (image % batch.every == batch.every - 1)
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
                yield x, y - older, older, bool(which % 2)
        self.room.settle(batch)

    def _stride(self, batch: _Batch, rows: int, grid: Sequence[int]) -> int:
        """Of the positions that are taken, along each dimension of the grid.

        Taking S samples costs S n^2 for every group, running the layer n o for each of all.
        """
        if not grid:
            return 1
        every = self.images * (rows / batch.images) * math.prod(grid)
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


def _eased(target: Tensor, output: Tensor, low: float, high: float) -> Tensor:
    """Targets beyond a bend, where the output is beyond it, too, become that output."""
    target = torch.where(target <= low, output.clamp(max=low), target)
    return (
        torch.where(target >= high, output.clamp(min=high), target) if high < math.inf else target
    )


def _image(rows: int, batch: _Batch) -> Tensor:
    """The image that each row of a tensor comes from: windows of one are side by side. Rows that
    are not of images are numbered themselves."""
    if rows % batch.images:
        return torch.arange(rows)
    return batch.first + torch.arange(rows) // max(1, rows // batch.images)
