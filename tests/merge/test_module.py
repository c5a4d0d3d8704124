"""The merged module is one a user can work with: names, copies, export, training, repair."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves
from torchvision.models import resnet18

import zipfx
from tests.helpers.laws import error, merge, run, running_modules, state_bytes, storages
from tests.helpers.models import NETS, Net

all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


both = pytest.mark.parametrize("partial", [False, True])


def pair(net: Net, partial: bool, **options: Any) -> fx.GraphModule:
    """Two different models, merged in full or up to the module in the middle."""
    models = [net.build(0), net.build(1)]
    cuts = running_modules(models[0])
    cut = cuts[len(cuts) // 2] if partial else None
    merged: fx.GraphModule = merge(models, net.batches(2), partial=cut, **options)
    return merged


@pytest.fixture(scope="module")
def resnets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [resnet18(num_classes=k).eval() for k in (4, 6)]


@pytest.fixture(scope="module")
def merged_resnet(resnets: list[nn.Module]) -> fx.GraphModule:
    data = [torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    return zipfx.zip(resnets, data, partial="layer3", progress=False)


@pytest.mark.slow
def test_containers_are_what_they_were(merged_resnet: fx.GraphModule) -> None:
    merged: Any = merged_resnet
    assert isinstance(merged.layer1, nn.Sequential)
    assert isinstance(merged.layer1[0].conv1, nn.Conv2d)
    assert isinstance(merged.task_heads[0].layer4[0].downsample[0], nn.Conv2d)


@pytest.mark.slow
def test_users_find_their_own_modules(merged_resnet: fx.GraphModule) -> None:
    assert isinstance(merged_resnet.get_submodule("layer3.1.bn2"), nn.BatchNorm2d)
    heads: Any = merged_resnet.task_heads
    assert [head.fc.out_features for head in heads] == [4, 6]
    assert not hasattr(merged_resnet, "layer4")


@pytest.mark.slow
def test_names_are_those_of_the_model(resnets: list[nn.Module], merged_resnet: Any) -> None:
    late = ("layer4", "fc")
    trunk = {n for n in resnets[0].state_dict() if not n.startswith(late)}
    heads = {
        f"task_heads.{k}.{n}" for n in resnets[0].state_dict() if n.startswith(late) for k in (0, 1)
    }
    names = set(merged_resnet.state_dict())
    assert {n for n in names if "unmerge" not in n} == trunk | heads


@pytest.mark.sweep
@all_nets
@both
def test_copies_are_independent_and_complete(net: Net, partial: bool) -> None:
    merged = pair(net, partial)
    twin = copy.deepcopy(merged)
    assert error(run(merged, net.inputs(3)), run(twin, net.inputs(3))) == 0
    assert not storages(merged) & storages(twin)
    assert list(twin.state_dict()) == list(merged.state_dict())
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in merged.named_modules()]
    assert twin.meta["zipfx"].parameters == sum(p.numel() for p in twin.parameters())


@pytest.mark.sweep
@all_nets
@both
def test_state_dicts_go_round(net: Net, partial: bool) -> None:
    merged = pair(net, partial)
    twin = copy.deepcopy(merged)
    with torch.no_grad():
        for t in twin.parameters():
            t.zero_()
    twin.load_state_dict(merged.state_dict())
    assert error(run(merged, net.inputs(3)), run(twin, net.inputs(3))) == 0


@pytest.mark.sweep
@all_nets
@both
def test_heads_hold_what_their_task_needs(net: Net, partial: bool) -> None:
    merged = pair(net, partial)
    before = state_bytes(merged)
    if not partial:
        with pytest.raises(zipfx.ZipError, match="there is no head 0"):
            zipfx.head(merged, 0)
        return
    for k in range(2):
        alone = zipfx.head(merged, k)
        assert not storages(alone) & storages(merged)
        assert sum(p.numel() for p in alone.parameters()) <= sum(
            p.numel() for p in merged.parameters()
        )
        names = [str(n.target) for n in alone.graph.nodes if n.op in ("call_module", "get_attr")]
        assert not any(n.startswith(f"task_heads.{1 - k}.") for n in names)
    assert state_bytes(merged) == before


@pytest.mark.sweep
@all_nets
@both
def test_the_code_is_python_that_compiles(net: Net, partial: bool) -> None:
    merged = pair(net, partial)
    merged.graph.lint()
    compile(merged.code, "merged", "exec")
    merged.recompile()
    text = str(merged.meta["zipfx"])
    assert text.startswith("zip of 2 models, ")
    assert all(space.name in text for space in merged.meta["zipfx"].spaces)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["BatchNorm", "TwoInputs", "DictOutput", "OptionA", "Hierarchy", "SEGate"]
)
@both
def test_merged_models_are_exported(name: str, partial: bool) -> None:
    net = NETS[name]
    merged = pair(net, partial).eval()
    program = torch.export.export(merged, net.inputs(3))
    leaves = [tree_leaves(run(m, net.inputs(3))) for m in (merged, program.module())]
    assert error(*leaves) < 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize("name", [n for n in NETS if not n.startswith("Inplace")])
@both
def test_a_training_step_moves_what_has_a_gradient(name: str, partial: bool) -> None:
    net = NETS[name]
    merged = pair(net, partial).train()
    optimiser = torch.optim.SGD(merged.parameters(), lr=0.01)
    torch.stack([y.square().sum() for y in tree_leaves(merged(*net.inputs(8)))]).sum().backward()
    before = copy.deepcopy(merged.state_dict())
    optimiser.step()
    used = {n for n, p in merged.named_parameters() if p.grad is not None}
    moved = {n for n, p in merged.named_parameters() if not torch.equal(p, before[n])}
    assert moved >= {n for n in used if n.endswith("weight")}
    assert moved <= used


def cut_params() -> list[Any]:
    return [
        pytest.param(net, part, id=f"{'partial' if part else 'full'}-{net.name}")
        for net in NETS.values()
        for part in (False, True)
        if net.name != "AuxHead"
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("net", "partial"), cut_params())
def test_every_parameter_is_used(net: Net, partial: bool) -> None:
    merged = pair(net, partial)
    used = {
        str(n.target) for n in merged.graph.nodes if n.users and n.op in ("get_attr", "call_module")
    }
    names = [name for name, _ in merged.named_parameters()]
    assert not [n for n in names if n not in used and n.rpartition(".")[0] not in used]


@pytest.mark.parametrize("training", [True, False])
@both
def test_mode_dtype_and_frozen_parameters_are_kept(training: bool, partial: bool) -> None:
    net = NETS["BatchNorm"]
    models = [net.build(s, torch.float32).train(training) for s in (0, 1)]
    for model in models:
        model.get_submodule("bn1").eval()
        model.get_submodule("a").weight.requires_grad_(False)
    data = net.batches(2, dtype=torch.float32)
    merged = merge(models, data, partial="bn2" if partial else None, repair="bn")
    assert merged.training is training
    assert merged.get_submodule("bn2").training is training
    assert not merged.get_submodule("bn1").training
    assert not merged.get_submodule("a").weight.requires_grad
    assert merged.get_submodule("b").weight.requires_grad
    assert {p.dtype for p in merged.parameters()} == {torch.float32}


def test_buffers_stay_out_of_the_state_dict_if_they_were() -> None:
    merged = pair(NETS["BufferPosition"], partial=False)
    assert "step" in dict(merged.named_buffers())
    assert "step" not in merged.state_dict()


@both
def test_unused_parameters_survive(partial: bool) -> None:
    merged = pair(NETS["AuxHead"], partial)
    names = {n.removeprefix("task_heads.0.") for n in merged.state_dict()}
    assert {"aux.0.weight", "aux.1.running_mean", "spare"} <= names
    assert "aux.0.weight" in str(merged.meta["zipfx"])


def test_identity_without_data_averages_the_weights() -> None:
    net = NETS["CatResidual"]
    models = [net.build(s) for s in (0, 1, 2)]
    merged = merge(models, None, matcher="identity", example_inputs=net.inputs(2))
    for name, t in merged.state_dict().items():
        mean = torch.stack([m.state_dict()[name] for m in models]).mean(0)
        torch.testing.assert_close(t, mean, rtol=1e-12, atol=1e-12)
