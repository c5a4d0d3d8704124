"""What do the matchers cost? Seconds over N on one thread, beside a plain greedy search.

    python -m benchmarks.greedy --out benchmarks/results/greedy_cpu_202611.md

Two models of N / 2 features are matched down to N / 2. The plain search does what the method's
published code does: it looks at the whole matrix for every match, and then deletes a row and a
column of it. It must give the same groups.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks import evaluate
from benchmarks.memory import peak_resident, reset_peak, resident
from zipfx.match import KMeans, Matcher, Optimal, Permute, Svd, Zip
from zipfx.observe.statistics import Statistics


def statistics_of(covariance: Tensor, mean: Tensor) -> Statistics:
    half = len(mean) // 2
    return Statistics(4 * half, mean, covariance, (half, half))


def low_rank(total: int, device: str = "cpu") -> Statistics:
    """Rectified features of 64 shared factors and as much noise of their own."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    factors = normal(2 * total, 64)
    features = factors @ normal(64, total) / 8
    features = (features + normal(2 * total, total)).relu().double()
    return statistics_of(torch.cov(features.T), features.mean(0))


def ties(total: int) -> Statistics:
    """All correlations are 1: every pair ties with every other."""
    return statistics_of(torch.ones(total, total).double(), torch.zeros(total).double())


def dead(total: int) -> Statistics:
    """Every feature is constant, at one of 8 values."""
    zeros = torch.zeros(total, total, dtype=torch.float64)
    return statistics_of(zeros, torch.arange(total).double() % 8)


def factors(total: int) -> Statistics:
    """The exact covariance of features of 64 shared factors and as much noise of their own."""
    loads = torch.randn(total, 64, generator=torch.Generator().manual_seed(0)).double() / 8
    covariance = (loads @ loads.T).fill_diagonal_(0).add_(torch.eye(total, dtype=torch.float64))
    covariance.diagonal().add_(loads.square().sum(1))
    mean = torch.zeros(total).double()
    return Statistics.trusted(
        count=4 * total, mean=mean, covariance=covariance, sizes=(total // 2, total // 2)
    )


def plain_search(statistics: Statistics, merged: int, alpha: float) -> Tensor:
    """Zip with beta = 1, plainly: the first member of each feature's group."""
    similarity = statistics.similarity().numpy()
    total = len(similarity)
    first, group = np.arange(total), np.arange(total)  # of a feature; of a row
    np.fill_diagonal(similarity, -np.inf)
    for _ in range(total - merged):
        i, j = divmod(int(similarity.argmax()), len(similarity))
        low = np.minimum(similarity[i], similarity[j])
        similarity[i] = similarity[:, i] = np.where(low > 0, alpha * low, low)
        first[first == group[j]] = group[i]
        similarity = np.delete(np.delete(similarity, j, 0), j, 1)
        group = np.delete(group, j)
    return torch.from_numpy(first)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Best of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(
    name: str, make: Callable[[int], Statistics], matcher: Matcher, sizes: Sequence[int]
) -> list[str]:
    """One row of the table."""
    times = []
    for total in sizes:
        statistics = make(total)

        def run(statistics: Statistics = statistics, merged: int = total // 2) -> object:
            return matcher(statistics, merged)

        times.append(seconds(run, repeats=3 if total < 4096 else 1))
    cells = [f"{value:.3f}" for value in times]
    growth = f"{evaluate.exponent(sizes, times):.2f}" if len(sizes) > 1 else "-"
    return [name, str(matcher), *cells, growth]


def beside(total: int) -> list[str]:
    """Seconds of the plain search and of `Zip` on the same features, in turns."""
    statistics, matcher = low_rank(total), Zip()
    fast = seconds(lambda: matcher(statistics, total // 2), repeats=3)
    start = time.perf_counter()
    plain = plain_search(statistics, total // 2, matcher.alpha)
    slow = time.perf_counter() - start
    again = seconds(lambda: matcher(statistics, total // 2), repeats=3)
    groups = torch.unique(plain, return_inverse=True)[1]
    same = torch.equal(groups, matcher(statistics, total // 2).assignment)
    assert same, "the plain search finds other groups"
    fast = (fast + again) / 2
    return [str(total), f"{fast:.3f}", f"{slow:.2f}", f"{slow / fast:.0f}"]


def large(total: int) -> list[str]:
    """Seconds of `Zip`, and the peak of memory in copies of the covariance, that one included."""
    statistics, copy = factors(total), 8 * total**2
    reset_peak()
    before = resident()
    took = seconds(lambda: Zip()(statistics, total // 2), repeats=1)
    return [str(total), f"{took:.1f}", f"{1 + (peak_resident() - before) / copy:.2f}"]


def main() -> None:
    """Print, and with --out write, one row per kind of features and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--beside", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--large", type=int, nargs="+", default=[4096, 16384])
    evaluate.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, plain, memory = [], [], []
    for total in options.beside:
        plain.append(beside(total))
        print(*plain[-1], file=sys.stderr, flush=True)
    for total in options.large:
        memory.append(large(total))
        print(*memory[-1], file=sys.stderr, flush=True)
    greedy = (Zip(), Zip(1, 1), Zip(0, 1), Zip(0.3, 0.3), Zip(0.3, 0))
    for name, make, matchers in (
        ("low rank", low_rank, (*greedy, Permute(), Optimal(), KMeans(), Svd())),
        ("all tied", ties, (greedy[0], greedy[3])),
        ("all constant", dead, (greedy[0], greedy[3])),
    ):
        for matcher in matchers:
            few = options.sizes if isinstance(matcher, Zip) else options.sizes[:3]
            rows.append(measure(name, make, matcher, few))
            rows[-1][-1:-1] = ["-"] * (len(options.sizes) - len(few))
            print(*rows[-1], file=sys.stderr, flush=True)
    text = [
        "# Seconds of the matchers",
        evaluate.environment("benchmarks.greedy", ("networkx", "rustworkx")),
        "N features of two models are matched down to N / 2.",
        "## Beside a plain search",
        "The plain search looks at the whole matrix for every match and deletes a row and a column "
        "of it, as the method's published code does. Both give the same groups. Zip: the mean of "
        "the best of 3 runs before it, and after it.",
        evaluate.table(["N", "Zip (s)", "plain (s)", "ratio"], plain),
        "## Large spaces",
        "Memory: the peak of the process in copies of the covariance, itself included.",
        evaluate.table(["N", "Zip (s)", "memory"], memory),
        "## All matchers",
        "Best of 3, of 1 from N = 4096 on. Growth: p of a fitted N ** p.",
        evaluate.table(
            ["features", "matcher", *(f"N = {n}" for n in options.sizes), "growth"], rows
        ),
    ]
    evaluate.publish("\n\n".join(text), options.out)


if __name__ == "__main__":
    main()
