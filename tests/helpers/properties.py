"""The exactness laws as one property of a plan (see `graphs`), for pytest and for the benchmark."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

import zipfx
from tests.helpers.graphs import INPUTS, OPS, Plan, Step, drawn, operation, plans
from tests.helpers.laws import (
    EXACT,
    error,
    heads_error,
    merge,
    parameters,
    run,
    running_modules,
    unharmed,
)
from tests.helpers.models import Net
from zipfx.analysis.verify import cycle

MERGED = 1e-10  # two merges that must be the same, to rounding (as in test_laws)
AT_THE_ENDS = ("unlike any other", "output of the network")  # what no analysis could free


@dataclass(frozen=True)
class Example:
    """What is checked: laws 1 and 6 always, and one more."""

    plan: Plan
    law: str
    cut: int = 0


@dataclass(frozen=True)
class Outcome:
    """What an example that holds has shown.

    pinned: by step, parameter axes that an operation pins; axes: by step, all of them; refused:
    "cut" where zipfx says that it is not possible there, "ambiguous" where law 5 says nothing.
    """

    spaces: tuple[int, ...]
    blocks: bool
    pinned: Counter[str]
    axes: Counter[str]
    refused: str = ""


class UnusableError(Exception):
    """A network whose outputs say nothing: all zero."""


def examples(most: int = 8) -> st.SearchStrategy[Example]:
    return st.builds(Example, plans(most), st.sampled_from(list(LAWS)), st.integers(0, 7))


def independent(seed: int) -> Example:
    """Example number `seed`, drawn independently of all others."""
    random = Random(seed)
    return Example(drawn(random), random.choice(list(LAWS)), random.randrange(8))


# ------------------------------------------------------------------ law 1
def law_1_error(plan: Plan) -> float:
    """The largest relative error after all spaces were permuted at random."""
    net = plan.net()
    model, x = net.build(plan.seed), net.inputs(4)
    return _law_1(model, _usable(model, x), zipfx.analyze(model, x, verify=False), x)


def _law_1(model: nn.Module, expected: Any, spaces: zipfx.SpaceMap, x: Any) -> float:
    twins = (moved(model, spaces, seed) for seed in range(2))
    return max(error(expected, run(twin, x)) for twin in twins)


def moved(model: nn.Module, spaces: zipfx.SpaceMap, seed: int) -> nn.Module:
    """A copy with every space permuted at random, so that no feature stays where it is."""
    orders = spaces.random_permutations(seed)
    moved = {s.name: cycle(orders[s.name], s.blocks) for s in spaces}
    return spaces.permuted(model, moved)


def _usable(model: nn.Module, x: Any) -> Any:
    expected = run(model, x)
    if not all(bool(t.isfinite().all()) and bool(t.any()) for t in tree_leaves(expected)):
        raise UnusableError
    return expected


# ------------------------------------------------------------------ laws 2 to 6
def zipped(models: Sequence[nn.Module], data: Any, **options: Any) -> Any:
    """`laws.merge` without numeric checks, so that the labels alone must be right; law 6."""
    merged = unharmed(models, lambda: merge(models, data, verify=False, **options))
    if isinstance(merged, Exception):
        raise merged
    return merged


@dataclass(frozen=True)
class Case:
    """A network, one model of it with inputs and outputs, its spaces, and where to cut it."""

    net: Net
    model: nn.Module
    x: Any
    expected: Any
    spaces: zipfx.SpaceMap
    cut: str | None

    def moved(self, model: nn.Module | None = None, seed: int = 1) -> nn.Module:
        """A permuted copy."""
        return moved(self.model if model is None else model, self.spaces, seed)

    def data(self) -> list[Any]:
        return self.net.batches(2, 48)


def copies(case: Case) -> None:
    """Law 2: a full zip of two copies has exactly the parameters of one, and computes it."""
    twins = [case.model, copy.deepcopy(case.model)]
    merged = zipped(twins, None, matcher="identity", example_inputs=case.x)
    assert parameters(merged) == parameters(case.model)
    assert error(case.expected, run(merged, case.x)) < EXACT


def full(case: Case) -> None:
    """Law 3, full zip."""
    merged = zipped([case.model, case.moved()], case.data(), matcher="permute")
    assert error(case.expected, run(merged, case.x)) < EXACT


def partial(case: Case) -> None:
    """Law 3 at a cut: each head computes the model."""
    twins = [case.model, case.moved()]
    merged = zipped(twins, case.data(), matcher="permute", partial=case.cut)
    if case.cut is None:
        assert error(case.expected, run(merged, case.x)) < EXACT
    else:
        assert heads_error(merged, [case.expected] * 2, case.x) < EXACT


def zip_matcher(case: Case) -> None:
    """Law 4, as far as it can be told of any network: copies are merged without loss."""
    merged = zipped([case.model, case.moved()], case.data(), matcher="zip")
    assert error(case.expected, run(merged, case.x)) < EXACT


class AmbiguousError(Exception):
    """Several matchings are equally good, so that rounding decides."""


class Decided(zipfx.match.Permute):
    """One to one, where a slightly different similarity gives the same."""

    def __call__(self, statistics: Any, merged: int, *, across_only: bool = False) -> Any:
        similarity = statistics.similarity()[:merged, merged:]
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(merged, merged, generator=generator, dtype=torch.float64)
        one, two = (
            linear_sum_assignment(s, maximize=True)[1]
            for s in (similarity, similarity + 1e-6 * noise)
        )
        if (one != two).any():
            raise AmbiguousError
        return super().__call__(statistics, merged, across_only=across_only)


def agree(one: nn.Module, other: nn.Module, x: Any) -> None:
    """Two merges compute the same, to rounding.

    A merge of two networks may give zeros though neither network does: averaged features are
    smaller, and `y.clamp(-1, 1) - y` is zero below 1. No error is relative to zero; the other merge
    must give zeros there as well, and where there is nothing else, they say nothing.
    """
    (ours, structure), (theirs, same) = (tree_flatten(run(m, x)) for m in (one, other))
    assert structure == same
    for a, b in zip(ours, theirs, strict=True):
        assert (error(a, b) if bool(a.any()) else float((a - b).abs().max())) < MERGED
    if not any(bool(a.any()) for a in ours):
        raise UnusableError


def equivariance(case: Case) -> None:
    """Law 5: permuting models beforehand changes nothing.

    Of a full zip: at a cut, features that only a head tells apart are in one space of the trunk and
    in two of the network, or the other way round where a value that leaves is never read.
    """
    a, b = case.model, case.net.build(1000)
    before = zipped([a, b], case.data(), matcher=Decided())
    after = zipped([case.moved(a, 3), case.moved(b, 4)], case.data(), matcher=Decided())
    agree(before, after, case.x)


def batches(case: Case) -> None:
    """Law 5: the cut of the data into batches does not matter."""
    models = [case.model, case.net.build(1000)]
    whole = case.net.inputs(64, 1)
    pieces = [tuple(t[i : i + 10] for t in whole) for i in range(0, 64, 10)]
    one = zipped(models, [whole], matcher=Decided(), partial=case.cut)
    many = zipped(models, pieces, matcher=Decided(), partial=case.cut)
    agree(one, many, case.x)


Law = Callable[[Case], None]
LAWS: dict[str, Law] = {f.__name__: f for f in (copies, full, partial, zip_matcher, equivariance,
                                                batches)}  # fmt: skip


def check(example: Example) -> Outcome:
    """Laws 1 and 6 and the drawn one.

    Raises:
        AssertionError: a law does not hold.
        UnusableError: the network says nothing.
    """
    plan, net = example.plan, example.plan.net()
    model, x = net.build(plan.seed), net.inputs(4)
    expected = _usable(model, x)
    spaces = unharmed([model], lambda: zipfx.analyze(model, net.inputs(2, 5), verify=False))
    if isinstance(spaces, Exception):
        raise spaces
    assert _law_1(model, expected, spaces, x) < EXACT
    modules = running_modules(model)
    cut = modules[example.cut % len(modules)] if modules and example.cut else None
    refused = ""
    try:
        LAWS[example.law](Case(net, model, x, expected, spaces, cut))
    except zipfx.ZipError as why:
        if isinstance(why.__cause__, AmbiguousError):  # of the matcher
            return _outcome(model, spaces, "ambiguous")
        if cut is None or "choose another module for partial=" not in str(why):
            raise
        refused = "cut"
    return _outcome(model, spaces, refused)


def _outcome(model: nn.Module, spaces: zipfx.SpaceMap, refused: str) -> Outcome:
    axes = Counter(
        operation(name) for name, p in model.named_parameters() for n in p.shape if n > 1
    )
    mine = {(p.parameter, p.dim) for p in spaces.pinned if not p.reason.startswith(AT_THE_ENDS)}
    return Outcome(
        tuple(s.size for s in spaces),
        any("block" in p.reason for p in spaces.pinned) or any(s.blocks for s in spaces),
        Counter(operation(name) for name, _ in mine),
        axes,
        refused,
    )


@dataclass(frozen=True)
class Failure:
    """where: the law and its line, or the line that raised."""

    where: str
    example: Example


def where(error: Exception) -> str:
    """What identifies a failure: the law and its line, or the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError):
        frame = [f for f in frames if f.filename == __file__][-1]
        return f"{frame.name}: {frame.line}"
    text = str(error).partition("\n")[0][:80]
    return f"{type(error).__name__} in {frames[-1].name}: {text}"


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
            return Failure(failure.where, example)
        example = found


def _smaller(example: Example) -> Iterator[Example]:
    plan = example.plan
    for steps in _fewer(plan.steps):
        yield _with(example, steps=steps)
    if len(plan.inputs) > 1:
        yield from (_with(example, inputs=(layout,)) for layout in plan.inputs)
    for layout in INPUTS:
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
