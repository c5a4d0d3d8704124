"""What slots that meet say of their labels: one feature, a block, a colour, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.analysed import analysed, ids
from zipfx.analysis.labels.alphabet import Alphabet
from zipfx.analysis.labels.blocks import Blocks
from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.facts import Heard
from zipfx.analysis.labels.incidence import Incidence, crosses, pattern
from zipfx.analysis.labels.labels import Kind, Labels
from zipfx.analysis.labels.records import AxisLabels

slots = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def told(constraints: Constraints) -> dict[str, list[tuple[int, int]]]:
    """The pairs of labels that are one, and those of a feature and its block."""
    pairs = {"one": constraints.edges, "in": constraints.members}
    return {
        way: [p for r in records for p in zip(r.a.tolist(), r.b.tolist(), strict=True)]
        for way, records in pairs.items()
    }


# ------------------------------------------------------------------ the alphabet
def test_labels_lead_back_to_the_axes_of_parameters() -> None:
    alphabet = Alphabet()
    alphabet.parameter("a", torch.zeros(2, 1, 3))  # an axis of length 1 has nothing to exchange
    alphabet.fresh(2)  # blocks
    alphabet.parameter("b", torch.zeros(4))
    assert [(a.name, a.dim, a.start, a.stop) for a in alphabet.axes] == [
        ("a", 0, 1, 3),
        ("a", 2, 3, 6),
        ("b", 0, 8, 12),
    ]
    assert alphabet.size == 12
    assert alphabet.axis(ids(11, 0, 8)) == alphabet.axes[2]
    for slot in (ids(0), ids(6, 7), ids(2, 3), ids(5, 8)):  # none, blocks, and across two axes
        assert alphabet.axis(slot) is None


def test_an_axis_has_parts_once() -> None:
    alphabet = Alphabet()
    alphabet.parameter("a", torch.zeros(4, 3))
    own = alphabet.in_parts(alphabet.axes[1], 0, 2)
    assert own == AxisLabels("a", 1, 8, 3, by=0, parts=2, base=5)
    assert alphabet.in_parts(alphabet.axes[1], 0, 4) is own
    assert alphabet.axis(torch.arange(own.start, own.stop)) is None  # no axis as a whole


# ------------------------------------------------------------------ slots that meet
@settings(max_examples=60, deadline=None)
@given(slots, st.data())
def test_incidence_is_that_of_plain_sets(first: list[int], data: st.DataObject) -> None:
    n = len(first)
    second = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    pairs = sorted({(x, y) for x, y in zip(first, second, strict=True) if x and y})
    met = Incidence.of(ids(*first), ids(*second))
    assert list(zip(met.x.tolist(), met.y.tolist(), strict=True)) == pairs
    xs, ys = ([p[i] for p in pairs] for i in (0, 1))
    assert met.only_x.tolist() == [xs.count(x) == 1 for x in xs]
    assert met.only_y.tolist() == [ys.count(y) == 1 for y in ys]
    one = [xs.count(x) == ys.count(y) == 1 for x, y in pairs]
    assert met.one_to_one.tolist() == one
    rest = [p for p, alone in zip(pairs, one, strict=True) if not alone]
    fine, coarse = met.finer_and_coarser()
    found = [{*p} for p in zip(fine.tolist(), coarse.tolist(), strict=True)]
    assert found == [{*p} for p in rest]
    for (x, y), f in zip(rest, fine.tolist(), strict=True):
        assert f == (x if xs.count(x) == 1 else y)


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ([5, 6, 7, 8], {"one": [(1, 5), (2, 6), (3, 7), (4, 8)], "in": []}),
        ([5, 5, 6, 6], {"one": [], "in": [(1, 5), (2, 5), (3, 6), (4, 6)]}),
        ([5, 5, 6, 0], {"one": [(3, 6)], "in": [(1, 5), (2, 5)]}),
        ([1, 2, 3, 4], {"one": [], "in": []}),
    ],
    ids=["one to one", "in blocks", "some of both", "the same"],
)
def test_labels_that_meet(b: list[int], expected: dict[str, list[tuple[int, int]]]) -> None:
    constraints = Constraints(size=9)
    constraints.relate(ids(1, 2, 3, 4), ids(*b))
    assert told(constraints) == expected


def test_only_slots_that_tell_more_are_kept() -> None:
    fine, coarse = ids(1, 2, 3, 4), ids(5, 5, 6, 6)
    assert Constraints(size=9).relate(fine, coarse) == (fine,)
    assert Constraints(size=9).relate(coarse, fine) == (fine,)
    rows, columns = ids(1, 2)[:, None], ids(3, 4)[None]
    assert Constraints(size=9).relate(rows, columns) == (rows, columns)


def test_where_blocks_meet_is_told_apart() -> None:
    """The coordinates at which a feature meets its block are its place there."""
    block, at = ids(7, 7, 8, 8), ids(-1, -2, -1, -2)
    roles = []
    for fixed in ([], [at]):
        constraints = Constraints(size=9)
        constraints.relate(ids(1, 2, 3, 4), block, fixed)
        (member,) = constraints.members
        roles.append(member.role.tolist())
    assert len({*roles[0]}) == 1
    assert roles[1][0] == roles[1][2] != roles[1][1] == roles[1][3]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_blocks_of_like_members_are_one(rows: int, columns: int, seed: int) -> None:
    slot = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, (rows, columns)))
    found = Blocks.of(slot, [0], [])
    contents = [tuple(sorted(row)) for row in slot.tolist()]
    order = list(dict.fromkeys(contents))
    assert len(found) == len(order)
    assert found.which.flatten().tolist() == [order.index(c) for c in contents]
    numbered = found.numbered(np.arange(10, 10 + len(found)))
    features, blocks, _ = found.members(numbered)
    pairs = {*zip(features.tolist(), blocks.tolist(), strict=True)}
    assert pairs == {(x, 10 + i) for i, c in enumerate(order) for x in c if x}


def test_a_block_is_made_once() -> None:
    constraints, slot = Constraints(size=7), torch.arange(1, 7).view(2, 3)
    block = constraints.block(slot, [1])
    assert block.flatten().tolist() == [7, 8]
    assert constraints.block(slot, [1]) is block
    assert told(constraints)["in"] == [(1, 7), (2, 7), (3, 7), (4, 8), (5, 8), (6, 8)]
    assert constraints.block(slot, [0, 1]).flatten().tolist() == [0]  # of everything: no block
    assert constraints.block(slot[:, :1], [1]) is not block


@pytest.mark.parametrize(
    ("pairs", "crossing"),
    [
        ([[1, 2], [1, 2]], False),  # columns, whatever the row
        ([[1, 2], [3, 4]], False),  # one finer than the other
        ([[1, 2], [2, 1]], False),  # a grid: each in each row
        ([[1, 2], [2, 3]], True),
    ],
)
def test_pairs_that_are_no_grid(pairs: list[list[int]], crossing: bool) -> None:
    rows = torch.tensor([[5], [6]]).expand(2, 2)
    assert crosses(torch.tensor(pairs), rows, [0, 1]) == crossing


def test_a_pattern_is_more_than_what_is_in_it() -> None:
    def colours(*fixed: int) -> list[int]:
        labels, found = pattern(ids(1, 1, 2, 2), ids(*fixed))
        assert labels.tolist() == [1, 2]
        return found.tolist()

    same, mirrored = colours(-1, -2, -1, -2), colours(-1, -2, -2, -1)
    assert same[0] == same[1]
    assert mirrored[0] != mirrored[1]


# ------------------------------------------------------------------ of a model
def test_what_pins_says_so() -> None:
    constraints = Constraints(size=4)
    constraints.pin([ids(1, 0, 3)], "because")
    (colour,) = constraints.colours
    assert (colour.a.tolist(), colour.reason) == ([1, 3], "because")
    assert len({*colour.value.tolist()}) == 2


def test_every_record_names_the_node_that_taught_it() -> None:
    found = analysed(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3))
    nodes = list(found.module.graph.nodes)
    layers = {
        i for i, node in enumerate(nodes) if "Linear" in str(node.meta) or node.target in "02"
    }
    constraints = found.facts.constraints
    assert {c.node for c in constraints.contractions} == layers
    assert {node for _, node in constraints.produced} == layers


def test_facts_are_those_that_a_later_write_has_not_changed_yet() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = y * 2
            y.mul_(y[:, :1])
            self.seen.add_(1)
            return self.b(y + z)  # type: ignore[no-any-return]

    found = analysed(Writes(), torch.randn(5, 3)).facts
    (later, node, _), *_ = found.rewritten
    assert found.until(later).nodes[node] != found.nodes[node]
    assert found.until(later - 1).nodes[node] == found.nodes[node]
    assert found.written(len(found.nodes) - 1) == {"seen"}


def test_what_is_heard_of_an_axis() -> None:
    value = Labels((2, 3), (ids(4, 5, 6)[None],), kind=Kind.DATA)
    heard = Heard.of(("at", True, 0), value, -1, chosen=False)  # type: ignore[arg-type]
    assert (heard.labels.tolist(), heard.others, heard.data) == ([4, 5, 6], (), True)
    ((dims, labels),) = Heard.of(("at", True, 0), value, -2, chosen=False).others  # type: ignore[arg-type]
    assert (dims, labels.tolist()) == ((-1,), [4, 5, 6])
