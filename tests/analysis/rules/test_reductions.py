"""Means, norms and softmaxes over features, in groups that cross or that are padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net, data, law1, law3, parameter, shuffled, sizes


def mirrored(x: Tensor) -> Tensor:
    """Every feature together with its mirror image, which so are one feature with two places."""
    return x.flip(1) + 0.5 * x


def padded_means(x: Tensor) -> Tensor:
    """Where the positions of a channel are features, its mean is a block of its own."""
    return F.pad(x, (1, 1, 1, 1)).mean((2, 3))


MIRRORED: dict[str, Callable[[Tensor], Tensor]] = {
    "means": lambda x: padded_means(shuffled(mirrored(x), 2)),
    "mirrored means": lambda x: mirrored(padded_means(x)),
    "a ring of means": lambda x: padded_means(x).roll(1, 1) + 0.5 * padded_means(x),
    "means by their neighbours": lambda x: (
        (y := padded_means(shuffled(mirrored(x), 2))) * y.roll(1, 1)
    ),
    "means by mirrored maxima": lambda x: (
        padded_means(y := shuffled(mirrored(x), 3)) * F.pad(y, (1, 1, 1, 1)).amax((2, 3)).flip(1)
    ),
    "shuffled and mirrored means": lambda x: (
        (y := padded_means(x)).flip(1) + 0.5 * shuffled(y[..., None], 2)[..., 0]
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("partial", [None, "cut"])
@pytest.mark.parametrize("blocks", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize("name", MIRRORED)
def test_means_of_features_that_are_tied_with_others(
    name: str, blocks: bool, partial: str | None
) -> None:
    """Which of the places of a feature a mean belongs to: the same for all features."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 6, 2, 2) if blocks else s.a(x)
        return s.h(s.cut(MIRRORED[name](y)))

    a, shape = (nn.Linear(4, 24), (4,)) if blocks else (nn.Conv2d(3, 6, 1), (3, 4, 4))
    model = Net(forward, a=a, cut=nn.Identity(), h=nn.Linear(6, 2))
    law1(model, *shape)
    law3(model, *shape, seeds=range(2), partial=partial)


# --------------------------------- law 1: a grid whose members lie in another order from row to row
def test_grid_of_softmaxes_over_shuffled_features() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)[:, torch.tensor([5, 2, 0, 1, 3, 4])].view(-1, 3, 2)
        return s.h((y.softmax(1) * y.softmax(2)).flatten(1))

    law1(Net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 3)), 5)


def test_grid_of_two_group_norms() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.m(s.a(x)).tanh()
        return s.h(s.n(y[:, torch.tensor([0, 3, 5, 1, 2, 4])]))

    norms = {"m": nn.GroupNorm(3, 6), "n": nn.GroupNorm(2, 6)}
    law1(Net(forward, a=nn.Conv2d(3, 6, 1), h=nn.Conv2d(6, 3, 1), **norms), 3, 5, 5)


def test_top_k_of_the_gate_is_symmetric() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        gate = s.g(x)
        smallest = gate.topk(2, -1).values[:, -1:]
        gate = gate.masked_fill(gate < smallest, float("-inf")).softmax(-1)
        y = torch.einsum("bi,ehi->beh", x, s.w1).relu()
        return torch.einsum("be,beh,eoh->bo", gate, y, s.w2)

    model = Net(forward, g=nn.Linear(6, 3), w1=parameter(3, 7, 6), w2=parameter(3, 4, 7))
    assert sizes(model, data(6)) == [(3, ()), (21, (7, 7, 7))]


def test_two_group_norms_of_the_same_count_that_cross() -> None:
    """2 x 2 cells of 2 features, which are free inside a cell."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.m(s.a(x)).tanh()
        return s.h(s.n(y[:, torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])]))

    norms = {"m": nn.GroupNorm(2, 8), "n": nn.GroupNorm(2, 8)}
    model = Net(forward, a=nn.Conv2d(3, 8, 1), h=nn.Conv2d(8, 3, 1), **norms)
    assert len(zipfx.analyze(model, data(3, 5, 5), verify=False))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_mean_over_padded_features(mode: str) -> None:
    """What the padding repeats counts more."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.c(s.a(x).view(-1, 3, 3, 3)), (1, 1, 1, 1), mode=mode)
        return s.h(y.mean((2, 3)))

    law1(Net(forward, a=nn.Linear(4, 27), c=nn.Conv2d(3, 2, 1), h=nn.Linear(2, 2)), 4)


def test_mean_over_padded_products_of_features() -> None:
    """Each row and each channel counts as often as the others, but not each with each."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.w @ s.a(x).view(-1, 3, 4)
        y = (y + y.amax(2, keepdim=True)).transpose(1, 2).reshape(-1, 4, 2, 1)
        y = F.pad(F.pixel_shuffle(y, 2), (1, 1, 1, 1), mode="reflect")
        return s.h(y.mean((2, 3)))

    law1(Net(forward, a=nn.Linear(4, 12), w=parameter(2, 3), h=nn.Linear(1, 2)), 4)


def test_largest_of_reordered_products_of_features() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = (s.a(x)[:, :, None] * s.b(x)[:, None]).flatten(1)[:, [0, 1, 2, 3, 5, 4, 6, 7, 8]]
        return s.h(y.view(-1, 3, 3).amax(1))

    law1(Net(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3), h=nn.Linear(3, 2)), 4)


def test_merge_where_a_softmax_makes_all_means_the_same() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = (s.w @ s.a(x).view(-1, 3, 4)).softmax(2)  # over the features of another space
        return s.h(y.mean(1))

    law3(Net(forward, a=nn.Linear(4, 12), w=parameter(3, 3), h=nn.Linear(4, 2)), 4)
