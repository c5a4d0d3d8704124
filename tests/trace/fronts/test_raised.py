"""Layers of torch come back from aten calls where these give what the layer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error
from zipfx.trace.fronts.written import CALL
from zipfx.trace.tracing import trace

X = torch.randn(3, 6, 8)


class Net(nn.Module):
    """forward is a function of (module, x)."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = [function]
        for name, part in parts.items():
            self.add_module(name, part)
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.function[0](self, x)


def called(function: Any, x: Tensor = X, **parts: nn.Module) -> list[str]:
    """The modules that are called in the graph that torch.export gives."""
    model = Net(function, **parts)
    module = trace(model, inputs=(x,), front="export")
    assert error(model(x), module(x)) < 1e-5
    assert not any(CALL in n.meta for n in module.graph.nodes)
    return [str(n.target) for n in module.graph.nodes if n.op == "call_module"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(8, 4),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv1d(6, 4, 3, padding=1),
        nn.BatchNorm1d(6),
        nn.GroupNorm(2, 6),
        nn.ConvTranspose1d(6, 4, 3, stride=2),
        nn.AdaptiveAvgPool1d(2),
        nn.Softmax(-1),
        nn.PReLU(6),
        nn.Hardswish(inplace=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_come_back(layer: nn.Module) -> None:
    assert called(lambda m, x: m.a(x * 2).abs(), a=layer) == ["a"]


def test_those_with_several_results_too() -> None:
    def recurrent(m: Any, x: Tensor) -> Tensor:
        y, (h, c) = m.a(x)
        return y.sum(1) + h[-1] + c.mean(0)

    assert called(recurrent, a=nn.LSTM(8, 5, batch_first=True)) == ["a"]
    assert called(lambda m, x: m.a(x)[1][0], a=nn.GRU(8, 5)) == ["a"]
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    assert called(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention) == ["a"]


def test_one_that_is_called_twice_comes_back_twice() -> None:
    assert called(lambda m, x: m.a(m.r(m.a(m.r(x)))), a=nn.Linear(8, 8), r=nn.ReLU()) == [
        "r", "a", "r", "a",
    ]  # fmt: skip


def test_those_inside_of_others_do() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert called(lambda m, x: m.a(x), a=layer) == [
        "a.self_attn", "a.dropout1", "a.norm1", "a.linear1", "a.dropout", "a.linear2",
        "a.dropout2", "a.norm2",
    ]  # fmt: skip


def test_the_graph_is_that_of_torch_fx() -> None:
    model = torchvision.models.resnet18(num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    graphs = [trace(model, inputs=(x,), front=front) for front in ("symbolic", "export")]
    found = [[str(n.target) for n in g.graph.nodes if n.op == "call_module"] for g in graphs]
    assert found[0] == found[1]


def test_what_a_module_is_given_otherwise_stays_aten_calls() -> None:
    """Its graph is right for other inputs as well: what is not the same is not put in its place."""
    deconvolution = nn.ConvTranspose1d(6, 4, 3, stride=2)
    assert called(lambda m, x: m.a(x, output_size=[18]), a=deconvolution) == []
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    assert called(lambda m, x: m.a(x, x * 2, x, need_weights=False)[0], a=attention) == []
    mask = torch.ones(6, 6).triu(1).bool()
    masked = called(lambda m, x: m.a(x, x, x, attn_mask=mask, need_weights=False)[0], a=attention)
    assert masked == []


def test_state_that_a_layer_is_given_is_not_dropped_even_if_it_is_zero_now() -> None:
    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h0 = nn.GRU(8, 5), nn.Parameter(torch.zeros(1, 6, 5))
            self.eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x, self.h0)[0]

    module = trace(Start(), inputs=(X,), front="export")
    assert any(n.op == "get_attr" and n.target == "h0" for n in module.graph.nodes)


def test_modules_of_others_are_looked_into() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * 2, self.bias)

    assert called(lambda m, x: m.a(x), a=Own(8, 4)) == []
    assert called(lambda m, x: m.a(x), a=nn.Sequential(Own(8, 4), nn.ReLU())) == ["a.1"]


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "bn", "affine", "refit"])
def test_the_merge_is_the_same_through_either_front(repair: str) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(torchvision.models.resnet18(num_classes=3).eval())
    data = [torch.randn(8, 3, 32, 32) for _ in range(2)]
    one, two = (zipfx.zip(models, data, front=f, repair=repair, progress=False)
                for f in ("symbolic", "export"))  # fmt: skip
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    reports = [m.meta["zipfx"] for m in (one, two)]
    assert reports[0].refits == reports[1].refits
    assert reports[0].spaces == reports[1].spaces
