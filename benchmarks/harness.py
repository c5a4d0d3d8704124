"""Merge sets of checkpoints in many ways and measure each: one way to run them, one table.

Letters: K models, each with a task of its own. Used by `benchmarks.matchers`, `ablations`,
`real_pairs` and `places`, which differ in the methods they list.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

import zipfx
from benchmarks import checkpoints, data, evaluate, memory
from benchmarks.checkpoints import Checkpoints


@dataclass(frozen=True)
class Method:
    """One way to merge.

    ``images`` per task and ``flips`` (mirror half of them) of the calibration: None takes those of
    the run. ``own``: every model gets a loader with the images of its task, instead of one loader
    for all. ``reset``: BatchNorm statistics are reset on other images afterwards. ``series`` and
    ``x`` say where a sweep plots it.
    """

    name: str
    matcher: str | zipfx.Matcher
    partial: str | None = None
    repair: str | zipfx.Refit = "none"
    reset: bool = True
    own: bool = False
    places: str = "source"
    images: int | None = None
    flips: bool | None = None
    series: str = ""
    x: float = math.nan


@dataclass
class Result:
    """One row: what it costs, and lists over the calibration seeds. ``layers``: zipped, of all.

    ``stages``: seconds of each stage of `zipfx.zip`; ``correlations``: of joined features, by
    module. ``error``: why there are no numbers.
    """

    name: str
    parameters: int
    flops: int
    method: Method | None = None
    layers: tuple[int, int] | None = None
    accuracies: list[evaluate.Accuracy] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    correlations: list[dict[str, float]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Sizes:
    """How many images: per task to match on and to reset statistics on, and in all to test on."""

    images: int = 500
    reset: int = 1000
    test: int = 4000
    flips: bool = True
    batch: int = 100


class Bench:
    """A set of checkpoints and the images to calibrate and test it on."""

    def __init__(
        self,
        which: Checkpoints,
        images: dict[str, data.Images],
        sizes: Sizes | None = None,
        device: str = "cpu",
    ) -> None:
        self.set, self.name = which, which.name
        self.models = [model.to(device) for model in which.models]
        self.sizes = sizes or Sizes()
        self.device, self.train, self.classes = device, images["train"], images["train"].classes
        known = sorted({label for task in which.tasks for label in task})
        self.test = data.subset(images["test"], self.sizes.test, known)
        self.batches = data.Batches(self.test, self._normalise, size=self.sizes.batch)

    def _normalise(self, images: Tensor) -> Tensor:
        return self.set.normalise(images).to(self.device)

    def calibration(
        self,
        per_task: int,
        seed: int,
        flips: bool = True,
        tasks: Sequence[tuple[int, ...]] | None = None,
    ) -> data.Batches:
        """Of these tasks; default: of all."""
        return data.calibration(
            self.train,
            self.set.tasks if tasks is None else tasks,
            per_task,
            self._normalise,
            seed=seed,
            flips=flips,
            batch_size=self.sizes.batch,
        )

    def own_calibration(self, per_task: int, seed: int, flips: bool = True) -> list[data.Batches]:
        """As many images, one loader for each task."""
        return [
            self.calibration(per_task, seed + 100 * k, flips, [task])
            for k, task in enumerate(self.set.tasks)
        ]

    @property
    def shares_tasks(self) -> bool:
        """Whether all models were trained on the same classes."""
        return len(set(self.set.tasks)) == 1

    def measure(self, result: Result, modules: Sequence[nn.Module], alone: int = 0) -> None:
        """Adds the accuracy of these modules to a row; ``alone``: which model a single head is."""
        outputs = evaluate.heads(modules, self.batches)
        if self.set.embeddings is None:
            heads = [alone] if len(outputs) == 1 else range(len(outputs))
            columns = [self._columns(o, k) for o, k in zip(outputs, heads, strict=True)]
            outputs = [
                evaluate.expand(o, c, self.classes) for o, c in zip(outputs, columns, strict=True)
            ]
        found = evaluate.accuracy(outputs, self.test.labels, self.set.tasks, self.set.embeddings)
        result.accuracies.append(found)
        tasks = ", ".join(f"{value:.1f}" for value in found.tasks)
        _progress(self.name, result.name, f"joint {found.joint:.1f}, tasks {tasks}")

    def _columns(self, outputs: Tensor, model: int) -> Sequence[int]:
        """The class that each output of a model stands for."""
        for classes in (range(self.classes), self.set.tasks[model]):
            if outputs.shape[1] == len(classes):
                return classes
        raise ValueError(
            f"model {self.set.letters[model]} of {self.name} has {outputs.shape[1]} outputs, its "
            f"task {len(self.set.tasks[model])} classes and the data {self.classes}: with text "
            "targets give --embeddings, else --tasks"
        )

    @property
    def available(self) -> int:
        """Training images that there are of every task."""
        labels = self.train.labels
        return min(int(torch.isin(labels, torch.tensor(t)).sum()) for t in self.set.tasks)

    @cached_property
    def shares_outputs(self) -> bool:
        """Whether the outputs of all models mean the same, so that they can be averaged."""
        if self.set.embeddings is not None:
            return True
        image = next(iter(self.batches))[:1]
        outputs = [evaluate.heads([m], [image])[0] for m in self.models]
        return len({tuple(self._columns(o, k)) for k, o in enumerate(outputs)}) == 1

    def row(self, name: str, modules: Sequence[nn.Module], method: Method | None = None) -> Result:
        image = next(iter(self.batches))[:1]
        return Result(name, evaluate.parameters(modules), evaluate.flops(modules, image), method)


def originals(bench: Bench, seeds: int = 0) -> list[Result]:
    """The models as they are, and their ensemble; with seeds also with their statistics reset."""
    rows = []
    for k, model in enumerate(bench.models):
        rows.append(bench.row(f"model {bench.set.letters[k]}", [model]))
        bench.measure(rows[-1], [model], k)
    rows.append(bench.row("ensemble", bench.models))
    bench.measure(rows[-1], bench.models)
    if seeds:
        rows.append(bench.row("ensemble, statistics reset", bench.models))
    for seed in range(seeds):
        resetting = bench.calibration(bench.sizes.reset, seed + 1000)
        bench.measure(rows[-1], [evaluate.reset_batch_norm(m, resetting) for m in bench.models])
    return rows


def run(bench: Bench, methods: Iterable[Method], seeds: int) -> list[Result]:
    """One row for each method, over all seeds. Where the outputs of the models do not mean the same
    only methods that end in one head per model are run."""
    sharing = bench.shares_outputs
    return [_run(bench, m, seeds) for m in methods if sharing or m.partial is not None]


def _run(bench: Bench, method: Method, seeds: int) -> Result:
    sizes = bench.sizes
    result: Result | None = None
    for seed in range(seeds):
        flips = sizes.flips if method.flips is None else method.flips
        count = method.images or sizes.images
        draw = bench.own_calibration if method.own else bench.calibration
        matching = draw(count, seed, flips)
        memory.reset_peak()
        before = memory.resident()
        try:
            merged = zipfx.zip(
                bench.models,
                matching,
                partial=method.partial,
                matcher=method.matcher,
                repair=method.repair,
                places=method.places,
                progress=False,
                seed=seed,
            )
        except zipfx.ZipError as error:
            _progress(bench.name, method.name, error)
            return Result(method.name, 0, 0, method, error=str(error))
        peak = memory.peak_resident() - before
        report: zipfx.Report = merged.meta["zipfx"]
        module: nn.Module = merged
        if method.reset:
            resetting = bench.calibration(sizes.reset, seed + 1000)
            module = evaluate.reset_batch_norm(merged, resetting)
        result = result or bench.row(method.name, [module], method)
        result.layers = report.layers
        result.stages.append(dict(report.seconds))
        result.peaks.append(peak)
        result.correlations.append(_by_stage(report))
        bench.measure(result, [module])
    assert result is not None, "no seed"
    return result


def _by_stage(report: zipfx.Report) -> dict[str, float]:
    """Mean correlation of joined features over the spaces of each module at the top."""
    found: dict[str, list[float]] = {}
    for space in report.spaces:
        found.setdefault(space.name.partition(".")[0], []).append(space.correlation)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _progress(*facts: object) -> None:
    print(*facts, sep=": ", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that merges checkpoints; `parse` and `benches` read them."""
    sizes = Sizes()
    checkpoints.add_arguments(parser)
    data.add_arguments(parser)
    evaluate.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration seeds")
    parser.add_argument("--images", type=int, default=sizes.images, help="per task, to match on")
    parser.add_argument(
        "--reset-images", type=int, default=sizes.reset, help="per task, to reset statistics on"
    )
    parser.add_argument("--test-images", type=int, default=sizes.test)
    parser.add_argument("--no-flips", action="store_true", help="match on images as they are")
    parser.add_argument("--batch-size", type=int, default=sizes.batch)
    parser.add_argument("--device", default="cpu")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, once they make sense; threads are set, since results say how many there are."""
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}: give at least 1")
    torch.set_num_threads(options.threads)
    return options


def benches(options: argparse.Namespace) -> Iterator[Bench]:
    """The sets that the options choose, ready to run, loaded one at a time."""
    images = data.chosen(options)
    sizes = Sizes(
        options.images,
        options.reset_images,
        options.test_images,
        not options.no_flips,
        options.batch_size,
    )
    for which in checkpoints.chosen(options, images["train"].classes):
        yield Bench(which, images, sizes, options.device)
