"""The exactness laws on random networks (see `graphs` and `properties`).

    ZIPFX_PROFILE=long python -m pytest tests/laws/test_properties.py   # 20,000 examples, hours

`python -m benchmarks.properties` runs the same property in several processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, find, given, note, settings
from torch import Tensor

import zipfx
from tests.helpers.graphs import INPUTS, OPS, Plan, Step, operation, plans, written
from tests.helpers.laws import EXACT, run
from tests.helpers.properties import (
    Example,
    Failure,
    UnusableError,
    agree,
    check,
    examples,
    independent,
    law_1_error,
    simplify,
    where,
)
from zipfx.analysis.grouping import classes
from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Labels, beyond, support
from zipfx.analysis.rules import reductions
from zipfx.trace.tracing import trace

QUIET = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("ci", max_examples=200, **QUIET)
settings.register_profile("long", max_examples=20_000, **QUIET)
PROFILE = settings.get_profile(os.environ.get("ZIPFX_PROFILE", "ci"))


# About a minute: 200 networks, each analysed, permuted, and merged once or twice.
@pytest.mark.slow
@settings(PROFILE)
@given(examples())
def test_every_law_holds_on_random_networks(example: Example) -> None:
    note(example.plan.code())
    event(holds(example))


# About a minute and a half: 300 networks that have nothing in common.
@pytest.mark.slow
def test_every_law_holds_on_independent_networks() -> None:
    counts = Counter(holds(independent(seed)) for seed in range(300))
    assert counts["zero"] < 10, counts


def holds(example: Example) -> str:
    """How the laws hold; failures are raised, made small."""
    try:
        return check(example).refused or example.law
    except UnusableError:
        return "zero"
    except Exception as error:
        small = simplify(Failure(where(error), example)).example
        error.add_note(f"{small!r}\n{small.plan.code()}")
        raise


def _found(plan: Plan) -> list[str]:
    """All spaces, but for their names and for the order of what an axis repeats."""
    net = plan.net()
    spaces = zipfx.analyze(net.build(plan.seed), net.inputs(4), verify=False)

    def columns(index: Tensor) -> list[Any]:
        return index[:, index[0].argsort()].tolist() if index.ndim == 2 else index.tolist()

    def told(space: zipfx.Space) -> str:
        axes = sorted(f"{a.parameter} {a.dim} {a.role} {columns(a.index)}" for a in space.axes)
        within = sorted(str(columns(block.index)) for block in space.within)
        return str((space.size, space.blocks, axes, within))

    return [*sorted(map(told, spaces)), *sorted(map(str, spaces.pinned))]


@pytest.mark.slow
def test_members_that_are_told_again_say_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0

    def counted(*given: Any) -> Any:
        nonlocal used
        found = repeated(*given)
        used += len(found[1]) > 0
        return found

    def all_told(sizes: Any, vertex: Any, b: Any, role: Any) -> Any:
        none = np.zeros(0, np.int64)
        return np.ones(len(vertex), bool), none, none, np.zeros(0, np.uint64)

    repeated = classes._repeated
    for seed in range(60):
        plan = independent(seed).plan
        monkeypatch.setattr(classes, "_repeated", counted)
        fewer = _found(plan)
        monkeypatch.setattr(classes, "_repeated", all_told)
        assert _found(plan) == fewer
    assert used > 5


def test_means_over_padded_positions_of_features_tied_with_their_mirror_images() -> None:
    """What random networks have found once."""
    steps = (Step("reorder", option=4), Step("shuffle"), Step("pad"))
    check(Example(Plan(("image",), steps, stem=6, ending="pooled"), "zip_matcher", 1))


def test_merges_that_give_zeros_agree_or_not() -> None:
    """Of `y.clamp(-1, 1) - y`, averaged features are too small to leave anything."""
    zeros, x = torch.nn.Threshold(9.0, 0.0), (torch.rand(3, 4).double(),)
    with pytest.raises(UnusableError):
        agree(zeros, zeros, x)
    for one, other in ((zeros, torch.nn.Identity()), (torch.nn.Identity(), zeros)):
        with pytest.raises(AssertionError):
            agree(one, other, x)


# ------------------------------------------------------------------ sensitivity
def no_blocks(constraints: Constraints, x: Labels, dims: set[int]) -> Labels:
    left = tuple(slot for slot in x.features if not support(slot) & dims)
    return replace(x, features=left, fixed=beyond(x.fixed, dims))


def nothing(*_: Any) -> None:
    return None


def no_relation(constraints: Constraints, a: Any, b: Any, *_: Any, **__: Any) -> Any:
    return a, b


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a softmax over a part of the features makes no blocks": (reductions, "together", no_blocks),
    "coordinates that meet features do not colour them": (Constraints, "entangle", nothing),
    "features that meet are not related": (Constraints, "relate", no_relation),
}


# Up to half a minute each: hundreds of networks until one fails, and a hundred to make it small.
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found_and_made_small(name: str) -> None:
    owner, attribute, broken = MUTANTS[name]

    def wrong_only_when_broken(plan: Plan) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, broken)
            if not fails(plan):
                return False
        return not fails(plan)

    options = settings(
        PROFILE, max_examples=400, derandomize=True, phases=[Phase.generate, Phase.shrink]
    )
    smallest = find(plans(5), wrong_only_when_broken, settings=options)
    assert len(smallest.steps) <= 4, smallest.code()


def fails(plan: Plan) -> bool:
    try:
        return law_1_error(plan) >= EXACT
    except UnusableError:
        return False


# ------------------------------------------------------------------ the strategy itself
@pytest.mark.sweep
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", INPUTS)
def test_every_variant_of_every_step_is_a_network_that_runs(name: str, layout: str) -> None:
    ran = 0
    for option in range(64 if name == "attention" else 12):
        steps = (Step(name, 0, option, option, option), Step("pointwise"), Step(name, 1, 1, 1, 1))
        plan = Plan((layout,), steps, stem=6)
        net = plan.net()
        out = run(net.build(), net.inputs(2))
        assert out.dtype == torch.float64
        ran += name in written(plan).steps
    assert ran
    assert {operation(n) for n, _ in net.build().named_parameters()} <= {*OPS, "stem", "head"}


@pytest.mark.slow
@settings(PROFILE, max_examples=100)
@given(plans())
def test_a_plan_is_one_network_that_can_be_traced(plan: Plan) -> None:
    net = plan.net()
    one, two = net.build(plan.seed), net.build(plan.seed)
    assert plan.code() == Plan(**vars(plan)).code()
    assert eval(repr(plan), {"Plan": Plan, "Step": Step}) == plan
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    x = net.inputs(3)
    assert str(run(one, x)) == str(run(trace(one), x))
