"""torch.jit.script takes a merge wherever it takes the plain torch.fx trace of the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torchvision.models import resnet18

import zipfx
from tests.helpers.laws import EXACT, error, merge, run, running_modules
from tests.helpers.models import NETS, Net
from zipfx.merge.origin import origin_of
from zipfx.trace.tracing import trace

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # it says so each time
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # of GraphModule
]


def plain_trace(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """What torch.fx makes of a model, containers of its own included."""
    module = trace(model, inputs=inputs)
    for node in module.graph.nodes:
        node.type = None  # fx takes annotations as they are written, "Tensor", which is no type
    return fx.GraphModule(module, module.graph)


def scripts(module: nn.Module) -> bool:
    try:
        torch.jit.script(module)
    except (RuntimeError, torch.jit.frontend.NotSupportedError):
        return False
    return True


def check(merged: nn.Module, inputs: Sequence[Any]) -> None:
    scripted = torch.jit.script(merged)
    assert error(run(merged, inputs), run(scripted, inputs)) < EXACT
    found = scripted.state_dict()
    assert all(torch.equal(t, found[name]) for name, t in merged.state_dict().items())


NOT_SCRIPTED = ("UpsampleNearest", "Experts")  # arguments that TorchScript does not know


@pytest.mark.sweep
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_what_fx_makes_of_a_net_scripts_and_so_does_its_merge(net: Net) -> None:
    models, x = [net.build(0), net.build(1)], net.inputs(3)
    if net.name in NOT_SCRIPTED:
        assert not scripts(plain_trace(models[0], x))
        return
    assert scripts(plain_trace(models[0], x))
    for cut in (None, *running_modules(models[0])):
        try:
            merged = merge(models, net.batches(1), partial=cut)
        except zipfx.ZipError:  # a cut that is not possible
            continue
        check(merged, x)


INSERTED = {"Inplace": "clone", "HeadNorms": "select", "BatchNorm": "index_select"}


@pytest.mark.parametrize(("name", "function"), INSERTED.items())
def test_what_is_put_between_trunk_and_head_scripts(name: str, function: str) -> None:
    net = NETS[name]
    models = [net.build(0), net.build(1)]
    cuts = running_modules(models[0])
    merges = [merge(models, net.batches(1), partial=cut) for cut in cuts]
    inserted = [m for m in merges if function in functions(m)]
    assert inserted
    for merged in inserted:
        check(merged, net.inputs(3))


@pytest.mark.parametrize("matcher", ["svd", zipfx.Zip(unmerge="lstsq")])
@pytest.mark.parametrize(("name", "cut"), [("BatchNorm", "a"), ("Transformer", "attn.qkv")])
def test_dense_unmerges_script(name: str, cut: str, matcher: Any) -> None:
    net = NETS[name]
    models = [net.build(0), net.build(1)]
    merged = merge(models, net.batches(1), partial=cut, matcher=matcher)
    assert "mix" in functions(merged)
    check(merged, net.inputs(3))


def functions(merged: fx.GraphModule) -> set[str]:
    """Names of the functions that are in a merge, and in no model."""
    return {
        n.target.__name__
        for n in merged.graph.nodes
        if n.op == "call_function" and origin_of(n).source is None
    }


@pytest.mark.slow
@pytest.mark.parametrize("partial", [None, "layer3", "layer1.0.conv1", "layer2.0"])
def test_resnets_script(partial: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [resnet18(num_classes=3).double().eval() for _ in range(2)]
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    merged = zipfx.zip(models, [x], partial=partial, progress=False, repair="none")
    check(merged, (x,))
    zipfx.save(merged, tmp_path / "merged")
    check(zipfx.load(tmp_path / "merged", models), (x,))
    check(copy.deepcopy(merged), (x,))
    check(pickle.loads(pickle.dumps(merged)), (x,))
    for k in range(0 if partial is None else 2):
        check(zipfx.head(merged, k), (x,))


def test_a_scripted_merge_is_a_file_without_python(tmp_path: Path) -> None:
    net = NETS["Hierarchy"]
    models = [net.build(0), net.build(1)]
    merged = merge(models, net.batches(1), partial="stages.0.0")
    torch.jit.script(merged).save(tmp_path / "merged.pt")
    found = torch.jit.load(tmp_path / "merged.pt")
    assert error(run(merged, net.inputs(3)), run(found, net.inputs(3))) < EXACT


def test_a_module_that_holds_a_merge_scripts_and_keeps_it() -> None:
    class Holder(nn.Module):
        def __init__(self, merged: nn.Module) -> None:
            super().__init__()
            self.merged = merged

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.merged(x)

    net = NETS["Hierarchy"]
    merged = merge([net.build(0), net.build(1)], net.batches(1))
    holder = Holder(merged)
    check(holder, net.inputs(3))
    assert holder.merged is merged


def test_containers_still_run_what_is_in_them() -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2)) for _ in range(2)
    ]
    x = torch.randn(32, 4)
    merged = zipfx.zip(models, [x], progress=False)
    body, last = merged.get_submodule("0"), merged.get_submodule("1")
    assert isinstance(body, nn.Sequential)
    assert torch.equal(last(body(x)), merged(x))


def test_other_ways_out_of_python_give_the_same() -> None:
    """For models that do not script: a trace, and an exported program."""
    net = NETS["UpsampleNearest"]
    merged, x = merge([net.build(0), net.build(1)], net.batches(1), partial="a"), net.inputs(3)
    traced = torch.jit.trace(merged, x)
    exported = torch.export.export(merged, x)
    for other in (traced, exported.module()):
        assert error(run(merged, x), run(other, x)) < EXACT


def test_annotations_that_were_not_evaluated_are_left_out() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.get_submodule("0")(x).relu()

    class Quoted(nn.Sequential):
        pass

    Quoted.forward = forward  # type: ignore[method-assign, assignment]
    models = [Quoted(nn.Linear(4, 8)) for _ in range(2)]
    merged = zipfx.zip(models, [torch.randn(32, 4)], progress=False)
    assert "'Tensor'" not in merged.code
    assert scripts(merged)
