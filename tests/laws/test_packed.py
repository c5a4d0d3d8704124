"""Sentences of several lengths, packed before a recurrent layer and padded behind it; padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net, data, law1, law3, parameter, sizes
from tests.helpers.laws import EXACT, error, heads_error, merge
from zipfx.analysis.spaces.values import Place
from zipfx.observe.observer import Observer


# ------------------------------------------------------------------ padding
def test_images_of_several_sizes_that_forward_pads() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(s.b(F.pad(F.relu(s.a(x)), (1, 1, 1, 1)))).mean((2, 3)))

    model = Net(forward, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 5, 3), h=nn.Linear(5, 3))
    x = data(3, 8, 8)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    loader = [(data(3, 8 + i, 10 - i, seed=100 + i, batch=8),) for i in range(4)]
    assert error(model(x), merge([model, twin], loader, matcher="permute")(x)) < EXACT
    merged = merge([model, twin], loader, matcher="permute", partial="a")
    other = data(3, 11, 9, batch=5)
    assert heads_error(merged, [model(other)] * 2, (other,)) < EXACT


def test_features_that_are_missing_in_other_places_are_told_apart() -> None:
    """Of one image, the only sizes that tell are those of the triangle."""

    def forward(s: Any, x: Tensor) -> Tensor:
        rows = s.a(x)[:, None].expand(-1, 8, 8).tril()
        return s.h(s.c(rows.mT).flatten(1))

    model = Net(forward, a=nn.Linear(5, 8), c=nn.Conv1d(8, 4, 3), h=nn.Linear(24, 3))
    x = data(5, batch=1)
    spaces = zipfx.analyze(model, x, verify=False)
    assert [s.size for s in spaces] == [4]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(model(x), twin(x)) < EXACT


def padded(s: Any, x: Tensor) -> Tensor:
    return torch.cat([F.pad(s.a(x), (0, 0, 1, 0)), F.pad(s.b(x), (0, 0, 0, 2))], 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, x: padded(s, x).mean(1), [8]),
        (lambda s, x: padded(s, x).softmax(2).amax(1), [8]),
        (lambda s, x: torch.cat([s.p.expand(x.shape[0], -1, -1), s.a(x)], 1).logsumexp(1), [8]),
        (
            lambda s, x: torch.cat([F.pad(s.a(x), (0, 0, 1, 0)), x.repeat(1, 1, 2)], 1).mean(1),
            [2] * 4,
        ),
    ],
    ids=["beside one another", "softmax", "a class token", "beside the input"],
)
def test_what_is_taken_together_with_padding(function: Any, expected: list[int]) -> None:
    """Features of a tensor that lie beside those of another meet them in a sum over both."""
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(4, 8), "h": nn.Linear(8, 3)}
    model = Net(lambda s, x: s.h(function(s, x)), **layers, p=parameter(1, 1, 8))
    assert [n for n, _ in sizes(model, data(6, 4))] == expected
    law1(model, 6, 4)
    law3(model, 6, 4, seeds=[0])


def test_softmax_over_parts_of_a_cat_ties_nothing() -> None:
    """Its two halves are normalised each by themselves, and read by weights of their own."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = torch.cat([F.pad(s.a(x), (0, 0, 0, 6)), F.pad(s.b(x), (0, 0, 6, 0))], 1).softmax(2)
        return s.h(y[:, :6]) + s.g(y[:, -6:])

    heads = {"h": nn.Linear(8, 3), "g": nn.Linear(8, 3)}
    model = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(4, 8), **heads)
    assert sizes(model, data(6, 4)) == [(8, ()), (8, ())]
    law1(model, 6, 4)


def test_a_place_is_known_by_coordinates() -> None:
    """Features before positions, which are fewer or more than on the example inputs."""
    index = torch.arange(6).reshape(3, 2)  # three features at two positions
    observer = Observer(Place("n", (1, 2), index, read=True, sizes=(3, 2)), 1)
    x = torch.arange(12.0).reshape(1, 3, 4)
    assert observer._samples(x).tolist() == [[0, 4, 8], [1, 5, 9]]
    assert observer._samples(x[..., :1]).tolist() == [[0, 4, 8]]
    assert observer._samples(x[..., :2]).tolist() == [[0, 4, 8], [1, 5, 9]]


@pytest.mark.parametrize("half", [torch.tril, torch.triu])
def test_triangular_weights_keep_their_order(half: Any) -> None:
    """Row k reads k columns: none is like another, though each is, for all rows but one."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.a(x) @ half(s.w))

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), w=parameter(8, 8))
    assert sizes(model, data(6, 5)) == []
    law1(model, 6, 5)
