"""Where the features of a space can be observed: what reads them, and what made the values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.analysed import analysed
from tests.helpers.blocks import Net, data
from tests.helpers.fused import Leaves, Odd, example, own
from zipfx.analysis.analysis import run_analysis
from zipfx.analysis.grouping.places import find_places
from zipfx.analysis.spaces.values import Place
from zipfx.trace.tracing import trace


def places(model: nn.Module, *inputs: Tensor) -> dict[str, dict[str, Place]]:
    """By the names of spaces and nodes."""
    found = analysed(model, *inputs)
    of = find_places(found.module.graph, found.facts, found.grouping)
    names = [space.name for space in found.spaces]
    return {names[s]: {p.node: p for p in those} for s, those in of.items()}


def test_a_feature_is_carried_from_what_makes_it_to_what_reads_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    found = places(model, torch.randn(5, 3))["0"]
    assert list(found) == ["_0", "_1"]
    assert [p.read for p in found.values()] == [False, True]
    assert [p.source for p in found.values()] == [True, False]
    assert all(p.dims == (1,) and p.index.tolist() == [[0], [1], [2], [3]] for p in found.values())


def test_where_a_stream_is_summed_is_its_source() -> None:
    model = Net(lambda s, x: s.h((s.a(x) + s.b(x).tanh()).relu()), a=nn.Linear(3, 4),
                b=nn.Linear(3, 4), h=nn.Linear(4, 2))  # fmt: skip
    (found,) = places(model, data(3)).values()
    assert [name for name, p in found.items() if p.source] == ["add"]
    assert [name for name, p in found.items() if p.read] == ["relu"]


def test_of_a_map_that_is_flattened_positions_are_occurrences() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    found = places(model, torch.randn(5, 3, 4, 4))["0"]
    image, flat = found["_0"], found["_1"]
    assert (image.dims, tuple(image.index.shape)) == ((1,), (4, 1))
    assert (flat.dims, tuple(flat.index.shape)) == ((1,), (4, 4))
    assert flat.index[1].tolist() == [4, 5, 6, 7]


def test_features_along_another_dimension_blur_a_place() -> None:
    """The rows of a product of two activations are features, and so are its columns."""
    model = Net(lambda s, x: s.h((s.a(x)[:, :, None] * s.b(x)[:, None]).tanh().amax(1)),
                a=nn.Linear(3, 4), b=nn.Linear(3, 5), h=nn.Linear(5, 2))  # fmt: skip
    found = places(model, data(3))
    assert found["a"]["tanh"].blurred == (2,)
    assert found["b"]["tanh"].blurred == (1,)
    assert found["b"]["amax"].blurred == ()


def test_a_leaf_has_places_inside() -> None:
    model, x = own(Odd()), example("lstm")
    spaces = run_analysis(trace(model, Leaves()), (x,), verify=False).spaces
    inner = {s.size: {p.inner is not None for p in s.places} for s in spaces}
    assert inner.pop(9) == {True}  # the hidden layer, which no node has as its result
    assert all(inside != {True} for inside in inner.values())


def test_constants_are_no_place_to_observe() -> None:
    """Features of weights are found in weights; of data, where there is data."""
    model = Net(lambda s, x: s.h(s.a(x) * s.v.tanh()), a=nn.Linear(3, 4), h=nn.Linear(4, 2),
                v=nn.Parameter(torch.zeros(4)))  # fmt: skip
    (found,) = places(model, data(3)).values()
    assert "v" not in found
    assert "tanh" not in found
