"""Which labels are one feature, and the order of those that it has on one axis."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.analysed import ids
from zipfx.analysis.grouping.components import components, in_parts, occurrences, runs
from zipfx.analysis.grouping.known import Known
from zipfx.analysis.labels.constraints import Constraints

edges = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


def parts_of(n: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The smallest member of the part that each of n vertices lies in, by joining set by set."""
    sets = {i: {i} for i in range(n)}
    for a, b in pairs:
        both = sets[a] | sets[b]
        for i in both:
            sets[i] = both
    return [min(sets[i]) for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(edges)
def test_parts_are_those_of_plain_sets(pairs: list[tuple[int, int]]) -> None:
    constraints = Constraints(size=10)
    for a, b in pairs:
        constraints.same(np.array([a]), np.array([b]))
    found = components(constraints, 0)
    wanted = np.array(parts_of(10, pairs))
    assert np.array_equal(found[:, None] == found, wanted[:, None] == wanted)


def test_a_trunk_knows_what_its_nodes_have_shown_and_weights_what_weights_have() -> None:
    constraints = Constraints(size=5)
    for node, (a, b, of_weights) in enumerate([(1, 2, False), (2, 3, True), (3, 4, False)]):
        constraints.node = node
        constraints.same(np.array([a]), np.array([b]), weights_only=of_weights)
    by_node = [len({*components(constraints, last).tolist()}) for last in range(3)]
    assert by_node == [4, 3, 2]
    of_weights = components(constraints, 2, weights_only=True).tolist()
    assert of_weights[2] == of_weights[3]
    assert len({*of_weights}) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 2)))
def test_runs_put_together_are_the_whole(values: list[int]) -> None:
    found = runs(np.array(values, np.int64))
    assert [v for v, start, stop in found for _ in range(start, stop)] == values
    assert [start for _, start, _ in found] == [0, *(stop for *_, stop in found)][: len(found)]
    assert all(a[0] != b[0] for a, b in itertools.pairwise(found))


# ------------------------------------------------------------------ several labels on one axis
def mirrored(order: list[int], colours: list[int]) -> tuple[Constraints, Known]:
    """One axis of four labels, 1 and on, each tied with the one at `order`."""
    constraints = Constraints()
    constraints.parameter("a", torch.zeros(4))
    constraints.same(np.arange(1, 5), 1 + np.array(order))
    constraints.colour(ids(1, 2, 3, 4), ids(*colours))
    return constraints, Known.learn(constraints, 0)


def turns(constraints: Constraints, known: Known) -> tuple[list[int], list[int], list[int]]:
    """The order of the labels, and the names and shapes of the two features, as they come."""
    component = components(constraints, 0)
    turn, name, shape = occurrences(constraints, 0, known.axis, known.colour, component)
    return turn[1:].tolist(), name[1:].tolist(), shape[component[1:]].tolist()


def test_labels_of_a_feature_are_told_apart_by_what_they_met() -> None:
    """y.flip(0) + y: features {1, 4} and {2, 3}, of which the first halves are alike."""
    turn, name, shape = turns(*mirrored([3, 2, 1, 0], [-1, -1, -2, -2]))
    assert (turn[0] < turn[3]) == (turn[1] < turn[2])
    assert name[0] == name[1] != name[2] == name[3]
    assert len({*shape}) == 1


def test_features_that_met_other_things_are_not_alike() -> None:
    _, _, shape = turns(*mirrored([3, 2, 1, 0], [-1, -5, -2, -2]))
    assert shape[0] == shape[3] != shape[1] == shape[2]


def test_a_cycle_is_walked_along() -> None:
    """y * y.roll(1): one feature of four labels that nothing else tells apart."""
    constraints, known = mirrored([1, 2, 3, 0], [0, 0, 0, 0])
    turn, name, _ = turns(constraints, known)
    assert sorted(turn) == [0, 1, 2, 3]
    assert len({*name}) == 4


def test_what_was_joined_has_an_order_that_is_that_of_its_class() -> None:
    part = np.array([0, 7, 9, 7, 9], np.uint64)  # two features, joined of parts 7 and 9
    kind = np.array([0, 3, 3, 3, 3])
    found = in_parts(np.array([5, 8, 2, 1, 6]), kind, part)
    assert found[0] == 5  # was not joined
    assert sorted(found[1:]) == [0, 1, 2, 3]
    assert (found[1] < found[2]) == (found[3] < found[4])
