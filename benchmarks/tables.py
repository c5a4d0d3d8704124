"""The rows of `benchmarks.harness` as markdown tables, and as plain numbers for CSV."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from benchmarks import evaluate, published
from benchmarks.harness import Result


def accuracy_table(checkpoints: str, results: Sequence[Result]) -> str:
    """Accuracy and cost of every row; below it why rows have no numbers.

    Where the method's own code has been run on this set, its joint accuracy is beside ours.
    """
    tasks = max((len(a.tasks) for row in results for a in row.accuracies), default=0)
    theirs = [published.joint(checkpoints, row.name) for row in results]
    compared = any(value is not None for value in theirs)
    header = ["", "joint", *["published joint"] * compared, *string.ascii_uppercase[:tasks]]
    header += ["avg", "layers", "parameters", "FLOPs", "seconds"]

    def cells(row: Result, figure: float | None) -> list[str]:
        if row.error:
            return [row.name, *["-"] * (len(header) - 1)]
        seconds = [sum(stages.values()) for stages in row.stages]
        return [
            row.name,
            evaluate.spread([accuracy.joint for accuracy in row.accuracies]),
            *(["-" if figure is None else f"{figure:.1f}"] * compared),
            *(evaluate.spread([a.tasks[k] for a in row.accuracies]) for k in range(tasks)),
            evaluate.spread([accuracy.average for accuracy in row.accuracies]),
            "-" if row.layers is None else f"{row.layers[0]}/{row.layers[1]}",
            f"{row.parameters / 1e6:.3f} M",
            f"{row.flops / 1e6:.1f} M",
            evaluate.spread(seconds) if seconds else "-",
        ]

    lines = [evaluate.table(header, map(cells, results, theirs))]
    lines += [f"No numbers for {row.name}: {row.error}" for row in results if row.error]
    return "\n\n".join(lines)


def cost_table(results: Iterable[Result]) -> str:
    """Seconds of each stage of `zipfx.zip`, and the memory it took."""
    merges = [row for row in results if row.stages]
    names = _columns(stages for row in merges for stages in row.stages)

    def cells(row: Result) -> list[str]:
        return [
            row.name,
            evaluate.spread([sum(stages.values()) for stages in row.stages]),
            *(evaluate.spread([stages.get(n, 0.0) for stages in row.stages], 2) for n in names),
            evaluate.spread([peak / 2**20 for peak in row.peaks], 0),
        ]

    return evaluate.table(["", "seconds", *names, "peak MiB"], map(cells, merges))


def correlation_table(results: Iterable[Result]) -> str:
    """Mean correlation of joined features, by module; "-" where nothing is merged or observed."""
    merges = [row for row in results if row.correlations]
    names = _columns(found for row in merges for found in row.correlations)

    def cell(values: Sequence[float]) -> str:
        return "-" if any(v != v for v in values) else evaluate.spread(values, 3)  # nan

    rows = (
        [row.name, *(cell([c.get(n, float("nan")) for c in row.correlations]) for n in names)]
        for row in merges
    )
    return evaluate.table(["", *names], rows)


def plain(checkpoints: str, results: Iterable[Result]) -> list[dict[str, object]]:
    """One row for each set, method and seed, in units: percent, elements, FLOPs, seconds, bytes."""
    rows: list[dict[str, object]] = []
    for row in results:
        first: dict[str, object] = {"set": checkpoints, "method": row.name}
        if row.method is not None:
            x = row.method.x
            first |= {"series": row.method.series, "x": x if x == x else ""}  # nan: not plotted
        if row.error:
            rows.append(first | {"error": row.error})
        for seed, accuracy in enumerate(row.accuracies):
            found = first | {"seed": seed, "joint": accuracy.joint}
            found |= dict(zip(string.ascii_uppercase, accuracy.tasks))
            found |= {"avg": accuracy.average, "published_joint": ""}
            figure = published.joint(checkpoints, row.name)
            if figure is not None:
                found["published_joint"] = figure
            found |= {"parameters": row.parameters, "flops": row.flops}
            if row.stages:
                assert row.layers is not None
                found |= {"layers_zipped": row.layers[0], "layers": row.layers[1]}
                found |= {"seconds": sum(row.stages[seed].values()), "peak_bytes": row.peaks[seed]}
                found |= {f"seconds_{name}": s for name, s in row.stages[seed].items()}
                found |= {f"correlation_{name}": c for name, c in row.correlations[seed].items()}
            rows.append(found)
    return rows


def _columns(found: Iterable[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for values in found for name in values))
