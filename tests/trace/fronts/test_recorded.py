"""What the tracers of torch.fx record, and what is left of a forward that sets attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers.given import Given as Asking
from tests.helpers.given import Odd
from zipfx import ZipError
from zipfx.trace.fronts.by_example import ExampleTracer
from zipfx.trace.fronts.front import Given
from zipfx.trace.fronts.recorded import recorded, tracers
from zipfx.trace.fronts.symbolic import Tracer
from zipfx.trace.record import record_of
from zipfx.trace.tracing import given_of

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
