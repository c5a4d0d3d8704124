"""The paper's plots from the rows of `benchmarks.harness`, as PNG files.

Mean over the seeds, with the standard deviation as a bar where there are several.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluate import Accuracy
from benchmarks.harness import Result

PANELS: tuple[tuple[str, Callable[[Accuracy], float]], ...] = (
    ("joint accuracy (%)", lambda accuracy: accuracy.joint),
    ("average accuracy of the tasks (%)", lambda accuracy: accuracy.average),
)


def accuracy(
    path: Path | None,
    title: str,
    label: str,
    results: Iterable[Result],
    *,
    x: Callable[[Result], float],
    series: Callable[[Result], str],
    references: Iterable[Result] = (),
    ticks: Mapping[float, str] | None = None,
    log: bool = False,
    note: str = "",
) -> Path | None:
    """Joint and average accuracy against ``x``; a line for each series, in the order of x.

    Args:
        path: of the PNG; None: nothing is drawn.
        references: rows to be drawn as horizontal lines.
        ticks: names of values of x, where these are no quantity.
        note: what is kept in the file's metadata.
    """
    if path is None:
        return None
    lines: dict[str, list[Result]] = {}
    for row in results:
        if row.accuracies:
            lines.setdefault(series(row), []).append(row)
    figure, panels = _figure(len(PANELS), title)
    for axes, (name, value) in zip(panels, PANELS):
        for line, rows in lines.items():
            rows = sorted(rows, key=x)
            points = [_spread([value(a) for a in row.accuracies]) for row in rows]
            _line(axes, [x(row) for row in rows], points, line, joined=ticks is None)
        for i, row in enumerate(references):
            height = _spread([value(a) for a in row.accuracies])[0]
            axes.axhline(height, color="0.4", linestyle=(0, (i + 1, 2)), lw=1, label=row.name)
        axes.set_xlabel(label)
        axes.set_ylabel(name)
        if log:
            axes.set_xscale("log")
            places = sorted({x(row) for rows in lines.values() for row in rows})
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.set_xticks([], minor=True)
        if ticks is not None:
            axes.set_xticks(list(ticks), list(ticks.values()))
    return _save(figure, path, note)


def correlations(
    path: Path | None, title: str, results: Iterable[Result], note: str = ""
) -> Path | None:
    """Mean correlation of joined features in each module; a line for each row."""
    if path is None:
        return None
    figure, (axes,) = _figure(1, title)
    for row in results:
        known = [name for name, c in (row.correlations or [{}])[0].items() if c == c]  # no nan
        points = [_spread([found[name] for found in row.correlations]) for name in known]
        if known:
            _line(axes, known, points, row.name)
    axes.set_xlabel("stage")
    axes.set_ylabel("correlation of joined features")
    return _save(figure, path, note)


def _line(
    axes: Any,
    x: Sequence[float] | Sequence[str],
    points: list[tuple[float, float]],
    name: str,
    joined: bool = True,
) -> None:
    means, deviations = zip(*points)
    bars = deviations if any(deviations) else None
    axes.errorbar(
        x, means, bars, marker="o", ms=4, capsize=3, lw=1.2, ls="-" if joined else "", label=name
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: neither a display nor global state

    figure = Figure(figsize=(1.5 + 4.5 * panels, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    every = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in every:  # the default has ten colours, our tables more rows
        axes.set_prop_cycle(color=matplotlib.color_sequences["tab20"])
    return figure, every


def _save(figure: Any, path: Path, note: str) -> Path:
    axes = figure.axes[-1]
    for each in figure.axes:
        each.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Description": note})
    return path
