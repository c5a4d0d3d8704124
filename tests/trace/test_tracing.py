from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import zipfx
from tests.helpers.given import Odd
from tests.helpers.laws import error, run, unharmed
from tests.helpers.models import NETS, Net
from zipfx.trace.record import record_of
from zipfx.trace.tracing import trace

all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


@pytest.mark.sweep
@all_nets
def test_a_traced_model_computes_the_same_with_the_same_parameters(net: Net) -> None:
    model = net.build()
    traced = unharmed([model], lambda: trace(model))
    assert error(run(model, net.inputs(3)), run(traced, net.inputs(3))) == 0
    names = dict(model.named_parameters())
    assert all(names[name] is p for name, p in traced.named_parameters())


@pytest.mark.parametrize("name", ["BufferScale", "BufferAlone", "BufferPosition"])
def test_buffers_stay_nodes_and_are_copies(name: str) -> None:
    model = NETS[name].build()
    traced = trace(model)
    buffers = dict(model.named_buffers())
    assert {n.target for n in traced.graph.nodes if n.op == "get_attr"} == set(buffers)
    for key, buffer in traced.named_buffers():
        assert torch.equal(buffer, buffers[key])
        assert buffer.data_ptr() != buffers[key].data_ptr()


def test_modes_are_those_of_evaluation_and_hooks_do_not_run() -> None:
    def hook(*_: Any) -> None:
        raise AssertionError("a hook of the caller ran")

    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[0].register_forward_hook(hook)
    traced = unharmed([model], lambda: trace(model))
    x = torch.randn(4, 3)
    assert torch.equal(traced(x), traced(x))
    assert not any(m.training for m in traced.modules())


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 50)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.5, self.training)


def test_functional_dropout_is_off_whatever_the_mode_of_the_caller() -> None:
    model = FunctionalDropout().train()
    x = torch.randn(2, 4)
    assert torch.equal(trace(model)(x), model.eval()(x))


@pytest.mark.slow
def test_long_chains_are_traced_and_analysed() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            for _ in range(1500):
                y = torch.relu(y)
            return self.h(y)

    assert [s.size for s in zipfx.analyze(Chain(), torch.randn(2, 3), verify=False)] == [4]


@pytest.mark.parametrize("old", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_computed_in_hooks_are_refused(old: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(old(nn.Linear(3, 4)), nn.Linear(4, 2))
    with pytest.raises(
        zipfx.ZipError, match=r"module '0' computes its weight in a hook .*parametrizations"
    ):
        trace(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_refused_unless_they_have_no_weights() -> None:
    plain, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    model = nn.Sequential(torch.jit.script(plain), nn.Linear(4, 2))
    with pytest.raises(zipfx.ZipError, match=r"module '0' .* was compiled by torch.jit .* zip the"):
        zipfx.analyze(model, x)
    model = nn.Sequential(plain[0], torch.jit.script(plain[1]), nn.Linear(4, 2))
    assert [s.size for s in zipfx.analyze(model, x)] == [4]


def test_parametrizations_are_followed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    (space,) = zipfx.analyze(model.double(), torch.randn(5, 3).double())
    assert {axis.parameter for axis in space.axes} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
        "0.bias",
        "2.weight",
    }


# ------------------------------------------------------------------ other fronts
def test_a_graph_module_keeps_its_order_and_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    mine = fx.symbolic_trace(model)
    for i, node in enumerate(mine.graph.nodes):
        if node.op != "output":
            node.name = f"mine_{i}"
    mine.graph.eliminate_dead_code()
    mine.recompile()
    traced = trace(mine, inputs=(torch.randn(5, 3),))
    assert [n.name for n in traced.graph.nodes] == [n.name for n in mine.graph.nodes]
    assert traced.graph is not mine.graph
    assert all(dict(mine.named_parameters())[n] is p for n, p in traced.named_parameters())
    twin = copy.deepcopy(mine)
    merged = zipfx.zip([mine, twin], [torch.randn(8, 3)], partial="0", progress=False)
    assert [n.name for n in merged.graph.nodes][:2] == ["mine_0", "mine_1"]


def test_a_graph_module_from_a_file_can_be_cut_anywhere() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2))
    mine = pickle.loads(pickle.dumps(fx.symbolic_trace(model)))
    x = torch.randn(8, 3)
    merged = zipfx.zip([mine, copy.deepcopy(mine)], [x], partial="0", progress=False)
    assert error(run(mine, (x,)), run(merged, (x,))[0]) < 1e-5


def test_a_merged_model_is_a_model() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    x = torch.randn(8, 3)
    pairs = [zipfx.zip([net(), net()], [x], progress=False) for _ in range(2)]
    assert zipfx.zip(pairs, [x], progress=False)(x).shape == (8, 2)


@pytest.mark.parametrize("inputs", [None, (torch.randn(2, 3),)], ids=["symbolic", "example"])
def test_an_error_names_the_module_and_the_line(inputs: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), Odd()))
    says = (
        r"can not trace Sequential in module '1\.1' at .*given\.py:\d+ "
        r"\(return x \* 2 if x\.sum\(\) > 0 else x\): .* torch\.fx\.wrap, .*a leaf "
        r".*\(tracer=\.\.\.\), or zip a smaller module"
    )
    with pytest.raises(zipfx.ZipError, match=says):
        trace(model, inputs=inputs)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Frozen(torch.autograd.Function):
    """Another one, whose forward is decorated as forwards of models may be."""

    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@fx.wrap
def sign(x: Tensor) -> Tensor:
    found: Tensor = Sign.apply(x)
    return found


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(3, 4), Sign.apply

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(self.a(x))
        return found


class Wrapped(Binary):
    def forward(self, x: Tensor) -> Tensor:
        return sign(self.a(x))


def test_a_backward_that_is_lost_is_noted() -> None:
    (note,) = record_of(trace(Binary())).notes
    assert "the backward of Sign is not part of the result" in note
    (note,) = record_of(trace(Binary(), inputs=[torch.randn(2, 3)])).notes
    assert "marked with torch.fx.wrap" in note
    assert record_of(trace(Decorated())).notes == ()
    kept = trace(Wrapped())
    assert record_of(kept).notes == ()
    kept(torch.randn(2, 3)).sum().backward()
    assert kept.a.weight.grad is not None
    assert kept.a.weight.grad.any()
