"""Real CIFAR-10 pairs at the settings of the method's own published code, beside its figures.

    python -m benchmarks.real_pairs --out benchmarks/results/real_pairs_cpu_202611.md

The harness of `benchmarks.matchers` with another list of methods: every setting that was published
(`benchmarks.published`), observed where that code observes, and some of them where the library
does by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import zipfx
from benchmarks import harness, matchers
from benchmarks.document import Document
from benchmarks.harness import Method

METHODS = (
    Method("weight averaging", "identity", places="last"),
    Method("permute", "permute", places="last"),
    *(
        Method(f"zip full, alpha {alpha}, beta {beta}", zipfx.Zip(alpha, beta), places="last")
        for alpha, beta in ((0.0001, 1), (0.1, 1), (0.3, 1), (1, 1), (0.1, 0.5))
    ),
    *(
        Method(f"zip to {cut}, alpha 0.1, beta 1", zipfx.Zip(0.1, 1), cut, places="last")
        for cut in ("layer2", "layer1")
    ),
    *(
        Method(f"{name}, default places", matcher, cut)
        for name, matcher, cut in (
            ("permute", "permute", None),
            ("zip full, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), None),
            ("zip to layer2, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), "layer2"),
            ("zip to layer1, alpha 0.3, beta 1", zipfx.Zip(0.3, 1), "layer1"),
        )
    ),
    Method("zip full, repair=bn", "zip", repair="bn", reset=False),
)
NOTE = """As in the published code a space is observed once, at its last read; rows with "default
places" observe it where the library does by default. The statistics of the last row are of the
images it was matched on."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    harness.add_arguments(parser)
    parser.set_defaults(default_sets=["text_w2", "ce_w1", "resnet20"])
    options = harness.parse(parser, arguments)
    title = "Merging pairs of real CIFAR-10 checkpoints"
    text = f"{matchers.text(options)}\n\n{NOTE}"
    document = Document("benchmarks.real_pairs", title, text, options.out)
    for bench in harness.benches(options):
        matchers.section(document, bench, METHODS, options.seeds)


if __name__ == "__main__":
    main()
