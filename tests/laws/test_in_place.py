"""Values that are written in place and read again by their old name, whole and across every cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, run


class Parts(nn.Module):
    """Layers a (5 -> 8), b (5 -> 4), n (8 -> 4), c (8 -> 6), h (6 -> 3), two marks to cut at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(5, 8), nn.Linear(5, 4), nn.Linear(8, 4)
        self.c, self.h = nn.Linear(8, 6), nn.Linear(6, 3)
        self.early, self.mark = nn.Identity(), nn.Identity()

    def end(self, y: Tensor) -> Tensor:
        return self.h(torch.relu(self.c(y)))


class Collected(Parts):
    """Zeros are filled with features of two spaces."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 8, dtype=x.dtype)
        v = self.early(torch.tanh(self.b(x)))
        y[:, :4] = torch.relu(self.n(torch.relu(self.a(x))))
        y[:, 4:] = v
        return self.end(y) + self.mark(v * 1).sum(1, keepdim=True)


class Replaced(Parts):
    """Half of the features make room for others."""

    def forward(self, x: Tensor) -> Tensor:
        y, v = self.early(self.a(x)), torch.relu(self.b(x))
        y[:, :4] = v
        return self.end(torch.relu(y)) + self.mark(v).sum(1, keepdim=True)


class InHead(Parts):
    """After the cut: items of what the trunk hands over, and of what the head makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.mark(torch.relu(self.a(x)))
        y = torch.tanh(t)
        y[:, :4] = torch.sigmoid(y[:, :4])
        t[:, 4:] = t[:, 4:] + self.n(t)
        z = torch.zeros_like(y)
        z[:, :] = torch.cos(t)
        return self.end(y + z)


class Weights(Parts):
    """Weights and constants with items of their own, used on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight.clone()
        w[:, 0] = w[:, 0] * 2
        k = torch.zeros(3, dtype=x.dtype)
        k[0] = 3
        y = self.mark(torch.relu(F.linear(x, w)))
        return self.end(y) + F.linear(x, w).sum(1, keepdim=True) + k


class Windows(Parts):
    """No items, but in-place operations on views: the old names see them as well."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.early(self.a(x))
        t[:, :4].sigmoid_()
        u = torch.relu(self.mark(t))
        u.view(-1, 8).mul_(self.n.weight[0])
        return self.end(u)


class Added(Parts):
    """`+=` and `*=` write to a value that another name still reads; to torch.fx they do not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.early(torch.relu(self.a(x)))
        old = y
        y += torch.tanh(self.mark(y))
        rows = old.view(-1, 8)
        rows *= 2
        return self.end(y * old)


CUTS: dict[type[Parts], list[str | None]] = {
    Collected: [None, "a", "b", "early", "n", "mark", "c"],
    Replaced: [None, "a", "early", "b", "mark", "c"],
    InHead: [None, "a", "mark", "n", "c"],
    Weights: [None, "mark", "c"],
    Windows: [None, "a", "early", "mark", "c"],
    Added: [None, "a", "early", "mark", "c"],
}


@pytest.mark.sweep
@pytest.mark.parametrize(("net", "cut"), [(net, cut) for net, cuts in CUTS.items() for cut in cuts])
def test_a_permuted_copy_zips_to_the_model(net: type[Parts], cut: str | None) -> None:
    torch.manual_seed(0)
    model = net().double()
    inputs = (torch.randn(7, 5).double(),)
    spaces = zipfx.analyze(model, inputs)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    data = [torch.randn(64, 5).double() for _ in range(4)]
    expected = run(model, inputs)
    assert error(expected, run(twin, inputs)) < EXACT
    merged = merge([model, twin], data, partial=cut, matcher="permute")
    outputs = run(merged, inputs)
    for output in (outputs,) if cut is None else outputs:
        assert error(expected, output) < EXACT
    assert not any("numeric check" in p.reason for p in merged.meta["zipfx"].pinned)


def test_a_head_alone_keeps_the_assignments() -> None:
    models = [InHead().double() for _ in range(2)]
    merged = merge(models, [torch.randn(64, 5).double()], partial="mark")
    x = (torch.randn(7, 5).double(),)
    for k in range(2):
        assert error(run(merged, x)[k], run(zipfx.head(merged, k), x)) == 0
