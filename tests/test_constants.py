"""Constants and weights that forward makes in several statements, each writing in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from laws import EXACT, error, merge, run
from torch import Tensor, nn

import zipfx

Make = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """y = c(b(a(x))), times what `make` makes of the output of a, before the last layer; early:
    also before b."""

    def __init__(self, make: Make, early: bool) -> None:
        super().__init__()
        self.make, self.early = make, early
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.h, self.w = nn.Linear(8, 3), nn.Parameter(torch.randn(8))

    def use(self, y: Tensor, made: Tensor) -> Tensor:
        if self.make is causal_mask:
            return ((y @ y.transpose(1, 2)) + made).softmax(-1) @ y
        return y * made

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        made = self.make(self, y)
        if self.early:
            y = self.use(y, made)
        y = F.relu(self.c(F.relu(self.b(y))))
        return self.h(self.use(y, made))


def causal_mask(net: Net, y: Tensor) -> Tensor:
    n = y.size(1)
    mask = torch.zeros(n, n)
    mask.fill_(-math.inf)
    mask.triu_(1)
    return mask


def doubled_ones(net: Net, y: Tensor) -> Tensor:
    ones = torch.ones_like(y)
    ones.mul_(2)
    return ones


def items(net: Net, y: Tensor) -> Tensor:
    m = y.new_zeros(y.shape[-1])
    m[2:5] = 1.0
    m[4:].add_(3)
    return m


def clamped_weight(net: Net, y: Tensor) -> Tensor:
    w = net.w * 2
    w.clamp_(min=0.1)
    return w


def part_of_a_weight(net: Net, y: Tensor) -> Tensor:
    w = net.w.clone()
    w[3:].mul_(0.5)
    return w


def copied_weight(net: Net, y: Tensor) -> Tensor:
    m = torch.empty_like(y)
    m.copy_(net.w)
    m.masked_fill_(m > 0.5, 3.0)
    return m


def out_argument(net: Net, y: Tensor) -> Tensor:
    m = torch.zeros(y.shape[-1])
    torch.add(m, 1, out=m)
    m.index_fill_(0, torch.tensor([1, 2]), 5.0)
    return m


def views_of_views(net: Net, y: Tensor) -> Tensor:
    m = torch.zeros_like(y)
    v = m[..., 2:]
    m.add_(1)
    v.mul_(3)
    u = v[..., 1:]
    m.sub_(0.5)
    return u.sum() + m


def listed(net: Net, y: Tensor) -> Tensor:
    m = [torch.zeros(1) for _ in range(2)]
    m[0].add_(2)
    m[1].fill_(3)
    return m[0] * m[1]


MAKERS = [
    causal_mask, doubled_ones, items, clamped_weight, part_of_a_weight, copied_weight, out_argument,
    views_of_views, listed,
]  # fmt: skip


@pytest.mark.parametrize("cut", [None, "a", "b", "c", "h"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_every_statement_reaches_the_result(make: Make, early: bool, cut: str | None) -> None:
    """Used in the trunk, in the heads, or in both."""
    torch.manual_seed(0)
    model = Net(make, early).double().eval()
    data = [torch.randn(8, 4, 4, dtype=torch.float64) for _ in range(10)]
    spaces = zipfx.analyze(model, data[0])
    twin = spaces.permuted(model, spaces.random_permutations(1))
    expected = run(model, data[:1])
    for other in (model, twin):
        merged = merge([model, other], [(x,) for x in data], partial=cut, matcher="permute")
        outputs = run(merged, data[:1])
        for output in (outputs,) if cut is None else outputs:
            assert error(expected, output) < EXACT


def test_what_only_a_head_uses_is_not_in_the_trunk() -> None:
    model = Net(doubled_ones, early=False).eval()
    merged = merge([model, model], [(torch.randn(8, 4, 4),)], partial="c", matcher="identity")
    made = [node.name for node in merged.graph.nodes if "ones" in node.name]
    assert made == ["head0_ones_like", "head1_ones_like"]
