"""Two, three and four models in one: what is each repair worth?

    python -m benchmarks.several --seeds 5 --out benchmarks/results/several_cpu_202611.md

The networks of examples/digits.py, each trained on its own share of the ten digits (scikit-learn's)
from its own initialisation, everything zipped, a loader for each task. Every seed trains anew.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import zipfx
from benchmarks import evaluate
from benchmarks.document import Document
from examples import digits

SHARES = {
    2: (range(0, 5), range(5, 10)),
    3: (range(0, 4), range(4, 7), range(7, 10)),
    4: (range(0, 3), range(3, 6), range(6, 8), range(8, 10)),
}
REPAIRS = ("none", "bn", "affine", "refit")
Scores = list[tuple[float, float]]  # joint, and the mean of the tasks; of every seed


def scores(
    modules: Sequence[nn.Module], images: Tensor, labels: Tensor, tasks: Sequence[range]
) -> tuple[float, float]:
    """All ten digits at once, by the largest mean output; each task among its own, the mean."""
    outputs = digits.heads(modules, images, tasks)
    joint = digits.accuracy(torch.stack(outputs).mean(0), labels, range(10))
    own = [digits.accuracy(o, labels, task) for o, task in zip(outputs, tasks, strict=True)]
    return joint, sum(own) / len(own)


def measured(tasks: Sequence[range], seeds: int) -> dict[str, Scores]:
    """The scores of every way to merge one model for each task."""
    found: dict[str, Scores] = {}
    for seed in range(seeds):
        images, labels, test, expected = digits.split(seed)
        rows = [torch.isin(labels, torch.tensor(task)) for task in tasks]
        models = [
            digits.train(images[mine], labels[mine], 100 * seed + k) for k, mine in enumerate(rows)
        ]
        loaders = [[(part,) for part in images[mine].split(100)] for mine in rows]
        found.setdefault("ensemble", []).append(scores(models, test, expected, tasks))
        for matcher in ("permute", "zip"):
            for repair in REPAIRS:
                merged = zipfx.zip(models, loaders, matcher=matcher, repair=repair, progress=False)
                of_row = found.setdefault(f"{matcher}, {repair}", [])
                of_row.append(scores([merged], test, expected, tasks))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", type=int, nargs="+", choices=SHARES, default=list(SHARES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = (__doc__ or "").partition("202611.md\n\n")[2]
    document = Document("benchmarks.several", "Several models in one", text, options.out)
    for count in options.models:
        rows = []
        for name, values in measured(SHARES[count], options.seeds).items():
            cells = [f"{statistics.mean(v):.1f} ± {statistics.pstdev(v):.1f}" for v in zip(*values)]
            rows.append((name, *cells))
        table = evaluate.table(("", "all ten digits", "each task, mean"), rows)
        document.add(f"## {count} models", table)


if __name__ == "__main__":
    main()
