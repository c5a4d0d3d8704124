"""Graphs that torch.export wrote: where weights are read, containers, devices, inner graphs."""

from __future__ import annotations

import operator
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, register_dataclass

from zipfx import ZipError
from zipfx.model.calls.arguments import Argument
from zipfx.trace.fronts.written import is_written, rewritten

aten: Any = torch.ops.aten
X = torch.randn(3, 4)
Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor | None = None


register_dataclass(Result, serialized_type_name="tests.written.Result")


class Net(nn.Module):
    """forward is a function of (module, x)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = [function]
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return self.function[0](self, x)


def written(function: Any, x: Any = X) -> fx.GraphModule:
    with torch.no_grad():
        found: Any = torch.export.export(Net(function), (x,), strict=False).module()
    assert is_written(found.graph)
    return found  # type: ignore[no-any-return]


def graph_of(function: Any, x: Any = X) -> fx.Graph:
    return rewritten(written(function, x), "Net", [Argument("x")])


def run(function: Any, x: Any = X) -> Any:
    module = written(function, x)
    graph = rewritten(module, "Net", [Argument("x")])
    expected, found = module(x), fx.GraphModule(module, graph)(x)
    return expected, found


def names(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes]


def test_weights_are_read_where_they_are_used() -> None:
    graph = graph_of(lambda m, x: m.b(m.a(x).relu()) + m.a(x))
    assert names(graph) == [
        "x", "a_weight", "a_bias", "linear", "relu", "b_weight", "b_bias", "linear_1",
        "a_weight_1", "a_bias_1", "linear_2", "add", "output",
    ]  # fmt: skip
    stack = {n.name: [str(p) for p, _ in n.meta["nn_module_stack"].values()][-1:]
             for n in graph.nodes if n.meta}  # fmt: skip
    assert stack["linear_1"] == stack["b_weight"] == ["b"]
    assert stack["linear_2"] == stack["a_weight_1"] == ["a"]


def test_what_is_written_to_is_read_once_and_in_order() -> None:
    def counts(m: Any, x: Tensor) -> Tensor:
        m.count.add_(1)
        return m.a(x) + m.count

    graph = graph_of(counts)
    reads = [n for n in graph.nodes if n.op == "get_attr" and n.target == "count"]
    assert len(reads) == 1
    assert any(n.target._schema.is_mutable for n in reads[0].users)


def test_checks_of_dtypes_and_devices_are_gone() -> None:
    def moves(m: Any, x: Tensor) -> Tensor:
        return m.a(x.to(torch.float32)) + torch.arange(4, device=x.device)

    graph = graph_of(moves)
    assert not [n for n in graph.nodes if "assert" in n.name]
    (arange,) = [n for n in graph.nodes if n.target is aten.arange.default]
    device = arange.kwargs["device"]
    assert (device.target, device.args[1]) == (getattr, "device")
    assert device.args[0].op == "placeholder"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (m.a(x), [x, None, 3]),
        lambda m, x: {"y": m.a(x), "more": {"z": (x,)}},
        lambda m, x: Pair(m.a(x), (x, x)),
        lambda m, x: Result(m.a(x)),
        lambda m, x: Result(m.a(x), x),
        lambda m, x: m.a(x),
        lambda m, x: [Result(m.a(x)), Pair(x, 1)],
    ],
)
def test_what_forward_returns_comes_back(function: Any) -> None:
    expected, found = run(function)
    assert type(found) is type(expected)
    ours, theirs = (torch.utils._pytree.tree_flatten(v) for v in (expected, found))
    assert ours[1] == theirs[1]
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b
               for a, b in zip(ours[0], theirs[0], strict=True))  # fmt: skip


def test_containers_that_forward_takes_are_one_input() -> None:
    x = {"u": X, "v": [X + 1, X + 2]}
    expected, found = run(lambda m, d: m.a(d["u"]) + d["v"][1], x)
    assert torch.equal(expected, found)
    graph = graph_of(lambda m, d: m.a(d["u"]) + d["v"][1], x)
    assert [n.name for n in graph.nodes if n.op == "placeholder"] == ["x"]
    assert [n.args[1] for n in graph.nodes if n.target is operator.getitem] == ["u", "v", 1]


def test_no_grad_and_autocast_that_is_off_make_no_difference() -> None:
    def modes(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = m.a(x)
            z = y.relu()
        with torch.autocast("cpu", enabled=False):
            z = m.b(z) + y
        return z

    expected, found = run(modes)
    assert torch.equal(expected, found)
    assert not [n for n in graph_of(modes).nodes if "wrap" in n.name]


def test_autocast_that_is_on_and_branches_on_data_are_errors() -> None:
    def casts(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.a(x).float()

    def branches(m: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (m.a(x),))

    with pytest.raises(ZipError, match=r"holds wrap_with_autocast at .* leave autocast"):
        graph_of(casts)
    with pytest.raises(ZipError, match="holds cond at node 'cond': forward branches or loops on"):
        graph_of(branches)


def test_without_arguments_they_are_those_of_the_export_and_sizes_are_looked_at() -> None:
    module = written(lambda m, x: m.a(x))
    graph = rewritten(module, "Net")
    assert [n.target for n in graph.nodes if n.op == "placeholder"] == ["x"]
    kept = [n for n in graph.nodes if n.op == "call_module"]
    assert [n.target for n in kept] == ["_guards_fn"] * len(kept)


def test_free_sizes_stay_free() -> None:
    program = torch.export.export(Net(lambda m, x: m.a(x).view(x.shape[0] * 2, -1)), (X,),
                                  dynamic_shapes=({0: Dim.AUTO},), strict=False)  # fmt: skip
    module: Any = program.module()
    graph = rewritten(module, "Net", [Argument("x")])
    assert fx.Interpreter(module, graph=graph).run(torch.randn(5, 4)).shape == (10, 2)
