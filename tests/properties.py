"""The exactness laws as one property of a plan (see `graphs`), for pytest and for the benchmark."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphs import Plan, Step, operation, plans
from hypothesis import strategies as st
from laws import (
    EXACT,
    error,
    heads_error,
    merge,
    parameters,
    run,
    running_modules,
    unharmed,
)
from models import Net
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zipfx

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

    pinned: by step, parameter axes that an operation pins; axes: by step, all of them; refused: why
    a cut is not possible.
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
    return spaces.permuted(model, {name: _cycle(order) for name, order in orders.items()})


def _cycle(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = order.roll(-1)
    return found


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


def equivariance(case: Case) -> None:
    """Law 5: permuting models beforehand changes nothing."""
    a, b = case.model, case.net.build(1000)
    before = zipped([a, b], case.data(), matcher="permute", partial=case.cut)
    after = zipped(
        [case.moved(a, 3), case.moved(b, 4)], case.data(), matcher="permute", partial=case.cut
    )
    assert error(run(before, case.x), run(after, case.x)) < MERGED


def batches(case: Case) -> None:
    """Law 5: the cut of the data into batches does not matter."""
    models = [case.model, case.net.build(1000)]
    whole = case.net.inputs(64, 1)
    pieces = [tuple(t[i : i + 10] for t in whole) for i in range(0, 64, 10)]
    one = zipped(models, [whole], matcher="permute", partial=case.cut)
    many = zipped(models, pieces, matcher="permute", partial=case.cut)
    assert error(run(one, case.x), run(many, case.x)) < MERGED


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
        if cut is None or "choose another module for partial=" not in str(why):
            raise
        refused = str(why)
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


# ------------------------------------------------------------------ what is known to be wrong
@dataclass(frozen=True)
class Known:
    """A bug that is not mended yet: its smallest example, and words that its networks contain."""

    example: Example
    words: tuple[str, ...]

    def excuses(self, example: Example) -> bool:
        code = example.plan.code()
        return all(word in code for word in self.words)


KNOWN: dict[str, Known] = {
    "keys that several heads of queries share are free, the queries are not": Known(
        Example(Plan(("vector",), (Step("attention", option=18),)), "copies"),
        ("repeat_interleave", ".softmax(-1) @"),
    ),
}


def known(example: Example) -> str | None:
    """The name of a known bug that may be why this example fails."""
    return next((name for name, bug in KNOWN.items() if bug.excuses(example)), None)
