"""Do the exactness laws hold on random networks, and how much of them is left pinned?

    python -m benchmarks.properties --examples 20000 --jobs 2 \\
        --out benchmarks/results/properties_cpu_202611.md

The property of tests/laws/test_properties.py (laws 1 and 6 on every network, and one of the
others), outside pytest: on examples with seeds of their own, in several processes, and without
stopping at a failure. Every failure is made small and printed as a module that stands alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks import evaluate
from tests.helpers.graphs import OPS, written
from tests.helpers.properties import (
    LAWS,
    Example,
    Failure,
    UnusableError,
    check,
    independent,
    simplify,
    where,
)

CHUNK = 100  # examples that a process takes at once


@dataclass
class Tally:
    """Counts over many examples; several of them add up."""

    laws: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    axes: Counter[str] = field(default_factory=Counter)
    pinned: Counter[str] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            mine.update(theirs) if isinstance(mine, Counter) else mine.extend(theirs)

    def note(self, example: Example) -> None:
        """Check one example and count what it shows."""
        self.counts["examples"] += 1
        try:
            outcome = check(example)
        except UnusableError:
            self.counts["unusable"] += 1
            return
        except Exception as error:
            self.failures.append(Failure(where(error), example))
            return
        self.laws[example.law] += 1
        self.refused[example.law] += outcome.refused == "cut"
        self.counts["ambiguous"] += outcome.refused == "ambiguous"
        steps = written(example.plan).steps
        self.steps.update(set(steps))
        self.depths[len(steps)] += 1
        self.axes.update(outcome.axes)
        self.pinned.update(outcome.pinned)
        self.sizes.update(outcome.spaces)
        self.counts["spaces"] += len(outcome.spaces)
        self.counts["with spaces"] += bool(outcome.spaces)
        self.counts["with blocks"] += outcome.blocks


def chunk(job: tuple[int, int]) -> Tally:
    """`count` examples from number `first` on."""
    first, count = job
    torch.set_num_threads(1)
    tally = Tally()

    for number in range(first, first + count):
        tally.note(independent(number))
    return tally


# ------------------------------------------------------------------ the report
def report(tally: Tally, small: Sequence[Failure], options: argparse.Namespace, t: float) -> str:
    n = tally.counts["examples"]
    held = n - tally.counts["unusable"] - len(tally.failures)
    distinct = {f.example.plan.code(): f for f in small}
    rows = [
        (name, str(tally.steps[name] or "-"), str(tally.axes[name]), str(tally.pinned[name]),
         _share(tally.pinned[name], tally.axes[name]))
        for name in ("stem", *OPS, "head")
    ]  # fmt: skip
    depth = sum(d * c for d, c in tally.depths.items()) / max(1, sum(tally.depths.values()))
    text = [
        "# The exactness laws on random networks",
        evaluate.environment("benchmarks.properties"),
        f"- examples {options.seed} to {options.seed + n - 1}; "
        f"{options.jobs} process(es); {t:.0f} s",
        f"{n} networks: every law holds on {held}; {tally.counts['unusable']} give only zeros and "
        f"say nothing; {len(tally.failures)} fail. Laws 1 and 6 are checked on every "
        "network, and one of the others.",
        f"On {tally.counts['ambiguous']} networks several matchings are equally good: law 5 says "
        "nothing there.",
        f"{depth:.1f} steps in the mean (at most {max(tally.depths, default=0)}); "
        f"{tally.counts['spaces']} spaces of {min(tally.sizes, default=0)} to "
        f"{max(tally.sizes, default=0)} features; {_share(tally.counts['with spaces'], held)} of "
        f"the networks have spaces, {_share(tally.counts['with blocks'], held)} have blocks.",
        evaluate.table(
            ("law", "networks", "cuts refused"),
            [(name, str(tally.laws[name]), str(tally.refused[name])) for name in LAWS],
        ),
        "By step: networks that have it, parameter axes longer than 1, and those an operation pins "
        "or keeps in blocks (neither the network's input nor its output).",
        evaluate.table(("step", "networks", "axes", "pinned", "share"), rows),
    ]
    if tally.failures:
        text += ["## Failures"]
    for failure in distinct.values():
        text += [
            f"`{failure.example!r}`: {failure.where}",
            f"```python\n{failure.example.plan.code()}```",
        ]
    return "\n\n".join(text)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    evaluate.add_arguments(parser)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first example")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start, tally = time.perf_counter(), Tally()
    jobs = [
        (options.seed + first, min(CHUNK, options.examples - first))
        for first in range(0, options.examples, CHUNK)
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for part in pool.imap_unordered(chunk, jobs):
            tally.add(part)
            print(tally.counts["examples"], len(tally.failures), flush=True)
            for failure in part.failures:
                print(failure.where, failure.example, flush=True)
            if not tally.counts["examples"] % 1000:  # a run of hours may be cut short
                seconds = time.perf_counter() - start
                evaluate.publish(report(tally, tally.failures, options, seconds), options.out)
    seconds = time.perf_counter() - start
    # what is known is written down before failures are made small, which may take long
    evaluate.publish(report(tally, tally.failures, options, seconds), options.out)
    if tally.failures:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            small = pool.map(simplify, tally.failures, chunksize=1)
        evaluate.publish(report(tally, small, options, seconds), options.out)


if __name__ == "__main__":
    main()
