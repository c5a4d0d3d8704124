"""What is each repair worth, and what does it cost?

    python -m benchmarks.repairs --sets text_w2 ce_w1 --seeds 5 --out benchmarks/results/x.md
    python -m benchmarks.repairs --sweeps ridge images --sets ce_w1

``table``: no repair, "bn", "affine" and "refit", for permute and zip, everything zipped, and for
zip up to each stage. Sweeps, with zip and everything zipped: ``images`` per task, ``ridge`` (fixed,
not chosen), ``samples`` (for each unknown), ``rounds``, ``matchers``, and ``loaders`` (one for all
tasks, or one for each).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import zipfx
from benchmarks import ablations, checkpoints, harness, tables
from benchmarks.ablations import Sweep
from benchmarks.document import Document
from benchmarks.harness import Bench, Method

REPAIRS = ("none", "bn", "affine", "refit")
COUNTS = (20, 50, 100, 250, 500, 1000, 2500, 5000)
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, math.inf)
SAMPLES = (2, 5, 10, 25, 50, 100, 250)
ROUNDS = (0, 1, 2, 4)
MATCHERS = ("identity", "weights", "permute", "kmeans", "optimal", "zip")


def table(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """Every repair of permute and of zip, and zip to each stage."""
    cuts = options.cuts or checkpoints.stages(bench.models[0])
    full = [
        _method(bench, f"{matcher} full, {repair}", matcher, repair, series=matcher)
        for matcher in ("permute", "zip")
        for repair in REPAIRS
    ]
    return full + [
        _method(bench, f"zip to {cut}, {repair}", "zip", repair, cut, series=f"zip, {repair}")
        for repair in ("bn", "refit")
        for cut in reversed(cuts)
    ]


def images(bench: Bench, options: argparse.Namespace) -> list[Method]:
    return [
        _method(
            bench, f"{repair}, {n} images", "zip", repair, images=n, series=repair, x=n
        )
        for repair in ("bn", "refit")
        for n in COUNTS
        if n <= bench.available
    ]  # fmt: skip


def ridge(bench: Bench, options: argparse.Namespace) -> list[Method]:
    chosen = _method(bench, "ridge chosen", "zip", "refit", series="chosen", x=RIDGES[0])
    return [
        chosen,
        *(
            _method(bench, f"ridge {r:g}", "zip", zipfx.Refit(ridges=(r,)), series="fixed", x=i)
            for i, r in enumerate(RIDGES)
        ),
    ]


def samples(bench: Bench, options: argparse.Namespace) -> list[Method]:
    return [
        _method(bench, f"{n} samples", "zip", zipfx.Refit(oversampling=n), series="zip", x=n)
        for n in SAMPLES
    ]


def rounds(bench: Bench, options: argparse.Namespace) -> list[Method]:
    return [
        _method(bench, f"{n} rounds", "zip", zipfx.Refit(rounds=n), series="zip", x=n)
        for n in ROUNDS
    ]


def every_matcher(bench: Bench, options: argparse.Namespace) -> list[Method]:
    fitted = {"zip, lstsq": zipfx.Zip(unmerge="lstsq"), "zip, alpha 1": zipfx.Zip(1)}
    listed: dict[str, str | zipfx.Matcher] = {**{m: m for m in MATCHERS}, **fitted}
    return [
        _method(bench, f"{name}, {repair}", matcher, repair, series=repair, x=i)
        for repair in ("bn", "refit")
        for i, (name, matcher) in enumerate(listed.items())
    ]


def loaders(bench: Bench, options: argparse.Namespace) -> list[Method]:
    return [
        Method(
            f"{matcher}, {name}",
            matcher,
            repair="refit",
            reset=False,
            own=own,
            series=matcher,
            x=own,
        )
        for matcher in ("permute", "zip")
        for name, own in (("one loader", False), ("a loader for each task", True))
    ]


def _method(
    bench: Bench,
    name: str,
    matcher: str | zipfx.Matcher,
    repair: str | zipfx.Refit,
    partial: str | None = None,
    **options: object,
) -> Method:
    """Each model sees its own task's images, where the tasks differ."""
    own = not bench.shares_tasks
    return Method(name, matcher, partial, repair, reset=False, own=own, **options)  # type: ignore[arg-type]


SWEEPS = {
    "table": Sweep("layers zipped", table),
    "images": Sweep("calibration images per task", images, log=True),
    "ridge": Sweep("ridge", ridge, [f"{r:g}" for r in RIDGES]),
    "samples": Sweep("samples for each unknown", samples, log=True),
    "rounds": Sweep("rounds", rounds),
    "matchers": Sweep("matcher", every_matcher, [*MATCHERS, "zip, lstsq", "zip, alpha 1"]),
    "loaders": Sweep("loaders", loaders, ["one", "one for each task"]),
}

TEXT = """Joint: all classes at once (text targets: the mean of the heads' cosines to every
embedding; logits: softmax over each task's classes, then the largest of all); A, B, ...: each task
among its own classes; avg: their mean; in percent, ± standard deviation over the calibration seeds.
Everything, statistics included, comes from {images:,} training images per task, {flips}; nothing is
reset afterwards. Where tasks differ each model has a loader of its own. Test images: a fixed random
{test:,}. Seconds: `zipfx.zip`, and each of its stages."""


def run(
    document: Document,
    bench: Bench,
    name: str,
    options: argparse.Namespace,
    references: Sequence[harness.Result],
) -> None:
    """One sweep of one set: table, costs, CSV and plot."""
    sweep = SWEEPS[name]
    found = harness.run(bench, sweep.methods(bench, options), options.seeds)
    ablations.show(document, bench, name, sweep, found, references)
    document.add(tables.cost_table(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, and with --out write, the sweeps of every set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser)
    parser.add_argument("--cuts", nargs="+", help="modules to cut at; default: the stages")
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.set_defaults(default_sets=["text_w2", "ce_w1"])
    options = harness.parse(parser, arguments)
    flips = "as they are" if options.no_flips else "half of them mirrored"
    text = TEXT.format(images=options.images, test=options.test_images, flips=flips)
    document = Document("benchmarks.repairs", "Repairs compared", text, options.out)
    for bench in harness.benches(options):
        originals = harness.originals(bench)
        document.add(f"## {bench.name}", tables.accuracy_table(bench.name, originals))
        for name in options.sweeps:
            run(document, bench, name, options, originals[-1:])


if __name__ == "__main__":
    main()
