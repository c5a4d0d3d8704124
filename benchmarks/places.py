"""Where should a space be observed? Accuracy of merges by the choice of places, on real pairs.

A residual stream is read by several weights, and every activation has a value before and after it.
`zipfx.zip(places=...)` chooses: the last read, all reads, the reads and the source before the
activation, or every place. Same calibration images and BatchNorm reset for all choices.

    python -m benchmarks.places --seeds 2 --out benchmarks/results/places_cpu_202611.md
"""

from __future__ import annotations

import argparse
import sys

import torch

import zipfx
from benchmarks import cifar, evaluate
from benchmarks.real_pairs import MATCH_IMAGES, RESET_IMAGES, Pair
from zipfx.observe import PLACES

METHODS: tuple[tuple[str, str | zipfx.Matcher, str | None], ...] = (
    ("permute", "permute", None),
    ("zip full, alpha 0.3", zipfx.Zip(0.3, 1), None),
    ("zip to layer2, alpha 0.3", zipfx.Zip(0.3, 1), "layer2"),
    ("zip to layer1, alpha 0.3", zipfx.Zip(0.3, 1), "layer1"),
)
HEADER = ("method", "places", "joint", "A", "B", "avg", "seconds to observe")


def rows(pair: Pair, seeds: int) -> list[list[str]]:
    """One row per method and choice of places."""
    found: dict[tuple[str, str], list[tuple[evaluate.Accuracy, float]]] = {}
    for seed in range(seeds):
        matching = pair.calibration(MATCH_IMAGES, seed)
        resetting = pair.calibration(RESET_IMAGES, seed + 1000)
        for name, matcher, partial in METHODS:
            for places in PLACES:
                merged = zipfx.zip(
                    pair.models,
                    matching,
                    partial=partial,
                    matcher=matcher,
                    repair="none",
                    places=places,
                    progress=False,
                )
                module = evaluate.reset_batch_norm(merged, resetting)
                accuracy = pair.accuracy(pair.outputs([module]))
                seconds = merged.meta["zipfx"].seconds["observe"]
                found.setdefault((name, places), []).append((accuracy, seconds))
                print(pair.name, seed, name, places, accuracy, file=sys.stderr, flush=True)
    table = []
    for (name, places), values in found.items():
        accuracies = [a for a, _ in values]
        numbers = [[a.joint for a in accuracies], [a.tasks[0] for a in accuracies],
                   [a.tasks[1] for a in accuracies], [a.average for a in accuracies],
                   [s for _, s in values]]  # fmt: skip
        table.append([name, places, *map(evaluate.spread, numbers)])
    return table


def main() -> None:
    """Print, and with --out write, one table per pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["text_w2", "ce_w1"])
    parser.add_argument("--seeds", type=int, default=1)
    evaluate.add_arguments(parser)
    cifar.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = cifar.read(options.data, options.root)
    text = ["# Where a space is observed", "", evaluate.environment("benchmarks.places")]
    for name in options.pairs:
        text += [
            "",
            f"## {name}",
            "",
            evaluate.table(HEADER, rows(Pair(name, images), options.seeds)),
        ]
    evaluate.publish("\n".join(text), options.out)


if __name__ == "__main__":
    main()
