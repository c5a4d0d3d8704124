"""Do the exactness laws hold on random networks, and how much of them is left pinned?

    python -m benchmarks.properties --examples 20000 --jobs 2 \\
        --out benchmarks/results/properties_cpu_202611.md

The property of tests/test_properties.py (laws 1 and 6 on every network, and one of the others),
outside pytest: in chunks with seeds of their own, in several processes, and without stopping at a
failure. Every failure is made small and printed as a module that stands alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import graphs
import properties
from graphs import OPS, Step, written
from hypothesis import HealthCheck, Phase, given, seed, settings
from properties import LAWS, Example, UnusableError, check, examples, known

from benchmarks import evaluate

CHUNK = 250  # examples that share a seed


@dataclass(frozen=True)
class Failure:
    """where: the exception and the line of the law that did not hold."""

    where: str
    example: Example
    known: str | None


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
            self.failures.append(Failure(where(error), example, known(example)))
            return
        self.laws[example.law] += 1
        self.refused[example.law] += bool(outcome.refused)
        steps = written(example.plan).steps
        self.steps.update(set(steps))
        self.depths[len(steps)] += 1
        self.axes.update(outcome.axes)
        self.pinned.update(outcome.pinned)
        self.sizes.update(outcome.spaces)
        self.counts["spaces"] += len(outcome.spaces)
        self.counts["with spaces"] += bool(outcome.spaces)
        self.counts["with blocks"] += outcome.blocks


def where(error: Exception) -> str:
    """What identifies a failure: the law and its line, or the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError):
        frame = [f for f in frames if f.filename == properties.__file__][-1]
        return f"{frame.name}: {frame.line}"
    text = str(error).partition("\n")[0][:80]
    return f"{type(error).__name__} in {frames[-1].name}: {text}"


def chunk(job: tuple[int, int]) -> Tally:
    """The examples of one seed."""
    number, count = job
    torch.set_num_threads(1)
    tally = Tally()

    @seed(number)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples())
    def run(example: Example) -> None:
        tally.note(example)

    run()
    return tally


# ------------------------------------------------------------------ making failures small
def fails_as(example: Example) -> str:
    try:
        check(example)
    except UnusableError:
        return ""
    except Exception as error:
        return where(error)
    return ""


def simplify(failure: Failure) -> Failure:
    """The smallest example that fails in the same way, going down step by step."""
    example = failure.example
    while True:
        smaller = (e for e in _smaller(example) if fails_as(e) == failure.where)
        found = next(smaller, None)
        if found is None:
            return Failure(failure.where, example, known(example))
        example = found


def _smaller(example: Example) -> Iterator[Example]:
    plan = example.plan
    for steps in _fewer(plan.steps):
        yield _with(example, steps=steps)
    if len(plan.inputs) > 1:
        yield from (_with(example, inputs=(layout,)) for layout in plan.inputs)
    for layout in graphs.INPUTS:
        if plan.inputs == (layout,):
            break
        if len(plan.inputs) == 1:
            yield _with(example, inputs=(layout,))
    for name, simplest in (("ending", "head"), ("stem", 0), ("seed", 0)):
        if getattr(plan, name) != simplest:
            yield _with(example, **{name: simplest})
    if example.cut > 1:
        yield dataclasses.replace(example, cut=1)
    for i, step in enumerate(plan.steps):
        for lower in _lower(step):
            yield _with(example, steps=(*plan.steps[:i], lower, *plan.steps[i + 1 :]))


def _with(example: Example, **changes: object) -> Example:
    return dataclasses.replace(example, plan=dataclasses.replace(example.plan, **changes))


def _fewer(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    if len(steps) > 1:
        yield from (steps[:i] + steps[i + 1 :] for i in range(len(steps)))


def _lower(step: Step) -> Iterator[Step]:
    for op in list(OPS)[: min(3, list(OPS).index(step.op))]:
        yield dataclasses.replace(step, op=op)
    for name in ("at", "other", "size", "option"):
        value = getattr(step, name)
        bits = (value & ~(1 << b) for b in reversed(range(6)))
        for lower in dict.fromkeys((0, 1, 2, *bits)):
            if lower < value:
                yield dataclasses.replace(step, **{name: lower})


# ------------------------------------------------------------------ the report
def report(tally: Tally, distinct: Sequence[Failure], options: argparse.Namespace, t: float) -> str:
    n = tally.counts["examples"]
    held = n - tally.counts["unusable"] - len(tally.failures)
    excused = Counter(f.known for f in tally.failures if f.known)
    rows = [
        (name, str(tally.steps[name]), str(tally.axes[name]), str(tally.pinned[name]),
         _share(tally.pinned[name], tally.axes[name]))
        for name in ("stem", *OPS, "head")
    ]  # fmt: skip
    depth = sum(d * c for d, c in tally.depths.items()) / max(1, sum(tally.depths.values()))
    text = [
        "# The exactness laws on random networks",
        evaluate.environment("benchmarks.properties"),
        f"- seeds: {options.seed} to {options.seed + (n - 1) // CHUNK}, {CHUNK} examples each; "
        f"{options.jobs} process(es); {t:.0f} s",
        f"{n} networks: every law holds on {held}; {tally.counts['unusable']} give only zeros and "
        f"say nothing; {len(tally.failures)} fail, {sum(excused.values())} of them in a way that "
        "is known. Laws 1 and 6 are checked on every network, and one of the others.",
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
        text += [f"{count} x {name}" for name, count in excused.most_common()]
    for failure in distinct:
        text += [
            f"`{failure.example!r}`: {failure.where}"
            + (f" (known: {failure.known})" if failure.known else ""),
            f"```python\n{failure.example.plan.code()}```",
        ]
    return "\n\n".join(text)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    evaluate.add_arguments(parser)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--small", type=int, default=12, help="failures that are made small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start, tally = time.perf_counter(), Tally()
    jobs = [
        (options.seed + i, min(CHUNK, options.examples - first))
        for i, first in enumerate(range(0, options.examples, CHUNK))
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for part in pool.imap_unordered(chunk, jobs):
            tally.add(part)
            print(tally.counts["examples"], len(tally.failures), flush=True)
            for failure in part.failures:
                print(failure.where, failure.example, flush=True)
    seconds = time.perf_counter() - start
    # what is not known comes first; one example for each way to fail
    queue = sorted(tally.failures, key=lambda f: f.known is not None)
    small: dict[tuple[str, str], Failure] = {}
    for failure in queue[: options.small]:
        least = simplify(failure)
        small.setdefault((least.where, least.example.plan.code()), least)
    evaluate.publish(report(tally, list(small.values()), options, seconds), options.out)


if __name__ == "__main__":
    main()
