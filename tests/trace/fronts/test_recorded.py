"""What the tracers of torch.fx record, and what is left of a forward that sets attributes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers.given import Given as Asking
from tests.helpers.given import Odd
from tests.helpers.laws import error, merge, permuted, run
from zipfx import ZipError
from zipfx.trace.fronts.by_example import ExampleTracer
from zipfx.trace.fronts.front import Given
from zipfx.trace.fronts.recorded import recorded, tracers
from zipfx.trace.fronts.symbolic import Tracer
from zipfx.trace.record import record_of
from zipfx.trace.tracing import given_of, trace

X = torch.randn(2, 4)


def test_the_symbolic_tracer_comes_first_then_those_that_know_examples() -> None:
    model = nn.Linear(4, 4)
    made = [make() for make in tracers(model, given_of(model, (X,)))]
    assert [type(t) for t in made] == [Tracer, ExampleTracer, ExampleTracer]
    assert [getattr(t, "writes", None) for t in made] == [None, False, True]
    layer = nn.TransformerEncoderLayer(4, 2)
    inside = [make() for make in tracers(layer, Given([X], given_of(layer, (X,)).arguments[:1]))]
    assert isinstance(inside[0], ExampleTracer)
    assert inside[0].opened


def test_attributes_that_forward_sets_are_put_back_and_told() -> None:
    class Sets(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            self.seen = True
            return x + 1

    model = Sets()
    module = recorded(model, Tracer(), Given())
    assert model.last is None
    assert not hasattr(model, "seen")
    record = record_of(module)
    assert sorted(record.sets) == ["last", "seen"]
    assert record.notes == ("forward sets last, seen, which the result does not",)


def test_tensors_that_forward_writes_down_are_constants() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tensor([1.0, 2.0, 3.0, 4.0])

    module = recorded(Written(), Tracer(), Given())
    (name,) = record_of(module).constants
    assert module.get_buffer(name).tolist() == [1, 2, 3, 4]
    assert module.state_dict() == {}


def test_what_can_not_be_traced_is_named_with_its_line_and_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Odd())
    says = r"can not trace Sequential in module '1' at .*given.py:\d+ \(return x \* 2 if x.sum"
    with pytest.raises(ZipError, match=says):
        recorded(model, Tracer(), Given())


def test_a_tracer_of_fx_does_as_well() -> None:
    model = Asking(lambda m, x: m.net(x) * m.scale)
    module = recorded(model, fx.Tracer(), Given())
    mask = torch.rand(2, 4)
    assert torch.equal(module(X, mask), model(X, mask))


# ------------------------------------------------------------------ what timm keeps whole
class Scaled(nn.Module):
    """Convolutions with computed kernels, one of groups, as in timm's norm-free networks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, torch.tanh(self.a.weight), self.a.bias).relu()
        y = nn.functional.conv2d(y, torch.tanh(self.b.weight), self.b.bias, padding=1, groups=2)
        y.mul_(self.gain)
        return y.sigmoid()


class Sized(nn.Module):
    """Branches on the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return nn.functional.pad(y, (0, 1)) if x.shape[-1] % 2 else y


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.SimpleNamespace(
        get_notrace_modules=lambda: [Scaled, Sized, Odd], get_notrace_functions=list
    )
    monkeypatch.setitem(sys.modules, "timm.models._features_fx", registry)


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 1), Scaled(), nn.Conv2d(8, 2, 1)).double().eval()


def images(count: int = 8, size: int = 5) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


@pytest.mark.usefixtures("marked")
def test_what_timm_keeps_whole_is_looked_into_where_it_holds_others() -> None:
    model = scaled()
    traced = trace(model, inputs=(images(),))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "2"]
    for other in (images(), images(3, 7)):
        assert error(run(model, (other,)), run(traced, (other,))) < 1e-15
    whole = nn.Sequential(nn.Linear(3, 4), Odd())
    assert [n.name for n in trace(whole, inputs=(X[:, :3],)).graph.nodes][1:3] == ["_0", "_1"]


@pytest.mark.usefixtures("marked")
def test_law_3_holds_inside_of_what_timm_keeps_whole() -> None:
    model, data = scaled(), [(images(),)]
    twin = permuted(model, data[0])
    merged = merge([model, twin], data, matcher="permute")
    assert error(run(model, data[0]), run(merged, data[0])) < 1e-12
    assert not any("inside one node" in note for note in merged.meta["zipfx"].notes)


@pytest.mark.usefixtures("marked")
def test_it_stays_whole_where_its_graph_would_hold_for_some_sizes_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Sized(), nn.Conv2d(8, 2, 1)).double().eval()
    traced = trace(model, inputs=(images(),))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    assert record_of(traced).notes == ()
    even = (images(2, 4),)
    assert error(run(model, even), run(traced, even)) == 0
