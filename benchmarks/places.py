"""Where should a space be observed? Accuracy of merges by the choice of places, on real pairs.

A residual stream is read by several weights, and every activation has a value before and after it.
`zipfx.zip(places=...)` chooses: the last read, all reads, the reads and the source before the
activation, or every place. Same calibration images and BatchNorm reset for all choices.

    python -m benchmarks.places --seeds 2 --out benchmarks/results/places_cpu_202611.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import zipfx
from benchmarks import harness, matchers
from benchmarks.document import Document
from benchmarks.harness import Method
from zipfx.observe.choose_places import PLACES

METHODS = tuple(
    Method(
        f"{name}, places {places}",
        matcher,
        cut,
        places=places,
        series=f"{name.split()[0]}, {places}",
    )
    for name, matcher, cut in (
        ("permute", "permute", None),
        ("zip full, alpha 0.3", zipfx.Zip(0.3, 1), None),
        ("zip to layer2, alpha 0.3", zipfx.Zip(0.3, 1), "layer2"),
        ("zip to layer1, alpha 0.3", zipfx.Zip(0.3, 1), "layer1"),
    )
    for places in PLACES
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, and with --out write, one section per pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    harness.add_arguments(parser)
    parser.set_defaults(default_sets=["text_w2", "ce_w1"])
    options = harness.parse(parser, arguments)
    title = "Where a space is observed"
    document = Document("benchmarks.places", title, matchers.text(options), options.out)
    for bench in harness.benches(options):
        matchers.section(document, bench, METHODS, options.seeds)


if __name__ == "__main__":
    main()
