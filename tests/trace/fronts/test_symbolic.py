"""Tracers: leaves of one's own, wrapped functions, and those that libraries register."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.given import ROWS, Given, Leaves, Odd, Plain, plain
from tests.helpers.laws import error, run
from zipfx.trace.tracing import trace


def test_a_tracer_of_your_own_can_hold_leaves() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2))
    with pytest.raises(zipfx.ZipError, match="can not trace"):
        trace(model)
    assert [n.op for n in trace(model, Leaves()).graph.nodes].count("call_module") == 3
    x = torch.randn(5, 3)
    assert [s.size for s in zipfx.analyze(model, x, tracer=Leaves())] == [4]
    twin = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2))
    merged = zipfx.zip([model, twin], [x], partial="0", tracer=Leaves(), progress=False)
    assert [tuple(y.shape) for y in merged(x)] == [(5, 2), (5, 2)]


def test_a_tracer_of_your_own_is_used_as_it_is() -> None:
    model = Given(lambda m, x: m.net(x) if len(x) else x)
    trace(model, inputs=(torch.randn(2, 4),))
    with pytest.raises(zipfx.ZipError, match=r"can not trace Given at .*: 'len' is not supported"):
        trace(model, fx.Tracer(), inputs=(torch.randn(2, 4),))


@fx.wrap
def wrapped(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("forward", [
    lambda m, x: m.net(wrapped(x)),
    lambda m, x: m.net(wrapped(x)) * len(x.shape),
], ids=["plain", "followed"])  # fmt: skip
def test_wrapped_functions_are_nodes(forward: Callable[..., Any]) -> None:
    model, x = Given(forward), ROWS.abs()
    traced = trace(model, inputs=(x, x))
    assert [n.name for n in traced.graph.nodes].count("wrapped") == 1
    for y in (x, -x):
        assert error(run(model, (y, x)), run(traced, (y, x))) == 0


def test_registries_of_timm_are_honoured_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.SimpleNamespace(
        get_notrace_modules=lambda: [Odd], get_notrace_functions=lambda: [plain]
    )
    model = nn.Sequential(nn.Linear(3, 4), Odd(), Plain())
    monkeypatch.delitem(sys.modules, "timm.models._features_fx", raising=False)
    with pytest.raises(zipfx.ZipError, match="can not trace Sequential in module '1'"):
        trace(model)
    monkeypatch.setitem(sys.modules, "timm.models._features_fx", registry)
    assert [n.name for n in trace(model).graph.nodes] == ["input_1", "_0", "_1", "plain", "output"]
