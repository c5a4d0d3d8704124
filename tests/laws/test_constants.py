"""Constants and weights that forward makes in several statements, each writing in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, run

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


@pytest.mark.sweep
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


class Initial(nn.Module):
    """Makes what operations want that take one dtype only: of the default dtype, with no word of
    the weights' or the input's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.h = how, nn.Linear(4, 8), nn.Linear(8, 3)
        self.g = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        if self.how == "state":
            y = self.g(y, torch.zeros(1, x.shape[0], 8))[0]
        elif self.how == "eye":
            y = y @ torch.eye(8)
        elif self.how == "weight":
            return F.linear(self.h(y), torch.full((2, 3), 0.5))
        elif self.how == "einsum":
            y = torch.einsum("btc,ts->bsc", y, torch.ones(4, 4).tril())
        return self.h(y)


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["state", "eye", "weight", "einsum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_the_default_dtype(how: str, dtype: torch.dtype) -> None:
    """The check of the analysis runs in float64, whatever forward makes."""
    torch.manual_seed(0)
    model, x = Initial(how).eval(), torch.randn(8, 4, 4)
    with _default(dtype):
        model, x = model.to(dtype), x.to(dtype)
        spaces = zipfx.analyze(model, x)
        assert len(spaces) >= (how != "eye")
        twin = spaces.permuted(model, spaces.random_permutations(1))
        merged = merge([model, twin], [(x,)] * 20, matcher="permute", repair="none")
        assert error(run(model, [x]), run(merged, [x])) < 1e-5


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.library.custom_op("tests::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.relu()


@single.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_does_not_run_in_float64() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.h(torch.sigmoid(self.a(x))) + single(x).sum()
            return found

    models = [Odd().eval(), Odd().eval()]
    notes = zipfx.zip(models, [torch.randn(4, 4)], progress=False).meta["zipfx"].notes
    (note,) = [n for n in notes if n.startswith("checked in its own dtype")]
    assert "float32 only" in note
