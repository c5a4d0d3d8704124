"""Features are of one space where no exchange of them changes the function, and in none else."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.analysed import analysed, weights
from tests.helpers.blocks import Net, data, sizes
from zipfx.analysis.grouping.build_map import find_spaces
from zipfx.analysis.grouping.classes import group
from zipfx.analysis.grouping.grouping import Grouping

FEATURES = 6


def net(function: Callable[[Net, Tensor], Tensor], width: int = FEATURES) -> Net:
    """Six features that a layer makes and another one reads, behind some function of them."""
    return Net(lambda s, x: s.b(function(s, s.a(x))), a=nn.Linear(3, FEATURES),
               b=nn.Linear(width, 2), v=weights(FEATURES))  # fmt: skip


FUNCTIONS: dict[str, tuple[Callable[[Net, Tensor], Tensor], int]] = {
    "relu": (lambda s, y: y.relu(), FEATURES),
    "scaled": (lambda s, y: (y * s.v).tanh(), FEATURES),
    "a constant": (lambda s, y: (y + torch.tensor([0, 0, 0, 0, 0, 1.0])).tanh(), FEATURES),
    "halves": (lambda s, y: y[:, :3] * y[:, 3:].tanh(), 3),
    "flipped": (lambda s, y: (y * y.flip(1)).tanh(), FEATURES),
    "rolled": (lambda s, y: (y + y.roll(1, 1)).tanh(), FEATURES),
    "softmax": (lambda s, y: y.softmax(1), FEATURES),
    "norm in groups": (lambda s, y: F.group_norm(y, 2), FEATURES),
    "cumulative": (lambda s, y: y.cumsum(1), FEATURES),
    "some of them": (lambda s, y: torch.cat([y[:, :2].tanh(), y[:, 2:]], 1), FEATURES),
}


@torch.no_grad()
def exchanged(model: nn.Module, a: int, b: int, outputs: tuple[int, ...]) -> nn.Module:
    """Rows a and b of the first layer, with what the second reads in the order `outputs`."""
    twin = copy.deepcopy(model)
    order = list(range(FEATURES))
    order[a], order[b] = b, a
    for t in (twin.a.weight, twin.a.bias, twin.v):  # type: ignore[union-attr]
        t.copy_(t[order])  # type: ignore[union-attr, operator, index]
    twin.b.weight.copy_(twin.b.weight[:, list(outputs)])  # type: ignore[union-attr, operator, index]
    return twin


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_features_share_a_space_where_they_can_be_exchanged(name: str) -> None:
    """Found by trying every pair, with every order of the columns that read them."""
    function, width = FUNCTIONS[name]
    model, x = net(function, width), data(3, batch=5)
    known = analysed(model, x)
    axis = next(a for a in known.facts.constraints.axes if (a.name, a.dim) == ("a.weight", 0))
    grouping = known.grouping
    expected = model(x)
    for a, b in itertools.combinations(range(FEATURES), 2):
        some = [{*grouping.entries(np.array([axis.start + i]))[1].tolist()} for i in (a, b)]
        if some[0] & some[1] or not (some[0] or some[1]):
            continue  # of one space: law 1; pinned both: may be too careful
        orders = itertools.permutations(range(width))
        found = any(torch.allclose(exchanged(model, a, b, o)(x), expected) for o in orders)
        assert not found, (a, b)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("relu", [(6, ())]),
        ("a constant", [(5, ())]),
        ("halves", [(3, ())]),
        ("flipped", [(3, ())]),
        ("rolled", []),
        ("norm in groups", [(2, ()), (6, (3, 3))]),
        ("cumulative", []),
        ("some of them", [(2, ()), (4, ())]),
    ],
)
def test_spaces(name: str, expected: list[tuple[int, tuple[int, ...]]]) -> None:
    assert sizes(net(*FUNCTIONS[name]), data(3)) == expected


# ------------------------------------------------------------------ what is held, and where it ends
def known() -> tuple[Grouping, Callable[..., Grouping]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    found = analysed(model, torch.randn(6, 3))
    return found.grouping, lambda *args: group(found.facts, *args)


def test_labels_that_are_held_stay_where_they_are() -> None:
    whole, again = known()
    assert whole.sizes == (4, 5)
    (first,) = np.flatnonzero((whole.space[whole.vertex] == 0) & (whole.member[whole.vertex] == 0))[
        :1
    ]
    assert again(None, [first]).sizes == (3, 5)
    assert again(None, np.flatnonzero(whole.space[whole.vertex] == 1)).sizes == (4,)


def test_a_trunk_has_the_spaces_that_it_reads_or_hands_on() -> None:
    _, again = known()
    assert [again(last).sizes for last in (1, 2, 3)] == [(4,), (4,), (4, 5)]


def test_features_that_leave_share_a_space_with_those_that_leave() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.a(x)
            part = y[:, :2]
            return self.b(y), part.sum(1)

    found = analysed(Parts(), torch.randn(5, 3))
    part = [n.name for n in found.module.graph.nodes].index("getitem")
    assert group(found.facts, part).sizes == (6,)
    assert group(found.facts, part, (), [part]).sizes == (2, 4)


# ------------------------------------------------------------------ what a grouping is asked
def test_a_table_says_where_a_space_lies_on_an_axis() -> None:
    model = Net(lambda s, x: s.b(torch.cat([s.a(x), s.a(x).tanh()], 1)), a=nn.Linear(3, 2),
                b=nn.Linear(4, 2))  # fmt: skip
    found = analysed(model, data(3))
    (axis,) = (a for a in found.facts.constraints.axes if (a.name, a.dim) == ("b.weight", 1))
    labels = np.arange(axis.start, axis.stop)
    ((space, table),) = found.grouping.tables(labels)
    assert (space, table.tolist()) == (0, [[0, 2], [1, 3]])
    assert found.grouping.tables(labels[:3]) == []  # not whole
    assert found.grouping.spaces(labels[:1]) == {0}


def test_blocks_are_the_parents_of_what_lies_in_them() -> None:
    grouping = analysed(net(*FUNCTIONS["norm in groups"]), data(3)).grouping
    assert (grouping.sizes, grouping.of_blocks) == ((2, 6), (True, False))
    ((parent, table),) = grouping.parents(1)
    assert (parent, table.tolist()) == (0, [[0, 1, 2], [3, 4, 5]])
    assert grouping.parents(0) == []


def test_a_map_names_spaces_by_what_makes_them_and_says_why_others_stay() -> None:
    found = analysed(net(*FUNCTIONS["a constant"]), data(3))
    spaces = find_spaces(found.module.graph, found.facts, found.grouping, {})
    assert [s.name for s in spaces] == ["a"]
    assert {(a.parameter, a.dim, a.role.value) for a in spaces["a"].axes} == {
        ("a.weight", 0, "produces"), ("a.bias", 0, "elementwise"), ("b.weight", 1, "consumes"),
    }  # fmt: skip
    kept = {(p.parameter, p.dim): p.count for p in spaces.pinned}
    assert kept["a.weight", 0] == kept["b.weight", 1] == 1  # beside the constant's other one
    assert kept["b.weight", 0] == 2  # outputs
