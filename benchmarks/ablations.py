"""Everything the paper ablates: accuracy against one choice at a time, the others at their default.

    python -m benchmarks.ablations --sets ce_w1 text_w2 --seeds 3 --out benchmarks/results/x.md
    python -m benchmarks.ablations --sweeps beta images --sets text_w2

Sweeps: ``table`` (all of `benchmarks.matchers`, with the correlation per stage), ``layers``,
``alpha``, ``beta``, ``similarity``, ``unmerge``, ``images`` (with and without mirroring), and
``width``, which compares the chosen sets with one another. Each writes a table, CSV and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zipfx
from benchmarks import checkpoints, harness, matchers, plots, tables
from benchmarks.document import Document
from benchmarks.harness import Bench, Method, Result
from zipfx.match.matchers.protocol import UNMERGES
from zipfx.observe.similarity import SIMILARITIES

ALPHAS = (0.0001, 0.1, 0.3, 0.5, 0.7, 1)
BETAS = (0, 0.2, 0.4, 0.6, 0.8, 1)
COUNTS = (10, 25, 50, 100, 250, 500, 1000, 2500)
TABLE, WIDTH = "table", "width"  # the two that are no sweep over methods


def cuts(bench: Bench, options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Where settings are swept: everything zipped, and up to the last stage but one."""
    stages = checkpoints.stages(bench.models[0])
    chosen: Sequence[str] = options.cuts or stages[-2:-1] or stages
    return [("zip full", None), *((f"zip to {cut}", cut) for cut in chosen)]


Pairing = zipfx.Permute | zipfx.KMeans | zipfx.Optimal | zipfx.Zip


def matchers_of(options: argparse.Namespace) -> dict[str, Pairing]:
    """The matchers that go by similarities."""
    return {
        "permute": zipfx.Permute(),
        "k-means": zipfx.KMeans(),
        "optimal": zipfx.Optimal(),
        "zip": zipfx.Zip(options.alpha, options.beta),
    }


def layers(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """Cuts at every block, with and without matches within models."""
    ends = [*(options.cuts or checkpoints.blocks(bench.models[0])), None]
    return [
        Method(f"{name} to {end}" if end else f"{name} full", matcher, end, series=name)
        for name, matcher in matchers_of(options).items()
        if name in ("permute", "zip")
        for end in ends
    ]


def alpha(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """What is left of the similarity of a feature that is matched again."""
    return _zips(bench, options, [(a, zipfx.Zip(a, options.beta)) for a in ALPHAS])


def beta(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """The share of matches that may join two features of one model."""
    return _zips(bench, options, [(b, zipfx.Zip(options.alpha, b)) for b in BETAS])


def _zips(
    bench: Bench, options: argparse.Namespace, settings: Sequence[tuple[float, zipfx.Zip]]
) -> list[Method]:
    return [
        Method(f"{name}, alpha {m.alpha:g}, beta {m.beta:g}", m, cut, series=name, x=x)
        for name, cut in cuts(bench, options)
        for x, m in settings
    ]


def similarity(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """Every matcher by every similarity."""
    return _choices(bench, options, [(s, {"similarity": s}) for s in SIMILARITIES])


def unmerge(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """Every matcher with every unmerge matrix."""
    return _choices(bench, options, [(u, {"unmerge": u}) for u in UNMERGES])


def _choices(
    bench: Bench, options: argparse.Namespace, settings: Sequence[tuple[str, dict[str, Any]]]
) -> list[Method]:
    end = _end(bench, options)
    return [
        Method(f"{name}, {chosen}", replace(matcher, **setting), end, series=name, x=x)
        for name, matcher in matchers_of(options).items()
        for x, (chosen, setting) in enumerate(settings)
    ]


def _end(bench: Bench, options: argparse.Namespace) -> str | None:
    """Where matchers are compared: at the output, or at a cut where there is no common one."""
    return None if bench.shares_outputs else cuts(bench, options)[-1][1]


def images(bench: Bench, options: argparse.Namespace) -> list[Method]:
    """How many images features are matched on; statistics are reset on the same number always."""
    return [
        Method(
            f"{name}, {count} images, {shown}",
            zipfx.Zip(options.alpha, options.beta),
            cut,
            images=count,
            flips=flips,
            series=f"{name}, {shown}",
            x=count,
        )
        for name, cut in cuts(bench, options)
        for flips, shown in ((True, "mirrored"), (False, "as they are"))
        for count in options.counts
        if count <= bench.available
    ]


@dataclass(frozen=True)
class Sweep:
    """One question: the label of its axis, the methods to run, and how the answer is drawn.

    ``ticks``: names of x = 0, 1, ... where x is no quantity. A method without an ``x`` is drawn at
    the number of layers that it zipped.
    """

    label: str
    methods: Callable[[Bench, argparse.Namespace], list[Method]]
    ticks: Sequence[str] = ()
    log: bool = False


SWEEPS = {
    "layers": Sweep("layers zipped", layers),
    "alpha": Sweep("alpha", alpha),
    "beta": Sweep("beta", beta),
    "similarity": Sweep("similarity", similarity, SIMILARITIES),
    "unmerge": Sweep("unmerge", unmerge, UNMERGES),
    "images": Sweep("calibration images per task", images, log=True),
}


def show(
    document: Document,
    bench: Bench,
    name: str,
    sweep: Sweep,
    found: Sequence[Result],
    references: Sequence[Result],
) -> None:
    """The table, CSV and plot of one sweep of one set."""
    document.add(f"### {bench.name}: {name}", tables.accuracy_table(bench.name, found))
    document.csv(f"{bench.name}_{name}", tables.plain(bench.name, found))
    picture = plots.accuracy(
        document.beside(f"{bench.name}_{name}.png"),
        bench.name,
        sweep.label,
        found,
        x=_x,
        series=lambda row: row.method.series if row.method else row.name,
        references=references,
        ticks=dict(enumerate(sweep.ticks)) or None,
        log=sweep.log,
        note=document.environment,
    )
    document.pictures([picture])


def run(
    document: Document, bench: Bench, names: Sequence[str], options: argparse.Namespace
) -> list[Result]:
    """All sweeps of one set; returns the rows that `width` compares, if it is asked for."""
    if TABLE in names:
        listed = matchers.methods_of(bench, options)
        originals = matchers.section(document, bench, listed, options.seeds)
    else:
        originals = harness.originals(bench)
        table = tables.accuracy_table(bench.name, originals)
        document.add(f"## {bench.name}", table)
    ensemble = [row for row in originals if row.name == "ensemble"]
    for name in names:
        if name not in SWEEPS:
            continue
        sweep = SWEEPS[name]
        methods = [replace(m, places=options.places) for m in sweep.methods(bench, options)]
        found = harness.run(bench, methods, options.seeds)
        show(document, bench, name, sweep, found, ensemble)
    if WIDTH not in names:
        return []
    methods = matchers.methods(
        [cut for _, cut in cuts(bench, options) if cut], options.alpha, options.beta, options.places
    )
    compared = [m for m in methods if m.name == "permute" or m.series == "zip"]
    return [*ensemble, *harness.run(bench, compared, options.seeds)]


def _x(row: Result) -> float:
    if row.method is not None and row.method.x == row.method.x:  # not nan
        return row.method.x
    return row.layers[0] if row.layers else 0


def width(document: Document, found: dict[str, tuple[int, list[Result]]]) -> None:
    """The sets beside each other; ``found``: the width and the rows of each."""
    document.add("## Width", WIDTH_TEXT)
    plain: list[dict[str, object]] = []
    widths: dict[int, int] = {}
    every: list[Result] = []
    for name, (channels, rows) in found.items():
        document.add(f"### {name}: {channels} channels", tables.accuracy_table(name, rows))
        plain += [{"channels": channels} | row for row in tables.plain(name, rows)]
        widths |= {id(row): channels for row in rows}
        every += rows
    document.csv(WIDTH, plain)
    picture = plots.accuracy(
        document.beside(f"{WIDTH}.png"),
        ", ".join(found),
        "channels of the first layer",
        every,
        x=lambda row: widths[id(row)],
        series=lambda row: row.name,
        note=document.environment,
    )
    document.pictures([picture])


WIDTH_TEXT = """Merges of the chosen sets against the channels of their first layer. The sets may
differ in more than their width: of the shared ones text_w2 was trained on text embeddings, ce_w1 by
cross-entropy. The ensemble says what is possible for each."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, and with --out write, one section per set, and one on their widths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    matchers.add_arguments(parser)
    known = [TABLE, *SWEEPS, WIDTH]
    parser.add_argument("--sweeps", nargs="+", choices=known, default=known)
    parser.add_argument(
        "--counts", nargs="+", type=int, default=COUNTS, help="images per task, of the sweep images"
    )
    parser.set_defaults(default_sets=["ce_w1", "text_w2"])
    options = harness.parse(parser, arguments)
    title = "Merging checkpoints: one choice at a time"
    document = Document("benchmarks.ablations", title, matchers.text(options), options.out)
    found: dict[str, tuple[int, list[Result]]] = {}
    for bench in harness.benches(options):
        rows = run(document, bench, options.sweeps, options)
        if rows:
            found[bench.name] = bench.set.width, rows
    if found:
        width(document, found)


if __name__ == "__main__":
    main()
