"""Which features a merge has moved, where they lie, and what brings them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.analysed import analysed
from tests.helpers.blocks import Net, data
from zipfx import LinearMerge, Matching
from zipfx.analysis.analysis import Analysis
from zipfx.match import AxisMap
from zipfx.merge.moved import Moved

SIZE = 4
ORDER = torch.tensor([2, 0, 3, 1])


def reads_two(module: Any, x: Tensor) -> Tensor:
    a, b = module.a(x).relu(), module.b(x).tanh()
    z: Tensor = module.h(torch.cat([a, b], 1))
    return z


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    model = Net(reads_two, a=nn.Linear(3, SIZE), b=nn.Linear(3, SIZE), h=nn.Linear(2 * SIZE, 2))
    return analysed(model, data(3))


def in_place() -> Matching:
    return Matching(torch.arange(SIZE).repeat(2), (SIZE, SIZE), SIZE)


def reordered() -> Matching:
    return Matching(torch.cat([torch.arange(SIZE), ORDER]), (SIZE, SIZE), SIZE)


def moved(analysis: Analysis, k: int, *merges: Any) -> Moved:
    """merges: of the spaces of a and b."""
    names = [space.name for space in analysis.spaces]
    return Moved(analysis.grouping, {names.index(n): m for n, m in zip("ab", merges)}, k)


def at(analysis: Analysis, name: str) -> Any:
    nodes = [n.name for n in analysis.module.graph.nodes]
    return analysis.facts.nodes[nodes.index(name)]


def test_only_what_changes_its_place_in_a_model_is_moved(analysis: Analysis) -> None:
    names = [space.name for space in analysis.spaces]
    assert moved(analysis, 0, in_place(), reordered()).spaces == frozenset()
    assert moved(analysis, 1, in_place(), reordered()).spaces == {names.index("b")}
    assert moved(analysis, 1, reordered(), reordered()).spaces == {0, 1}


def test_a_matrix_moves_whatever_it_is(analysis: Analysis) -> None:
    eye = torch.eye(SIZE, dtype=torch.float64)
    same = LinearMerge(torch.cat([eye, eye], 1) / 2, torch.cat([eye, eye]), (SIZE, SIZE))
    assert len(moved(analysis, 0, in_place(), same).spaces) == 1


def test_which_nodes_hold_moved_features(analysis: Analysis) -> None:
    found = moved(analysis, 1, in_place(), reordered())
    held = [n.name for n in analysis.module.graph.nodes if found.lies_in(at(analysis, n.name))]
    assert held == ["b", "tanh", "cat"]
    assert all(found.is_whole_in(at(analysis, name)) for name in held)


def test_parts_of_a_moved_space_are_not_whole() -> None:
    part = analysed(Net(lambda s, x: s.h(s.a(x).relu()[:, :2]), a=nn.Linear(3, SIZE),
                        h=nn.Linear(2, 2)), data(3))  # fmt: skip
    whole = [n.name for n in part.module.graph.nodes if n.name in ("relu", "getitem")]
    assert whole == ["relu", "getitem"]
    found = Moved(part.grouping, {i: Matching(torch.arange(s.size).flip(0).repeat(2),
                                              (s.size,) * 2, s.size)
                                  for i, s in enumerate(part.spaces)}, 1)  # fmt: skip
    for name in whole:
        fact = at(part, name)
        slots = [slot.reshape(-1).numpy() for v in fact.values for slot in v.features]
        # what is read and what is not are spaces of their own, or the space is cut
        tables = {s for labels in slots for s, _ in part.grouping.tables(labels)}
        inside = {s for labels in slots for s in found.among(labels)}
        assert found.is_whole_in(fact) == (inside <= tables)


def test_the_unmerge_brings_the_features_of_a_model_back(analysis: Analysis) -> None:
    found = moved(analysis, 1, in_place(), reordered())
    (labels,) = (slot.reshape(-1).numpy() for slot in at(analysis, "cat").values[0].features)
    merged = torch.arange(2.0 * SIZE, dtype=torch.float64)
    (move,) = found.unmerge([labels], 2 * SIZE, 0)
    assert isinstance(move, AxisMap)
    assert merged[move.target].tolist() == [0, 1, 2, 3, *(SIZE + ORDER).tolist()]
    weight = torch.randn(2 * SIZE, dtype=torch.float64)  # reads them in the order of the model
    assert torch.isclose(move.apply(weight) @ merged, weight @ merged[move.target])
    (still,) = moved(analysis, 0, in_place(), reordered()).unmerge([labels], 2 * SIZE, 0)
    assert torch.equal(still.apply(weight), weight)


def test_vertices_move_with_their_spaces(analysis: Analysis) -> None:
    found = moved(analysis, 1, in_place(), reordered())
    grouping = analysis.grouping
    for name, expected in (("a", False), ("b", True)):
        (labels,) = (slot.reshape(-1).numpy() for slot in at(analysis, name).values[0].features)
        assert (found.vertices(grouping.vertex[labels]) == expected).all()
