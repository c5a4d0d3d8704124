from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import error, run, unharmed
from models import NETS, Net
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import zipfx
from zipfx.trace import trace

all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


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


def test_parametrizations_are_followed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    (space,) = zipfx.analyze(model.double(), torch.randn(5, 3).double())
    assert {axis.parameter for axis in space.axes} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
        "0.bias",
        "2.weight",
    }


def test_a_tracer_of_your_own_can_hold_leaves() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, Odd) or super().is_leaf_module(m, name)

    model = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2))
    with pytest.raises(zipfx.ZipError, match="can not trace"):
        trace(model)
    assert [n.op for n in trace(model, Leaves()).graph.nodes].count("call_module") == 3


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> NoCopy:
        raise TypeError("never")


def test_a_model_that_can_not_be_copied() -> None:
    with pytest.raises(zipfx.ZipError, match=r"the NoCopy can not be copied \(never\)"):
        trace(NoCopy(2, 2))
