"""What does merging two real CIFAR-10 checkpoints cost in accuracy, and what does it save?

    python -m benchmarks.real_pairs --out benchmarks/results/real_pairs_cpu_202611.md

Settings of the method's published code on the same pairs: 500 training images per task (random
flips) to match features, BatchNorm statistics reset on 1,000 per task after every merge, a fixed
random 4,000 of the test images.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import zipfx
from benchmarks import cifar, evaluate, zoo

PAIRS = ("text_w2", "ce_w1", "resnet20")
MATCH_IMAGES, RESET_IMAGES = 500, 1000


@dataclass(frozen=True)
class Method:
    """One way to merge. ``published``: the published code's joint accuracy (%) by pair."""

    name: str
    matcher: str | zipfx.Matcher
    partial: str | None = None
    repair: Literal["none", "bn"] = "none"
    places: str = "last"
    published: dict[str, float] = field(default_factory=dict)


def _by_pair(text_w2: float, ce_w1: float) -> dict[str, float]:
    return {"text_w2": text_w2, "ce_w1": ce_w1}


PUBLISHED_MODELS = {
    "model a": _by_pair(45.1, 43.6),
    "model b": _by_pair(45.7, 45.3),
    "ensemble": _by_pair(68.0, 72.1),
}
METHODS = (
    Method("weight averaging", "identity", published=_by_pair(26.3, 22.4)),
    Method("permute", "permute", published=_by_pair(40.5, 37.9)),
    *(
        Method(f"zip full, alpha {alpha}, beta {beta}", zipfx.Zip(alpha, beta), published=published)
        for alpha, beta, published in (
            (0.0001, 1, _by_pair(57.5, 51.2)),
            (0.1, 1, _by_pair(57.3, 50.8)),
            (0.3, 1, _by_pair(57.5, 51.3)),
            (1, 1, _by_pair(56.9, 48.7)),
            (0.1, 0.5, _by_pair(54.4, 47.1)),
        )
    ),
    *(
        Method(f"zip to {cut}, alpha 0.1, beta 1", zipfx.Zip(0.1, 1), cut, published=published)
        for cut, published in (("layer2", _by_pair(58.7, 56.3)), ("layer1", _by_pair(64.1, 63.0)))
    ),
    *(
        Method(f"{name}, default places", matcher, cut, places="source")
        for name, matcher, cut in (
            ("permute", "permute", None),
            ("zip full, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), None),
            ("zip to layer2, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), "layer2"),
            ("zip to layer1, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), "layer1"),
        )
    ),
    Method("zip full, library defaults, repair=bn", "zip", repair="bn", places="source"),
)


@dataclass
class Result:
    """One row: accuracies, and what the merge took, each a list over the calibration seeds."""

    name: str
    published: float | None
    parameters: int
    flops: int
    accuracies: list[evaluate.Accuracy] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


class Pair:
    """Two checkpoints, their tasks, and the normalised test images."""

    def __init__(self, name: str, images: dict[str, cifar.Images]) -> None:
        loaded = [zoo.load(f"cifar10_{name}_{letter}") for letter in "ab"]
        self.name = name
        self.models = [model for model, _ in loaded]
        self.info = loaded[0][1]
        self.tasks = [info.classes for _, info in loaded]
        test = cifar.subset(images["test"])
        self.train = images["train"]
        self.images, self.labels = self.info.normalise(test.images), test.labels

    def calibration(self, per_task: int, seed: int) -> list[Tensor]:
        return cifar.calibration(self.train, self.tasks, per_task, self.info.normalise, seed=seed)

    def outputs(self, modules: Sequence[nn.Module]) -> list[Tensor]:
        return evaluate.heads(modules, self.images)

    def accuracy(self, outputs: Sequence[Tensor]) -> evaluate.Accuracy:
        return evaluate.accuracy(outputs, self.labels, self.tasks, self.info.embeddings)

    def result(self, name: str, modules: Sequence[nn.Module], published: float | None) -> Result:
        flops = evaluate.flops(modules, self.images[:1])
        return Result(name, published, evaluate.parameters(modules), flops)


def run(pair: Pair, methods: Iterable[Method], seeds: int) -> list[Result]:
    """All rows of one pair: the models as they are, then every method at every seed."""
    a, b = pair.models
    results: dict[str, Result] = {}
    of_a, of_b = pair.outputs([a, b])
    for name, modules, outputs in (
        ("model a", [a], [of_a]),
        ("model b", [b], [of_b]),
        ("ensemble", [a, b], [of_a, of_b]),
    ):
        results[name] = pair.result(name, modules, PUBLISHED_MODELS[name].get(pair.name))
        results[name].accuracies.append(pair.accuracy(outputs))
    for seed in range(seeds):
        matching = pair.calibration(MATCH_IMAGES, seed)
        resetting = pair.calibration(RESET_IMAGES, seed + 1000)
        ensemble = [evaluate.reset_batch_norm(model, resetting) for model in pair.models]
        name = "ensemble, statistics reset"
        row = results.setdefault(name, pair.result(name, ensemble, None))
        row.accuracies.append(pair.accuracy(pair.outputs(ensemble)))
        for method in methods:
            reset_peak()
            before = resident()
            merged = zipfx.zip(
                pair.models,
                matching,
                partial=method.partial,
                matcher=method.matcher,
                repair=method.repair,
                places=method.places,
                progress=False,
                seed=seed,
            )
            peak = peak_resident() - before
            report = merged.meta["zipfx"]
            module = (
                evaluate.reset_batch_norm(merged, resetting) if method.repair == "none" else merged
            )
            published = method.published.get(pair.name)
            row = results.setdefault(method.name, pair.result(method.name, [module], published))
            row.accuracies.append(pair.accuracy(pair.outputs([module])))
            row.stages.append(dict(report.seconds))
            row.peaks.append(peak)
            print(pair.name, seed, method.name, row.accuracies[-1], file=sys.stderr, flush=True)
    return list(results.values())


def reset_peak() -> None:
    """Makes the kernel count the peak resident set anew (Linux; elsewhere nothing happens)."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")


def peak_resident() -> int:
    """Peak resident set in bytes since `reset_peak`, where there is none since the start."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Resident set in bytes now (Linux; elsewhere the peak)."""
    return _status("VmRSS") or peak_resident()


def _status(key: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def accuracy_table(results: Iterable[Result]) -> str:
    def cells(row: Result) -> list[str]:
        seeds = row.accuracies
        tasks = zip(*(accuracy.tasks for accuracy in seeds), strict=True)
        return [
            row.name,
            evaluate.spread([accuracy.joint for accuracy in seeds]),
            "-" if row.published is None else f"{row.published:.1f}",
            *(evaluate.spread(values) for values in tasks),
            evaluate.spread([accuracy.average for accuracy in seeds]),
            f"{row.parameters / 1e6:.3f} M",
            f"{row.flops / 1e6:.1f} M",
        ]

    header = ["", "joint", "published joint", "A", "B", "avg", "parameters", "FLOPs"]
    return evaluate.table(header, map(cells, results))


def cost_table(results: Iterable[Result]) -> str:
    merges = [row for row in results if row.stages]
    names = list(dict.fromkeys(name for row in merges for name in row.stages[0]))

    def cells(row: Result) -> list[str]:
        return [
            row.name,
            evaluate.spread([sum(stages.values()) for stages in row.stages]),
            *(evaluate.spread([stages.get(n, 0.0) for stages in row.stages], 2) for n in names),
            evaluate.spread([peak / 2**20 for peak in row.peaks], 0),
        ]

    return evaluate.table(["", "seconds", *names, "peak MiB"], map(cells, merges))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration seeds")
    cifar.add_arguments(parser)
    evaluate.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = cifar.read(options.data, options.root)
    sections = [TEXT, evaluate.environment("benchmarks.real_pairs")]
    for name in options.pairs:
        results = run(Pair(name, images), METHODS, options.seeds)
        sections += [f"## {name}", accuracy_table(results), cost_table(results)]
    evaluate.publish("\n\n".join(sections), options.out)


TEXT = f"""# Merging pairs of real CIFAR-10 checkpoints

Joint: all ten classes; A, B: each task among its own classes; avg: their mean; in percent. Each
merge is calibrated on {MATCH_IMAGES} training images per task; its BatchNorm statistics are then
reset on {RESET_IMAGES:,} others per task, but for the last row, which is what `zipfx.zip` returns
by default. As in the published code a space is observed once, at its last read; rows with "default
places" observe it where the library does by default. The models and their ensemble keep the
statistics they came with, as in the published figures. Parameters: elements; FLOPs: two per
multiply-add, one image. Seconds per stage: as `zipfx.zip` reports them. Peak MiB: the highest
resident set of the process during `zipfx.zip` less what was resident before. Published: the
method's own code at the same settings."""


if __name__ == "__main__":
    main()
