"""Products with parameters are refitted as the linear layers that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error, merge, permuted, run
from zipfx.repair.exposed.products import layer_of_product
from zipfx.repair.exposed.splice import title
from zipfx.repair.exposed.unfold import unfold
from zipfx.trace.tracing import trace

WIDTH, TOKENS = 12, 5


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def addmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As `Conv1D` of GPT-2."""
    flat = torch.addmm(b, x.view(-1, x.size(-1)), w)
    return flat.view((*x.size()[:-1], w.size(-1)))


def turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As Falcon has it."""
    return x @ w.T + b


def matmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(x, w)


def summed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bsc,co->bso", x, w) + b


def summed_turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("oc,...c->...o", w, x)


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    flat = torch.addmm(b, x.reshape(-1, x.size(-1)), w, alpha=2)
    return flat.view((*x.size()[:-1], w.size(-1)))


class Net(nn.Module):
    """A stream to which a product is added."""

    def __init__(self, function: Any, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.function = [function]
        self.inp, self.h = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        up, down = torch.randn(WIDTH, 20) / 3, torch.randn(20, WIDTH) / 3
        if function in (turned, summed_turned):
            up, down = up.T.contiguous(), down.T.contiguous()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.of_up = nn.Parameter(torch.randn(20))
        self.of_down = nn.Parameter(torch.randn(WIDTH))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        (function,) = self.function
        y = self.inp(x).tanh()
        y = y + function(function(y, self.up, self.of_up).relu(), self.down, self.of_down)
        z: Tensor = self.h(y)
        return z


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, TOKENS, 4, generator=generator).double() for _ in range(count)]


fronts = pytest.mark.parametrize("front", ["symbolic", "export"])


@fronts
@pytest.mark.parametrize("function", [product, addmm, matmul, turned, summed, summed_turned])
def test_they_are_layers_and_the_graph_computes_the_same(function: Any, front: str) -> None:
    model = Net(function)
    module = trace(model, inputs=(data()[0],), front=front)  # type: ignore[arg-type]
    wide = unfold(module, [data()[0]])
    layers = [title(n) for n in wide.graph.nodes if n.op == "call_module"]
    assert layers == ["inp", "up", "down", "h"]
    assert error(model(data()[0]), wide(data()[0])) < 1e-12
    made = {title(n): wide.get_submodule(str(n.target)) for n in wide.graph.nodes
            if n.op == "call_module"}  # fmt: skip
    assert made["up"].weight.data_ptr() == model.up.data_ptr()  # type: ignore[operator]


@pytest.mark.sweep
@fronts
@pytest.mark.parametrize("function", [product, addmm, matmul, turned, summed, summed_turned])
def test_they_get_better(function: Any, front: str) -> None:
    models = [Net(function, seed) for seed in (0, 1)]
    before, after = (merge(models, data(), matcher="permute", repair=r, front=front)
                     for r in ("none", "refit"))  # fmt: skip
    refits = {r.name: r for r in after.meta["zipfx"].refits}
    assert set(refits) == {"inp", "up", "down", "h"}
    assert refits["up"].changed == 20
    assert refits["down"].changed == WIDTH
    (x,) = data(1)
    wanted = sum(m(x) for m in models) / 2
    assert error(wanted, run(after, (x,))) < 0.5 * error(wanted, run(before, (x,)))


@pytest.mark.sweep
@fronts
@pytest.mark.parametrize("partial", [None, "inp"])
@pytest.mark.parametrize("function", [product, addmm, matmul, turned, summed, summed_turned])
def test_law_3_nothing_changes_where_the_merge_is_exact(
    function: Any, partial: str | None, front: str
) -> None:
    model, (x, *_) = Net(function), data()
    pair = [model, permuted(model, (x,))]
    merged = merge(pair, data(), matcher="permute", repair="refit", partial=partial, front=front)
    found = run(merged, (x,))
    for y in found if partial else [found]:
        assert error(model(x), y) < 1e-9


def test_a_scaled_product_is_left_alone_and_said() -> None:
    merged = merge([Net(scaled, s) for s in (0, 1)], data(), matcher="permute", repair="refit")
    report: zipfx.Report = merged.meta["zipfx"]
    assert {r.name for r in report.refits} == {"inp", "h"}
    (note,) = [n for n in report.notes if n.startswith("not refitted: ")]
    assert "up" in note


def test_a_weight_that_is_used_twice_is_left_alone() -> None:
    def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w + x @ w.tanh()

    merged = merge([Net(twice, s) for s in (0, 1)], data(), matcher="permute", repair="refit")
    assert {r.name for r in merged.meta["zipfx"].refits} == {"inp", "h"}


def test_the_layer_lies_on_the_memory_of_the_weight() -> None:
    weight, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    layer, x = layer_of_product(weight, bias), torch.randn(2, 3)
    assert torch.allclose(layer(x), x @ weight + bias)
    layer.weight.data.zero_()
    assert not weight.any()
