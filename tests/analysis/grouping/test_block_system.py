"""Block systems: every rewriting of the graph of features and blocks, alone."""

from __future__ import annotations

import numpy as np
import pytest

from zipfx.analysis.grouping.block_state import BlockState, codes
from zipfx.analysis.grouping.block_system import (
    Parents,
    Relations,
    adopt_circles,
    adopt_parts,
    derive,
    find_blocks,
    hold_torn,
    hold_uneven,
    join_pairs,
)

Pairs = list[tuple[int, int]]


def state(colour: list[int], pairs: Pairs) -> BlockState:
    """A refined state, all of whose pairs are of one role."""
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    role = np.ones(len(pairs), np.uint64)
    return BlockState.of(np.array(colour, np.uint64), a, b, role).refined()


def pairs_of(found: BlockState) -> Pairs:
    return sorted(zip(found.a.tolist(), found.b.tolist(), strict=True))


def test_a_refined_state_has_every_pair_once_and_none_with_itself() -> None:
    found = state([1, 1, 2], [(0, 2), (1, 1), (0, 2), (1, 2)])
    assert pairs_of(found) == [(0, 2), (1, 2)]
    assert found.kind[0] == found.kind[1] != found.kind[2]


def test_held_vertices_are_alike_no_more() -> None:
    before = state([1, 1, 1], [])
    found = before.hold(np.array([0, 1])).refined()
    assert len(np.unique(found.kind)) == 3
    assert found.overlapping.tolist() == [True, True, False]
    assert not before.overlapping.any()


def test_pairs_of_two_classes_that_meet_one_to_one_become_one_vertex() -> None:
    before = state([1, 1, 2, 2], [(0, 2), (1, 3)])
    found = join_pairs(before, Relations.of(before))
    assert found is not None
    assert len(found.colour) == 2
    assert found.vertex[0] == found.vertex[2] != found.vertex[1] == found.vertex[3]
    assert found.part[0] == found.part[1] != found.part[2] == found.part[3]


def test_a_circle_through_a_class_is_held() -> None:
    found = state([1, 1, 2], [(0, 2), (1, 2)]).join(np.array([0, 1]), np.array([2, 2]))
    assert found.overlapping.all()
    assert len(found.colour) == 3


def test_a_part_with_several_of_both_gets_a_parent() -> None:
    grids = [(a + i, b + i) for i in (0, 4) for a in (0, 1) for b in (2, 3)]
    before = state([1, 1, 2, 2] * 2, grids)
    found = adopt_parts(before, Relations.of(before))
    assert found is not None
    assert len(found.colour) == 10
    assert {b for _, b in pairs_of(found)} == {8, 9}
    a, b = np.array(grids).T
    assert set(found.settled.tolist()) == set(codes(a, b).tolist())


def test_vertices_of_a_class_that_all_meet_each_other_get_a_parent() -> None:
    circles = [(i, j) for g in ((0, 1, 2), (3, 4, 5)) for i in g for j in g if i != j]
    before = state([1] * 6, circles)
    found = adopt_circles(before, Relations.of(before))
    assert found is not None
    assert len(found.colour) == 8
    assert set(pairs_of(found)) == {(i, 6 + i // 3) for i in range(6)}


def test_blocks_that_share_only_some_of_their_members_are_held() -> None:
    before = state(
        [1, 1, 1, 1, 2, 2, 2, 2], [(i, 4 + (i + k) % 4) for i in range(4) for k in (0, 1)]
    )
    found = hold_torn(before, Relations.of(before))
    assert found is not None
    assert found.overlapping.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("grid", [True, False])
def test_two_parents_of_one_child_meet(grid: bool) -> None:
    """Unless they are the row and the column of an entry."""
    before = state(
        [1] * 4 + [2, 2, 3, 3], [(i, p) for i in range(4) for p in (4 + i // 2, 6 + i % 2)]
    )
    side = np.where(before.b < 6, 0, 1) if grid else np.full(8, -1)
    found = derive(before, Parents(before.a, before.b, before.role, side))
    if grid:
        assert found is None
    else:
        assert found is not None
        assert set(pairs_of(found)) - set(pairs_of(before)) == {
            (p, q) for p in (4, 5) for q in (6, 7)
        }


def test_cells_of_one_class_that_differ_in_size_are_held() -> None:
    before = state([1, 1, 1, 2, 2], [])
    none = np.full(3, -1)
    parents = Parents(np.arange(3), np.array([3, 3, 4]), np.ones(3, np.uint64), none)
    found = hold_uneven(before, parents)
    assert found is not None
    assert found.overlapping.tolist() == [True] * 3 + [False] * 2


def test_heads_of_one_layer_move_as_wholes() -> None:
    heads = np.repeat([6, 7], 3)
    colour = np.array([1] * 6 + [2] * 2, np.uint64)
    found = find_blocks(colour, np.arange(6), heads, np.ones(6, np.uint64))
    assert found.cell[6] == found.cell[7]
    assert found.cell[:6].tolist() == np.repeat(found.cell[[0, 3]], 3).tolist()
    assert found.cell[0] != found.cell[3]
    assert sorted(zip(found.child.tolist(), found.ancestor.tolist(), strict=True)) == [
        (i, 6 + i // 3) for i in range(6)
    ]
