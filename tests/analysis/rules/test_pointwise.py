"""Constants that are the same for every feature of two axes together: identities and their like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, parameter, randomise, sizes
from tests.helpers.laws import EXACT, error, merge
from zipfx.match.matchers.matching import Matching

I8 = torch.eye(8, dtype=torch.float64)
HALVES = torch.diag(torch.tensor([1.0] * 4 + [2.0] * 4, dtype=torch.float64))

#: a matrix from 8 features y to 8 others, what it is made of, and the spaces: all of a, w and h
MATRICES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Size]]] = {
    "identity": (lambda s, x: s.w + I8, [(8, ())]),
    "scaled and shifted": (lambda s, x: s.w + 2 * I8 + 0.3, [(8, ())]),
    "uneven": (lambda s, x: s.w + HALVES, [(4, ()), (4, ())]),
    "uneven in every entry": (lambda s, x: s.w + torch.diag(torch.arange(8.0)).double(), []),
    "vector": (lambda s, x: torch.diag(s.v), [(8, ())]),
    "scaled identity": (lambda s, x: I8 * s.v[:, None], [(8, ())]),
    "predicted vector": (lambda s, x: torch.diag_embed(s.b(x.mean(1))), [(8, ())]),
    "no diagonal": (lambda s, x: s.w * (1 - I8), [(8, ())]),
    "masked": (lambda s, x: s.w.masked_fill(I8.bool(), 0.5), [(8, ())]),
    "its own diagonal": (lambda s, x: s.w - torch.diag(s.w.diagonal()), [(8, ())]),
    "another diagonal": (lambda s, x: torch.where(I8.bool(), s.v[:, None].exp(), s.w), [(8, ())]),
    "attracted to itself": (lambda s, x: torch.softmax(s.w + 5 * I8, 1), [(8, ())]),
    "product": (lambda s, x: s.u.mT @ s.u + I8, [(8, ())]),
    "triangle": (lambda s, x: s.w * torch.ones(8, 8).tril(), []),
    "second diagonal": (lambda s, x: s.w + torch.diag(torch.ones(7), 1).double(), []),
    "turned": (lambda s, x: s.w + I8.flip(0), []),
}


def square(name: str) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h((s.a(x).tanh() @ MATRICES[name][0](s, x)).tanh())

    layers = {"a": nn.Linear(5, 8), "b": nn.Linear(5, 8), "h": nn.Linear(8, 3)}
    return Net(forward, **layers, w=parameter(8, 8), v=parameter(8), u=parameter(4, 8))


@pytest.mark.sweep
@pytest.mark.parametrize("name", MATRICES)
def test_square_matrices_with_a_diagonal(name: str) -> None:
    model, expected = square(name), MATRICES[name][1]
    assert sizes(model, data(6, 5)) == expected
    assert all(s.tied for s in zipfx.analyze(model, data(6, 5), verify=False))
    law1(model, 6, 5)
    law3(model, 6, 5, seeds=range(2))
    if expected:
        law3(model, 6, 5, seeds=[0], partial="a")


def test_an_identity_that_meets_the_input_colours_by_position() -> None:
    for matrix in (lambda s: torch.eye(5).double() * s.v, lambda s: s.w + torch.eye(5).double()):
        model = Net(lambda s, x, m=matrix: s.h((x @ m(s)).tanh()), h=nn.Linear(5, 3),
                    v=parameter(5), w=parameter(5, 5))  # fmt: skip
        assert sizes(model, data(6, 5)) == []


def test_a_diagonal_that_is_summed_is_its_vector() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h((s.a(x) + (I8 * s.v[:, None]).sum(1)).tanh())

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), v=parameter(8))
    assert sizes(model, data(6, 5)) == [(8, ())]
    law1(model, 6, 5)


# ------------------------------------------------------------------ kernels
def folded(norms: bool) -> Net:
    """Kernels of 3 x 3, of 1 x 1 and an identity, in one, as RepVGG makes at its end."""

    def forward(s: Any, x: Tensor) -> Tensor:
        kernel = F.pad(torch.eye(6, dtype=x.dtype).view(6, 6, 1, 1), (1, 1, 1, 1))
        if norms:
            scale = s.n.weight / (s.n.running_var + s.n.eps).sqrt()
            kernel = kernel * scale.reshape(-1, 1, 1, 1)
        kernel = kernel + s.k3 + F.pad(s.k1, (1, 1, 1, 1))
        return s.h(F.relu(F.conv2d(F.relu(s.a(x)), kernel, padding=1)).mean((2, 3)))

    weights = {"k3": parameter(6, 6, 3, 3), "k1": parameter(6, 6, 1, 1)}
    return Net(forward, a=nn.Conv2d(3, 6, 1), n=nn.BatchNorm2d(6), h=nn.Linear(6, 3), **weights)


@pytest.mark.parametrize("norms", [False, True])
def test_an_identity_in_the_middle_of_a_kernel(norms: bool) -> None:
    model = folded(norms)
    assert sizes(model, data(3, 5, 5)) == [(6, ())]
    law1(model, 3, 5, 5)
    law3(model, 3, 5, 5, seeds=range(2))
    law3(model, 3, 5, 5, seeds=[0], partial="a")


# ------------------------------------------------------------------ merges
def residual(fold: bool, seed: int) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).tanh()
        y = y @ (s.w + I8) if fold else y @ s.w + y
        return s.h(y.tanh())

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), w=parameter(8, 8))
    randomise(model, seed)
    return model


def by_number(statistics: Any, merged: int, *, across_only: bool = False) -> Matching:
    """A fixed matching, one to one."""
    return Matching(torch.cat([torch.arange(8), torch.arange(8).flip(0)]), (8, 8), merged)


def test_an_identity_in_a_weight_is_merged_as_the_residual_that_it_is() -> None:
    """The constant stays: M I U = I, as every merged feature has one feature of each model."""
    merged = [
        merge([residual(fold, 0), residual(fold, 1)], [(data(6, 5),)], matcher=by_number)
        for fold in (True, False)
    ]
    x = data(6, 5, seed=3)
    assert error(merged[0](x), merged[1](x)) < EXACT


@pytest.mark.parametrize("matcher", ["zip", "optimal", "kmeans", "weights", "permute"])
def test_tied_features_are_matched_one_to_one(matcher: str) -> None:
    heard: list[Any] = []

    def listening(statistics: Any, merged: int, *, across_only: bool = False) -> Any:
        heard.append(across_only)
        return zipfx.match.resolve(matcher)(statistics, merged, across_only=across_only)

    models = [residual(True, seed) for seed in (0, 1)]
    loader = [(data(6, 5, seed=i, batch=32),) for i in range(3)]
    if matcher != "weights":
        merge(models, loader, matcher=listening)
        assert heard == [True]
    report = merge(models, loader, matcher=matcher).meta["zipfx"]
    assert [(s.size, s.within) for s in report.spaces] == [(8, 0)]


# ------------------------------------------------------------------ what is not found
@pytest.mark.xfail(strict=True, reason="every group has its own columns only once it is convolved")
def test_an_identity_in_the_kernel_of_a_grouped_convolution() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        identity = torch.eye(3, dtype=x.dtype).repeat(2, 1).view(6, 3, 1, 1)
        kernel = s.w + F.pad(identity, (1, 1, 1, 1))
        return s.h(F.relu(F.conv2d(F.relu(s.a(x)), kernel, padding=1, groups=2)))

    ends = {"a": nn.Conv2d(3, 6, 1), "h": nn.Conv2d(6, 3, 1)}
    model = Net(forward, **ends, w=parameter(6, 3, 3, 3))
    law1(model, 3, 5, 5)
    assert sizes(model, data(3, 5, 5)) == [(2, ()), (6, (3, 3))]


@pytest.mark.xfail(strict=True, reason="what is overwritten has no feature: no diagonal is seen")
def test_a_diagonal_that_is_overwritten() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.a(x) @ s.w.clone().fill_diagonal_(0.0))

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), w=parameter(8, 8))
    law1(model, 6, 5)
    assert sizes(model, data(6, 5)) == [(8, ())]


# ------------------------------------------------- law 1: features of two blocks become one feature
def test_blocks_that_are_subtracted() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 3, 2, 4).tanh().sum(-1)
        return s.h(y[:, :, 0] - y[:, :, 1])

    law1(Net(forward, a=nn.Linear(5, 24), h=nn.Linear(3, 2)), 5)


def test_halves_of_blocks_are_multiplied() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 6, 4).tanh().sum(-1)
        return s.h(y[:, :3] * y[:, 3:])

    law1(Net(forward, a=nn.Linear(5, 24), h=nn.Linear(3, 2)), 5)


def test_grid_of_gates_that_alternate_on_one_axis() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        gates = s.g(x)
        y = s.a(x).view(-1, 3, 3).tanh()
        return s.h((y * gates[:, ::2, None] * gates[:, None, 1::2]).flatten(1))

    model = Net(forward, g=nn.Linear(5, 6), a=nn.Linear(5, 9), h=nn.Linear(9, 2))
    assert sizes(model, data(5)) == [(3, ()), (3, ())]


# ------------------------------------------------- law 1: the same features at several places
def test_mirrored_features_that_meet_alternating_constants() -> None:
    """Which of the two features that the mirror ties meets which constant is part of the tie."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        mirrored = (y.flip(1) + 0.5 * y) * torch.tensor([0.5, 1.5] * 4, dtype=y.dtype)
        return s.h(mirrored) + y @ s.w  # w comes first: it was numbered by position alone

    model = Net(forward, w=parameter(8, 3), a=nn.Linear(4, 8), h=nn.Linear(8, 3))
    law1(model, 4)
    assert sizes(model, data(4)) == [(4, ())]
