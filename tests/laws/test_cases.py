"""Structures on which tools that merge or prune break or go wrong: what must be found, and not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import zipfx
from tests.helpers.cases import CASES, Axis, Case, axes_of
from tests.helpers.laws import EXACT, error, merge, run
from zipfx.model.tensors import widened

Element = tuple[str, int, int, "tuple[int, int] | None"]  # parameter, dim, index, rows


def fetch(name: str) -> tuple[nn.Module, Any, Case]:
    """A case and its inputs in float64."""
    found = CASES[name]
    return found.make(), as_double(found.inputs), found


def as_double(inputs: Any) -> Any:
    return tree_map(widened, inputs)


def moved(axes: Iterable[Axis], size: int) -> list[Counter[Element]]:
    """For every feature of a space: how often each (parameter, dim, index) moves with it."""
    found: list[Counter[Element]] = [Counter() for _ in range(size)]
    for parameter, dim, index, rows in axes:
        for feature, indices in enumerate(index.tolist()):
            found[feature].update((parameter, dim, i, rows) for i in indices)
    return found


def found_spaces(model: nn.Module, spaces: Iterable[zipfx.Space]) -> list[list[Counter[Element]]]:
    """What moves with each feature: one list for every block of a space."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = []
    for space in spaces:
        features: list[Counter[Element]] = [Counter() for _ in range(space.size)]
        for a in space.axes:
            length, rows = tensors[a.parameter].shape[a.dim], None
            parts = a.index // length
            cells = parts.split(list(space.blocks)) if space.blocks else [parts]
            moves = any(bool((cell != cell[:1]).any()) for cell in cells)  # whole parts, with rows
            skip = a.implied or (a.by >= 0 and moves)
            for feature, indices in enumerate([] if skip else a.index.tolist()):
                for i in indices:
                    if a.by >= 0:
                        assert a.by == 0
                        step = len(tensors[a.parameter]) // a.parts
                        rows = (i // length * step, (i // length + 1) * step)
                    features[feature][a.parameter, a.dim, i % length, rows] += 1
        start = 0
        for size in space.blocks or (space.size,):
            found.append(features[start : start + size])
            start += size
    return found


def contains(own: Sequence[Counter[Element]], true: Sequence[Counter[Element]]) -> bool:
    """Whether every true feature lies in exactly one of ours, each in another."""
    homes = [[j for j, o in enumerate(own) if t <= o] for t in true]
    return len(own) == len(true) and sorted(homes) == [[j] for j in range(len(own))]


@torch.no_grad()
def reordered(model: nn.Module, axes: Iterable[Axis], size: int) -> nn.Module:
    """The model with the features on these axes moved on by one."""
    twin = copy.deepcopy(model)
    tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    order = torch.arange(size).roll(1)
    for parameter, dim, index, rows in axes:
        part = tensors[parameter].detach()[slice(*rows) if rows else slice(None)]
        found = part.index_select(dim, index[order].flatten())
        part.index_copy_(dim, index.flatten(), found)
    return twin


@pytest.mark.parametrize("name", CASES)
def test_spaces_are_spaces_and_traps_are_traps(name: str) -> None:
    """What is written of a case is true of it, whatever the analysis finds."""
    model, inputs, found = fetch(name)
    expected = run(model, inputs)
    for texts, kept in ((found.spaces, True), (found.traps, False)):
        for text in texts:
            size, axes = axes_of(model, text)
            twin = reordered(model, axes, size)
            assert (error(expected, run(twin, inputs)) < EXACT) == kept, text


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_ground_truth(name: str) -> None:
    model, inputs, found = fetch(name)
    ours = found_spaces(model, zipfx.analyze(model, inputs, verify=False))
    for space in found.spaces:
        size, axes = axes_of(model, space)
        true = moved(axes, size)
        assert any(contains(own, true) for own in ours), (space, found.right)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_law_1_holds_so_that_no_trap_is_taken(name: str) -> None:
    model, inputs, _ = fetch(name)
    spaces = zipfx.analyze(model, inputs, verify=False)
    expected = run(model, inputs)
    for seed in range(3):
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        assert error(expected, run(twin, inputs)) < EXACT


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_no_trap_is_a_space(name: str) -> None:
    """A trap is a grouping that changes the function; one that lies in a space would do so."""
    model, inputs, found = fetch(name)
    ours = found_spaces(model, zipfx.analyze(model, inputs, verify=False))
    for trap in found.traps:
        size, axes = axes_of(model, trap)
        assert moved(axes, size) not in ours


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_law_3(name: str) -> None:
    model, inputs, _ = fetch(name)
    spaces = zipfx.analyze(model, inputs)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    generator = torch.Generator().manual_seed(0)

    def fresh(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return noise if t.is_floating_point() else t

    data = [tree_map(fresh, inputs) for _ in range(30)]
    merged = merge([model, twin], data, matcher="permute")
    assert error(run(model, inputs), run(merged, inputs)) < EXACT
