"""Does the greedy matcher stay quadratic? Seconds over N on one thread, beside a full search.

    python -m benchmarks.greedy --out benchmarks/results/greedy_cpu_202611.md

Two models of N / 2 features are matched down to N / 2. `full search` looks at the whole matrix
for every match, which is cubic; it runs up to N = 1024 and must give the same groups.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks import evaluate
from zipfx.match import Zip
from zipfx.statistics import Statistics

LARGEST_FULL_SEARCH = 1024


def statistics_of(covariance: Tensor, mean: Tensor) -> Statistics:
    half = len(mean) // 2
    return Statistics(4 * half, mean, covariance, (half, half))


def low_rank(total: int) -> Statistics:
    """Rectified features of 64 shared factors and as much noise of their own."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2 * total, 64, generator=generator)
    features = factors @ torch.randn(64, total, generator=generator) / 8
    features = (features + torch.randn(2 * total, total, generator=generator)).relu().double()
    return statistics_of(torch.cov(features.T), features.mean(0))


def ties(total: int) -> Statistics:
    """All correlations are 1: every pair ties with every other."""
    return statistics_of(torch.ones(total, total).double(), torch.zeros(total).double())


def dead(total: int) -> Statistics:
    """Every feature is constant, at one of 8 values."""
    zeros = torch.zeros(total, total, dtype=torch.float64)
    return statistics_of(zeros, torch.arange(total).double() % 8)


def full_search(statistics: Statistics, merged: int, alpha: float) -> Tensor:
    """Zip with beta = 1, plainly: the first member of each feature's group."""
    similarity = statistics.similarity().numpy()
    total = len(similarity)
    first = np.arange(total)
    np.fill_diagonal(similarity, -np.inf)
    for _ in range(total - merged):
        i, j = divmod(int(similarity.argmax()), total)
        low = np.minimum(similarity[i], similarity[j])
        similarity[i] = similarity[:, i] = np.where(low > 0, alpha * low, low)
        similarity[j] = similarity[:, j] = -np.inf
        first[first == j] = i
    return torch.from_numpy(first)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Best of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope p of a straight line through log seconds over log N: time grows as N ** p."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def measure(
    name: str, make: Callable[[int], Statistics], matcher: Zip, sizes: list[int]
) -> list[str]:
    """One row of the table."""
    times, plain = [], "-"
    for total in sizes:
        statistics = make(total)

        def fast(statistics: Statistics = statistics, merged: int = total // 2) -> Tensor:
            return matcher(statistics, merged).assignment

        times.append(seconds(fast, repeats=3))
        if total <= LARGEST_FULL_SEARCH and matcher.beta == 1 and matcher.alpha > 0:

            def slow(statistics: Statistics = statistics, merged: int = total // 2) -> Tensor:
                return full_search(statistics, merged, matcher.alpha)

            assert torch.equal(torch.unique(slow(), return_inverse=True)[1], fast()), name
            plain = f"{seconds(slow, repeats=1):.2f} (N = {total})"
    cells = [f"{value:.3f}" for value in times]
    growth = f"{exponent(sizes, times):.2f}" if len(sizes) > 1 else "-"
    return [name, f"{matcher.alpha:g}", f"{matcher.beta:g}", *cells, growth, plain]


def main() -> None:
    """Print, and with --out write, one row per kind of features and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    evaluate.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = ["features", "alpha", "beta", *(f"N = {n}" for n in options.sizes)]
    rows = []
    for name, make in (("low rank", low_rank), ("all tied", ties), ("all constant", dead)):
        for matcher in (Zip(), Zip(1, 1), Zip(0, 1), Zip(0.3, 0.3), Zip(0.3, 0)):
            rows.append(measure(name, make, matcher, options.sizes))
            print(*rows[-1], file=sys.stderr, flush=True)
    text = [
        "# Seconds of the greedy matcher, best of 3",
        "",
        evaluate.environment("benchmarks.greedy"),
        "",
        "N features of two models are matched down to N / 2. Growth: p of a fitted N ** p. Full",
        "search: the plain algorithm that looks at the whole matrix for every match.",
        "",
        evaluate.table([*header, "growth", "full search"], rows),
    ]
    evaluate.publish("\n".join(text), options.out)


if __name__ == "__main__":
    main()
