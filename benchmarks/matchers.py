"""The paper's table: what does each way to merge cost in accuracy, and what does it save?

    python -m benchmarks.matchers --sets ce_w1 text_w2 --seeds 5 --out benchmarks/results/x.md
    python -m benchmarks.matchers --models a.pt b.pt --arch torchvision:resnet50 \\
        --data torchvision:imagenet --root /data/imagenet --tasks 0-199 200-399

Rows: every model, the ensemble, weight averaging, weight matching, permute, k-means, optimal, zip,
and zip up to each stage. With ``--out``: markdown, CSV, and plots of accuracy against FLOPs and
against layers zipped, and of the correlation of joined features per stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import zipfx
from benchmarks import checkpoints, harness, plots, tables
from benchmarks.document import Document
from benchmarks.harness import Bench, Method, Result


def methods(
    cuts: Sequence[str], alpha: float = 0.3, beta: float = 1, places: str = "source"
) -> list[Method]:
    """The paper's rows; ``cuts`` in the order of the network."""
    settings = f"alpha {alpha:g}, beta {beta:g}"
    zip_ = zipfx.Zip(alpha, beta, unmerge="pinv")
    fitted = zipfx.Zip(alpha, beta, unmerge="lstsq")
    return [
        Method("weight averaging", "identity", places=places),
        Method("weight matching", "weights", places=places),
        Method("permute", zipfx.Permute(unmerge="pinv"), places=places),
        Method("k-means", zipfx.KMeans(unmerge="pinv"), places=places),
        Method("optimal", zipfx.Optimal(unmerge="pinv"), places=places),
        Method(f"zip full, {settings}, lstsq", fitted, places=places, series="zip, lstsq"),
        Method(f"zip full, {settings}", zip_, places=places, series="zip"),
        *(
            Method(f"zip to {cut}, {settings}", zip_, cut, places=places, series="zip")
            for cut in reversed(cuts)
        ),
    ]


def section(document: Document, bench: Bench, rows: Sequence[Method], seeds: int) -> list[Result]:
    """One set: runs all rows, and writes tables, CSV and plots; returns the originals' rows."""
    name, note = bench.name, document.environment
    references = harness.originals(bench, seeds)
    merged = harness.run(bench, rows, seeds)
    results = [*references, *merged]
    document.add(f"## {name}", tables.accuracy_table(name, results))
    document.add(tables.cost_table(merged), tables.correlation_table(merged))
    document.csv(name, tables.plain(name, results))
    ensemble = [row for row in references if row.name == "ensemble"]
    full = [row for row in merged if row.method is not None and row.method.partial is None]

    def series(row: Result) -> str:
        return (row.method.series if row.method is not None else "") or row.name

    document.pictures(
        [
            plots.accuracy(
                document.beside(f"{name}_flops.png"), name, "FLOPs per image (millions)", results,
                x=lambda row: row.flops / 1e6, series=series, note=note,
            ),
            plots.accuracy(
                document.beside(f"{name}_layers.png"), name, "layers zipped", merged,
                x=lambda row: row.layers[0] if row.layers else 0, series=series,
                references=ensemble, note=note,
            ),
            plots.correlations(
                document.beside(f"{name}_correlation.png"), name, full or merged, note
            ),
        ]
    )  # fmt: skip
    return references


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the harness, and those that all its zips share."""
    harness.add_arguments(parser)
    parser.add_argument("--cuts", nargs="+", help="modules to cut at; default: the stages")
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--places", default="source", help="where spaces are observed")


def methods_of(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """The paper's rows as the options want them."""
    cuts = options.cuts or checkpoints.stages(bench.models[0])
    return methods(cuts, options.alpha, options.beta, options.places)


def text(options: argparse.Namespace) -> str:
    """What the columns are, and how they were measured."""
    flips = "as they are" if options.no_flips else "half of them mirrored"
    return f"""Joint: all classes at once (text targets: the mean of the heads' cosines to every
embedding; logits: softmax over each task's classes, then the largest of all); A, B, ...: each task
among its own classes; avg: their mean; in percent, ± standard deviation over {options.seeds}
calibration seed(s). Test images: a fixed random {options.test_images:,}. Every merge is matched on
{options.images:,} training images per task, {flips}, and its BatchNorm statistics are reset on
{options.reset_images:,} drawn anew per task, where a row does not say otherwise. The models and
their ensemble keep the statistics they came with. Layers: zipped, of all that have weights.
Parameters: elements; FLOPs: two per multiply-add, one image. Seconds: `zipfx.zip`, and each of its
stages. Peak MiB: the highest resident set of the process during `zipfx.zip` less what was resident
before. Correlations: mean over the pairs of features that were joined. Published: the method's own
code, which observes a space once, at its last read (--places last), on 500 images per task."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, and with --out write, one section per set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options = harness.parse(parser, arguments)
    title = "Merging checkpoints: matchers compared"
    document = Document("benchmarks.matchers", title, text(options), options.out)
    for bench in harness.benches(options):
        section(document, bench, methods_of(bench, options), options.seeds)


if __name__ == "__main__":
    main()
