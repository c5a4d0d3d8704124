"""One member of every family that must be analysed in full, and what else must at least be exact.

`benchmarks/architectures.py` sweeps over all members.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zipfx
from benchmarks import architectures, zoo
from tests.helpers.laws import EXACT, error, heads_error, merge, parameters, permuted, run
from tests.helpers.models import randomise
from tests.helpers.shared import shared

FAMILIES = {  # number of spaces, as recorded: a guard against regressions
    "resnet18": 12, "resnet50": 37, "vgg11_bn": 10, "alexnet": 7, "squeezenet1_1": 25,
    "densenet121": 120, "mobilenet_v2": 25, "mobilenet_v3_small": 27, "mnasnet0_5": 25,
    "efficientnet_b0": 40, "googlenet": 57, "inception_v3": 94, "convnext_tiny": 22,
}  # fmt: skip
HEAVY = ("vgg11_bn", "alexnet")  # three layers with 60 to 130 million weights


# vgg11_bn takes over 10 s: 133 million weights in float64 are permuted
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_law_1(name: str) -> None:
    model, x = architectures.build(name), architectures.images(name, 2, size=32)
    if name == "alexnet":
        x = architectures.images(name, 2, size=64)
    spaces = zipfx.analyze(model, x, verify=False)
    assert architectures.law_1(model, spaces, x) < EXACT
    assert len(spaces) == FAMILIES[name]
    assert not architectures.pinned_axes(spaces)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HEAVY])
def test_law_2(name: str) -> None:
    model = architectures.build(name, torch.float32)
    x = architectures.images(name, 1, size=32, dtype=torch.float32)
    options = {"matcher": "identity", "example_inputs": x, "verify": False}
    merged = merge([model, copy.deepcopy(model)], None, **options)
    assert parameters(merged) == parameters(model)
    assert merged.state_dict().keys() == model.state_dict().keys()
    assert error(run(model, (x,)), run(merged, (x,))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", "squeezenet1_1", "mnasnet0_5", "mobilenet_v3_small", "googlenet", "swin_t"]
)
def test_law_7(name: str) -> None:
    model, x = architectures.smallest(name, "torchvision")
    fresh = architectures.build(name, pixels=x.shape[-1])
    assert architectures.law_7(model, fresh, x) < EXACT


# Few images leave many features dead behind their ReLU: only observing before it tells them apart.
# Left out: features that hardly vary (EfficientNet's gates), and what takes long (ConvNeXt, VGG).
LAW_3 = [
    ("resnet18", 32, 16, None),
    ("resnet18", 32, 16, "layer3"),
    ("squeezenet1_1", 64, 16, None),
    ("squeezenet1_1", 64, 16, "features.8"),
    ("mnasnet0_5", 32, 16, None),
    ("mnasnet0_5", 32, 16, "layers.10"),
    ("mobilenet_v3_small", 32, 16, None),
    ("mobilenet_v3_small", 32, 16, "features.8"),
    ("googlenet", 64, 4, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "count", "cut"), LAW_3)
def test_law_3(name: str, size: int, count: int, cut: str | None) -> None:
    model, x = architectures.build(name), architectures.images(name, count, size)
    data = [(x,)]
    twin = permuted(model, (x[:2],))
    merged = merge([model, twin], data, partial=cut, matcher="permute", places="all", verify=False)
    fresh = (torch.randn(x[:4].shape, generator=torch.Generator().manual_seed(3)).to(x),)
    expected = run(model, fresh)
    if cut is None:
        assert error(expected, run(merged, fresh)) < EXACT
    else:
        assert heads_error(merged, [expected, expected], fresh) < EXACT
        assert not merged.meta["zipfx"].unmerges or "mobilenet" in name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["resnext50_32x4d", "regnet_y_400mf", "shufflenet_v2_x0_5", "vit_b_32", "swin_t", "swin_v2_t"],
)
def test_blocks_are_found_and_exact(name: str) -> None:
    model, x = architectures.smallest(name, "torchvision")
    spaces = zipfx.analyze(model, x, verify=False)
    assert architectures.law_1(model, spaces, x) < EXACT
    assert not architectures.pinned_axes(spaces)
    assert any(s.of_blocks for s in spaces) or "shufflenet" in name
    for space in spaces:
        assert all(sum(1 for s in spaces if s.name == block.space) == 1 for block in space.within)


# ------------------------------------------------------------------ CIFAR ResNets
def cifar_images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, "bn1", "layer1", "layer2.0", "layer2.1.conv1", "layer3"])
@pytest.mark.parametrize("shortcut", ["conv", "pad"])
def test_cifar_resnets_keep_the_laws(shortcut: zoo.Shortcut, cut: str | None) -> None:
    model = randomise(zoo.ResNet20(shortcut=shortcut), 0).double()
    x = cifar_images(16)
    spaces = zipfx.analyze(model, x[:2], verify=False)
    assert architectures.law_1(model, spaces, x) < EXACT
    assert not architectures.pinned_axes(spaces)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged = merge([model, twin], [(x,)], partial=cut, matcher="permute", places="all")
    fresh = (cifar_images(4, seed=2),)
    expected = run(model, fresh)
    if cut is None:
        assert parameters(merged) == parameters(model)
        assert error(expected, run(merged, fresh)) < EXACT
    else:
        assert heads_error(merged, [expected, expected], fresh) < EXACT


CHECKPOINTS = ("cifar10_resnet20_a", "cifar10_ce_w1_a", "cifar10_text_w2_b")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, "layer2"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_real_checkpoints_keep_the_laws(name: str, cut: str | None) -> None:
    shared(f"zoo/{name}.pt")
    model: nn.Module = zoo.load(name)[0].double()
    x = cifar_images(24)
    twin = permuted(model, (x[:2],))
    merged = merge([model, twin], [(x,)], partial=cut, matcher="permute", places="all")
    fresh = (cifar_images(4, seed=2),)
    expected = run(model, fresh)
    assert error(expected, run(twin, fresh)) < EXACT
    if cut is None:
        assert error(expected, run(merged, fresh)) < EXACT
    else:
        assert heads_error(merged, [expected, expected], fresh) < EXACT
