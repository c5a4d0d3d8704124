"""The contract: what every front gives, and a front of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import zipfx
from tests.helpers.laws import error, run, unharmed
from tests.helpers.models import NETS, Net
from zipfx import ZipError
from zipfx.model.graph_module import GraphModule
from zipfx.trace.fronts.front import Front, Given, twin_of, with_record
from zipfx.trace.nodes import module_paths
from zipfx.trace.record import Record, record_of
from zipfx.trace.tracing import front_of, given_of, trace


@pytest.mark.sweep
@pytest.mark.parametrize("front", ["symbolic", "export"])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_the_contract(net: Net, front: Any) -> None:
    model, x = net.build(), net.inputs(3)
    module = unharmed([model], lambda: trace(model, inputs=x, front=front))
    assert isinstance(module, GraphModule)
    assert not module.training
    assert record_of(module).front == front
    assert error(run(model, x), run(module, x)) == 0
    names = [n.target for n in module.graph.nodes if n.op == "placeholder"]
    assert names == [a.name for a in given_of(model, x).arguments]
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, p in module.named_parameters():
        assert own[name] is p
    for name, t in module.named_buffers():
        if name in dict(model.named_buffers()):
            assert t is not model.get_buffer(name)
    nodes = list(module.graph.nodes)
    paths = dict(model.named_modules(remove_duplicate=False))
    for i, node in enumerate(nodes):
        assert all(path in paths for path in module_paths(node)), node.name
        readers = [nodes.index(user) for user in node.users]
        if front == "export" and node.op == "get_attr" and len(readers) == 1:
            between = nodes[i + 1 : readers[0]]
            assert all(n.op == "get_attr" or n.target is getattr for n in between)


@pytest.mark.parametrize("front", ["symbolic", "export"])
def test_computed_weights_are_plain_ones_where_that_is_asked_for(front: Any) -> None:
    model = parametrizations.weight_norm(nn.Linear(3, 4))
    module = trace(model, inputs=(torch.ones(2, 3),), folded=True, front=front)
    assert sorted(dict(module.named_parameters())) == ["bias", "weight"]
    assert torch.allclose(module.get_parameter("weight"), model.weight)


def test_a_twin_is_in_eval_mode_and_has_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    twin: Any = twin_of(model, Given())
    assert not twin.training
    assert twin[0].weight is model[0].weight
    assert twin[1].running_mean is not model[1].running_mean
    away: Any = twin_of(model, Given(device=torch.device("cpu")))
    assert away[0].weight is not model[0].weight


def own(model: nn.Module, given: Given) -> fx.GraphModule:
    """A front of one's own: torch.fx, and nothing else."""
    twin = twin_of(model, given)
    graph = fx.Tracer().trace(twin)
    return with_record(GraphModule(twin, graph), twin, Record())


def test_a_front_of_ones_own_is_used_checked_and_named() -> None:
    models = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    front: Front = own
    merged: Any = zipfx.zip(models, [torch.randn(16, 3)], front=front, progress=False)
    assert merged.meta["zipfx"].front == f"{__name__}.own"
    assert merged.meta["zipfx"].refits

    def wrong(model: nn.Module, given: Given) -> fx.GraphModule:
        return own(nn.Sequential(model, nn.ReLU()), given)

    with pytest.raises(ZipError, match="the traced graph does not compute what Sequential comput"):
        zipfx.zip(models, [torch.randn(16, 3)], front=wrong, progress=False)


def test_a_front_that_fails_is_named() -> None:
    def broken(model: nn.Module, given: Given) -> fx.GraphModule:
        raise IndexError("of mine")

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    with pytest.raises(ZipError, match="broken' fails on Linear: of mine"):
        zipfx.zip(models, [torch.randn(16, 3)], front=broken, progress=False)


class Asks(nn.Module):
    """No symbol can answer it, and torch.export needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        z: Tensor = self.h(y if isinstance(x, Tensor) else y * 2)
        return z


def test_the_report_says_which_front_and_why_not_the_other() -> None:
    models, data = [Asks(), Asks()], [torch.randn(16, 3)]
    report = zipfx.zip(models, data, progress=False).meta["zipfx"]
    assert report.front == "export"
    (note,) = [n for n in report.notes if n.startswith("traced by torch.export, since ")]
    assert "the traced graph does not compute what Asks computes" in note
    assert note in str(report)
    asked = zipfx.zip(models, data, front="export", progress=False).meta["zipfx"]
    assert not [n for n in asked.notes if "traced by torch.export" in n]
    with pytest.raises(ZipError, match="does not compute what Asks computes") as caught:
        zipfx.zip(models, data, front="symbolic", progress=False)
    assert "torch.export" not in str(caught.value)


@pytest.mark.parametrize("front", ["fx", None, 3, ["export"]])
def test_fronts_that_are_none(front: Any) -> None:
    with pytest.raises(
        ZipError, match=r"is unknown; choose one of \['auto', 'symbolic', 'export'\]"
    ):
        front_of(front)
    with pytest.raises(ZipError, match="is unknown; choose one of"):
        zipfx.analyze(nn.Linear(3, 4), torch.ones(2, 3), front=front)


def test_a_tracer_is_for_torch_fx() -> None:
    with pytest.raises(ZipError, match=r"tracer= is for torch\.fx, and front='export' is not"):
        zipfx.analyze(nn.Linear(3, 4), torch.ones(2, 3), front="export", tracer=fx.Tracer())
