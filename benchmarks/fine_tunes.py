"""Fine-tunes of one base, merged: zipfx beside what is usual for them.

    python -m benchmarks.fine_tunes --out benchmarks/results/fine_tunes_cpu_202611.md

The subjects are those of `benchmarks.tuned`; every seed trains anew. Rivals (`benchmarks.rivals`)
merge by position. Everything is at the size and cost of one network, but for the ensemble.

- data: what a method reads. *inputs* are the calibration data, for each task its own (some 500
  images, 400 windows of 64 characters), without labels; *labels* are as many other samples with
  labels, on which the factor was chosen that is best there, by the sum of both columns.
- best on test: the factor was chosen on the test data itself. No one can do that; it says what a
  better choice could give.
- BatchNorm statistics of all rivals, but for the row that says otherwise, were measured again on
  the calibration data of both tasks mixed.
- one loader: all data for both fine-tunes, instead of a loader for each; the last three rows are
  what was tried besides (`benchmarks.nearer`).
- told which: each fine-tune on its own task only, so that someone has to say which task it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zipfx
from benchmarks import evaluate, nearer, rivals
from benchmarks.document import Document
from benchmarks.tuned import SUBJECTS, Samples, Subject, likely

FACTORS = (0.2, 0.3, 0.5, 0.7, 1.0)
TIES = tuple((factor, density) for density in (0.2, 0.5) for factor in (0.3, 0.6, 1.0))
SHRINKS = (0.1, 0.5, 0.9)
SHARES = (0.2, 0.5, 0.8)
ZIPS = (
    ("zip", "none"),
    ("zip", "bn"),
    ("zip", "refit"),
    ("permute", "refit"),
    ("identity", "refit"),
)
Scores = tuple[float, float]


@dataclass
class Row:
    """What a method reads, and of every seed its scores, the factor chosen and seconds."""

    reads: str
    scores: list[Scores] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Run:
    """One subject and seed, measured; adds to the rows of all seeds."""

    def __init__(self, subject: Subject, rows: dict[str, Row]) -> None:
        self.subject, self.rows = subject, rows
        self.inputs = [task.inputs for task in subject.calibration]
        mixed = torch.cat(self.inputs)
        order = torch.randperm(len(mixed), generator=torch.Generator().manual_seed(0))
        self.mixed = mixed[order].split(100)

    def add(
        self, name: str, reads: str, scores: Scores, chosen: str = "", seconds: float | None = None
    ) -> None:
        row = self.rows.setdefault(name, Row(reads))
        row.scores.append(scores)
        row.chosen += [chosen] if chosen else []
        row.seconds += [] if seconds is None else [seconds]
        print(self.subject.name, name, chosen, scores, sep=": ", file=sys.stderr, flush=True)

    def scores(self, modules: Sequence[nn.Module], tasks: Sequence[Samples]) -> Scores:
        return self.subject.measure.scores([likely(modules, t.inputs) for t in tasks], tasks)

    def on_test(self, *modules: nn.Module) -> Scores:
        return self.scores(modules, self.subject.test)

    def measured(self, model: nn.Module) -> nn.Module:
        """With BatchNorm statistics of its own."""
        return evaluate.reset_batch_norm(model, self.mixed) if self.subject.has_norms else model

    def swept(
        self, name: str, reads: str, models: Iterator[tuple[str, nn.Module]], usual: str = ""
    ) -> None:
        """A rival with a factor: as chosen, at its best, and at the usual one."""
        found: dict[str, tuple[float, Scores]] = {}
        quality = self.subject.measure.quality
        for factor, model in models:
            model = self.measured(model)
            known = quality(self.scores([model], self.subject.choice))
            found[factor] = known, self.on_test(model)
        if usual:
            self.add(f"{name}, {usual}", reads, found[usual][1])
        chosen = max(found, key=lambda factor: found[factor][0])
        self.add(f"{name}, chosen", f"{reads}, labels".strip(", "), found[chosen][1], chosen)
        best = max(found, key=lambda factor: quality(found[factor][1]))
        self.add(f"{name}, best on test", "test labels", found[best][1], best)

    def originals(self) -> None:
        subject = self.subject
        self.add("base", "", self.on_test(subject.base))
        for k, tune in enumerate(subject.tunes):
            self.add(f"fine-tune {'ab'[k]}", "", self.on_test(tune))
        told = [likely([t], x.inputs) for t, x in zip(subject.tunes, subject.test, strict=True)]
        self.add("both, told which", "", subject.measure.scores(told, subject.test))
        self.add("ensemble, twice the cost", "", self.on_test(*subject.tunes))

    def all_rivals(self) -> None:
        base, tunes = self.subject.base, self.subject.tunes
        average = rivals.averaged(tunes)
        if self.subject.has_norms:
            self.add("averaging, statistics averaged", "", self.on_test(average))
        data = "inputs" if self.subject.has_norms else ""
        self.add("averaging", data, self.on_test(self.measured(average)))
        arithmetic = ((f"{f}", rivals.task_arithmetic(base, tunes, f)) for f in FACTORS)
        self.swept("task arithmetic", data, arithmetic)
        trimmed = ((f"{f} of {d}", rivals.ties(base, tunes, f, d)) for f, d in TIES)
        self.swept("TIES", data, trimmed, "1.0 of 0.2")
        weighed = rivals.fisher(tunes, self.inputs, SHARES)
        shares = zip(map(str, SHARES), weighed, strict=True)
        self.swept("Fisher averaging", "inputs", shares, "0.5")
        solved = rivals.regmean(tunes, self.inputs, SHRINKS)
        shrinks = zip(map(str, SHRINKS), solved, strict=True)
        self.swept("RegMean", "inputs", shrinks, "0.9")

    def zips(self) -> None:
        loaders = [task.batches() for task in self.subject.calibration]
        merges = {
            (matcher, repair): self._zip(f"{matcher}, {repair}", loaders, matcher, repair)
            for matcher, repair in ZIPS
            if repair != "bn" or self.subject.has_norms
        }
        # what else was tried
        tunes, base = self.subject.tunes, self.subject.base
        self._zip("identity, refit, one loader", [(part,) for part in self.mixed], "identity")
        self._zip("identity, refit towards the base", loaders, "identity", nearer.towards(base))
        model = nearer.by_likelihood(merges["zip", "refit"], tunes, self.inputs)
        self.add("zip, refit, then head by likelihood", "inputs", self.on_test(model))

    def _zip(
        self, name: str, loaders: Sequence[Any], matcher: str, repair: str | zipfx.Repair = "refit"
    ) -> nn.Module:
        start = time.perf_counter()
        merged = zipfx.zip(
            self.subject.tunes, loaders, matcher=matcher, repair=repair, progress=False
        )
        seconds = time.perf_counter() - start
        self.add(name, "inputs", self.on_test(merged), seconds=seconds)
        return merged


def table(rows: Mapping[str, Row], columns: Sequence[str], digits: int) -> str:
    """One line for each method: the mean of all seeds, and by how much they differ."""

    def cells(name: str, row: Row) -> list[str]:
        numbers = [evaluate.spread(values, digits) for values in zip(*row.scores, strict=True)]
        seconds = evaluate.spread(row.seconds) if row.seconds else ""
        return [name, *numbers, row.reads, ", ".join(row.chosen), seconds]

    header = ("", *columns, "data", "factors", "seconds")
    return evaluate.table(header, (cells(name, row) for name, row in rows.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    text = (__doc__ or "").partition("202611.md\n\n")[2]
    document = Document("benchmarks.fine_tunes", "Fine-tunes of one base", text, options.out)
    for name in options.subjects:
        rows: dict[str, Row] = {}
        for seed in range(options.seeds):
            run = Run(SUBJECTS[name](seed), rows)
            run.originals()
            run.all_rivals()
            run.zips()
        measure = run.subject.measure
        document.add(f"## {name.capitalize()}", table(rows, measure.columns, measure.digits))


if __name__ == "__main__":
    main()
