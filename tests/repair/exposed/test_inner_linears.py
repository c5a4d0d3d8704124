"""Opaque: layers inside functions are refitted, or left alone where that could go wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.laws import error, merge, permuted, run

WIDTH = 12


class Around(nn.Module):
    """Something between layers, with two more layers' weights to use."""

    def __init__(self, inner: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.p, self.q = (nn.Linear(n, WIDTH) for n in (5, WIDTH, WIDTH))
        self.one, self.up = nn.Parameter(torch.randn(1)), nn.Linear(WIDTH, 16)
        self.h, self.inner = nn.Linear(16, 3), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self, torch.tanh(self.a(x)))
        made: Tensor = self.h(torch.relu(self.up(y)).mean(1))
        return made


def models(inner: Callable[[Any, Tensor], Tensor], count: int = 2) -> list[nn.Module]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(Around(inner).double().eval())
    return made


def data(batches: int = 12, seed: int = 9) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches, 8, 6, 5, generator=generator, dtype=torch.float64)
    return [(batch,) for batch in x]


# ------------------------------------------------------------------ functions
@fx.wrap
def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.tanh(F.linear(x, w, b))


@fx.wrap
def writing(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    h = F.linear(x, w, b).relu_()
    return x.add_(F.linear(h, bias=c, weight=v))


@fx.wrap
def ordered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Calls its layers in another order where there are few."""
    if len(x) < 4:
        first = F.linear(x, w)
        return F.linear(torch.tanh(x), v) + first
    first = F.linear(torch.tanh(x), v)
    return F.linear(x, w) + first


@fx.wrap
def nested(xs: list[Tensor], more: dict[str, Tensor], w: Tensor, b: Tensor) -> Any:
    y = F.linear(xs[0], w, b)
    return y + xs[1], {"scaled": y * more["by"]}


def of_nested(m: Any, y: Tensor) -> Tensor:
    first, others = nested([y, y * 2], {"by": y}, m.p.weight, m.p.bias)
    made: Tensor = first + others["scaled"]
    return made


@fx.wrap
def and_back(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w)) @ w


@fx.wrap
def by_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b) / w.norm()


@fx.wrap
def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, w, b)), w, b)


def passing(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any) -> Any:
        return function(*args)

    return called


@fx.wrap
@passing
def decorated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


@fx.wrap
def mapped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    made: Tensor = torch.vmap(lambda row: torch.tanh(F.linear(row, w, b)))(x)
    return made


@fx.wrap
def careful(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    try:
        return F.linear(x, w, b)
    except Exception:
        return x * 0


@fx.wrap
def one_row(x: Tensor, w: Tensor) -> Tensor:
    return x + F.linear(x, w).unsqueeze(-1)


@fx.wrap
def random(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.dropout(F.linear(x, w), 0.3, True), v)


@fx.wrap
def in_chunks(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([F.linear(part, w, b) for part in x.split(4)])


Case = tuple[Callable[[Any, Tensor], Tensor], set[str]]
#: what is between the layers, and which layers in it are refitted
CASES: dict[str, Case] = {
    "plain": (lambda m, y: plain(y, m.p.weight, m.p.bias), {"p"}),
    "writes": (
        lambda m, y: writing(y * 1, m.p.weight, m.p.bias, m.q.weight, m.q.bias),
        {"p", "q"},
    ),
    "one bias twice": (
        lambda m, y: writing(y * 1, m.p.weight, m.p.bias, m.q.weight, m.p.bias),
        set(),
    ),
    "order": (lambda m, y: ordered(y, m.p.weight, m.q.weight), {"p", "q"}),
    "nested": (of_nested, {"p"}),
    "except": (lambda m, y: careful(y, m.p.weight, m.p.bias), {"p"}),
    "shares a weight": (
        lambda m, y: F.linear(plain(y, m.p.weight, m.p.bias), m.p.weight),
        set(),
    ),
    "two functions": (lambda m, y: plain(plain(y, m.p.weight, m.p.bias), m.p.weight), set()),
    "function and module": (lambda m, y: m.p(plain(y, m.p.weight)), set()),
    "transposed": (lambda m, y: and_back(y, m.p.weight), set()),
    "norm of it": (lambda m, y: by_norm(y, m.p.weight, m.p.bias), set()),
    "twice": (lambda m, y: twice(y, m.p.weight, m.p.bias), set()),
    "no names": (lambda m, y: decorated(y, m.p.weight, m.p.bias), set()),
    "vmap": (lambda m, y: mapped(y, m.p.weight, m.p.bias), set()),
    "one row": (lambda m, y: one_row(y, m.p.bias), set()),
    "one bias": (lambda m, y: plain(y, m.p.weight, m.one), {"p"}),
    "one row, not wrapped": (lambda m, y: y + F.linear(y, m.p.bias).unsqueeze(-1), set()),
    "one bias, not wrapped": (lambda m, y: F.linear(y, m.p.weight, m.one), set()),
}
cases = pytest.mark.parametrize(("inner", "layers"), CASES.values(), ids=CASES)


@pytest.mark.sweep
@cases
@pytest.mark.parametrize("cut", [None, "a", "up"])
def test_law_3_nothing_changes_where_the_merge_is_exact(
    inner: Any, layers: set[str], cut: str | None
) -> None:
    (model,) = models(inner, 1)
    pair = [model, permuted(model, data()[0])]
    merged = merge(pair, data(), matcher="permute", repair="refit", partial=cut)
    wanted, found = run(model, data()[0]), run(merged, data()[0])
    for one in found if cut else [found]:
        assert error(wanted, one) < 1e-9


@pytest.mark.sweep
@cases
def test_layers_are_refitted_or_left_alone(inner: Any, layers: set[str]) -> None:
    pair = models(inner)
    before, after = (merge(pair, data(), matcher="permute", repair=r) for r in ("none", "refit"))
    refits = {r.name: r for r in after.meta["zipfx"].refits}
    assert set(refits) == {"a", "up", "h"} | layers
    assert all(refits[name].changed == WIDTH for name in layers)
    assert list(before.state_dict()) == list(after.state_dict())
    wanted = sum(run(m, *data(1, 5)) for m in pair) / 2
    assert error(wanted, run(after, *data(1, 5))) < error(wanted, run(before, *data(1, 5)))


def test_what_is_random_stays_one_node() -> None:
    pair = models(lambda m, y: random(y, m.p.weight, m.q.weight))
    merged = merge(pair, data(), matcher="permute", repair="refit", verify=False)
    assert [r.name for r in merged.meta["zipfx"].refits] == ["a", "up", "h"]


def test_a_function_that_calls_a_layer_more_often_than_with_the_examples() -> None:
    pair = models(lambda m, y: in_chunks(y, m.p.weight, m.p.bias))
    message = "in_chunks does not call F.linear here as on example_inputs; pass example_inputs"
    with pytest.raises(zipfx.ZipError, match=f"fails on a calibration batch: {message}"):
        merge(pair, data(), matcher="permute", repair="refit")
    merged = merge(pair, data(), matcher="permute", repair="refit", example_inputs=data(1)[0])
    assert "p" not in [r.name for r in merged.meta["zipfx"].refits]
