"""With a refit in place, is there a better choice of M than matching the models' correlations?

    python -m benchmarks.beyond --sets ce_w1 text_w2 --seeds 2 --out benchmarks/results/x.md

All of these zip everything, refit, and have one loader for each task where tasks differ:

- weighted: features count by what the next layers read of them, their correlation times the root of
  the powers |w|^2 var that they bring into the layers that read them;
- matched again: the merged network runs beside the models, each of their features joins the merged
  feature with which it correlates most (one step of k-means, with centres that the merged network
  computes), and everything is fused and refitted once more; twice: another time;
- svd: the best linear M of each space, as if there were no activations in between.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

import zipfx
from benchmarks import harness, tables
from benchmarks.document import Document
from benchmarks.harness import Bench, Result
from zipfx.spaces import Role


class Recorder:
    """A matcher that matches by position and keeps what it was told."""

    def __init__(self) -> None:
        self.found: list[zipfx.Statistics] = []

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching:
        self.found.append(statistics)
        return zipfx.Identity()(statistics, merged)


class Given:
    """A matcher that has been told everything, space by space."""

    def __init__(self, assignments: Sequence[Tensor]) -> None:
        self.next = iter(assignments)

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching:
        return zipfx.Matching(next(self.next), statistics.sizes, merged)


class Weighted:
    """Zip on covariances of features that are scaled, space by space."""

    def __init__(self, scales: Sequence[Tensor]) -> None:
        self.next = iter(scales)

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching | zipfx.Linear:
        deviation = statistics.covariance.diagonal().clamp(min=0).sqrt()
        scale = next(self.next) * deviation
        power = statistics.correlation() * scale.outer(scale)
        weighed = replace(statistics, covariance=power, trusted=True)
        return zipfx.Zip(similarity="covariance")(weighed, merged, across_only=across_only)


def read_weights(models: Sequence[nn.Module], example: Tensor) -> list[Tensor]:
    """For every space: the norm of the weights that read each feature, of all models in turn."""
    found = []
    for space in zipfx.analyze(models[0], example):
        reads = [a for a in space.axes if a.role == Role.CONSUMES and a.by < 0]
        norms = []
        for model in models:
            power = torch.zeros(space.size, dtype=torch.float64)
            for axis in reads:
                weight = model.get_parameter(axis.parameter).detach().double()
                of_column = weight.movedim(axis.dim, 0).flatten(1).square().sum(1)
                power += of_column[axis.index].sum(1)
            norms.append((power / power.mean()).sqrt())
        found.append(torch.cat(norms))
    return found


def joined_again(statistics: zipfx.Statistics) -> Tensor:
    """(N,) the merged feature that each feature of the models joins; the last model is merged."""
    merged = statistics.sizes[-1]
    alike = statistics.correlation()[:-merged, -merged:].cpu().numpy()
    joined = alike.argmax(1)
    while len(lonely := np.setdiff1d(np.arange(merged), joined)):
        spare = np.flatnonzero(np.bincount(joined, minlength=merged)[joined] > 1)
        loss = alike[spare, joined[spare]][:, None] - alike[spare][:, lonely]
        row, column = np.unravel_index(loss.argmin(), loss.shape)
        joined[spare[row]] = lonely[column]
    return torch.from_numpy(joined)


def variants(bench: Bench, seed: int, images: int) -> Iterator[tuple[str, fx.GraphModule]]:
    """Every way to choose M, refitted."""
    models, own = bench.models, not bench.shares_tasks
    draw = bench.own_calibration if own else bench.calibration
    both = bench.calibration(images, seed)

    def merge(matcher: Any, repair: Any = "refit") -> fx.GraphModule:
        return zipfx.zip(models, draw(images, seed), matcher=matcher, repair=repair, progress=False)

    merged = merge("zip")
    yield "zip", merged
    yield "weighted", merge(Weighted(read_weights(models, next(iter(both))[:2])))
    yield "svd", merge("svd")
    for name in ("matched again", "matched again, twice"):
        recorder = Recorder()
        zipfx.zip([*models, merged], both, matcher=recorder, repair="none", progress=False)
        merged = merge(Given([joined_again(s) for s in recorder.found]))
        yield name, merged


def table(bench: Bench, seeds: int, images: int) -> list[Result]:
    """One row for each, over all seeds."""
    rows: dict[str, Result] = {}
    for seed in range(seeds):
        for name, merged in variants(bench, seed, images):
            row = rows.setdefault(name, bench.row(name, [merged]))
            row.stages.append(dict(merged.meta["zipfx"].seconds))
            bench.measure(row, [merged])
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser)
    parser.set_defaults(default_sets=["ce_w1", "text_w2"])
    options = harness.parse(parser, arguments)
    text = (__doc__ or "").partition("x.md\n\n")[2]
    document = Document("benchmarks.beyond", "Other choices of M, refitted", text, options.out)
    for bench in harness.benches(options):
        document.add(f"## {bench.name}")
        rows = [harness.originals(bench)[-1], *table(bench, options.seeds, options.images)]
        document.add(tables.accuracy_table(bench.name, rows))


if __name__ == "__main__":
    main()
