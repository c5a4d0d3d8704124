"""A model gets the same merge through either front: the same layers refitted, the same outputs.

A ResNet does so in tests/trace/fronts/test_raised.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

import zipfx

#: with the sizes of images free, too, exporting a Swin takes half a minute
ONLY_THE_BATCH = zipfx.Export(dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})


def vit() -> nn.Module:
    return VisionTransformer(16, 4, 1, 2, 8, 16, num_classes=5)


def swin() -> nn.Module:
    return SwinTransformer([2, 2], 8, [1, 1], [2, 2], [4, 4], num_classes=5)


def trained(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """As if it were: biases and scales, which begin as constants, are none."""
    torch.manual_seed(seed)
    model = make().eval()
    for p in model.parameters():
        if p.ndim == 1:
            p.data += torch.randn_like(p) / 3
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [vit, swin])
def test_a_model_gets_the_same_merge_through_either_front(make: Callable[[], nn.Module]) -> None:
    """To 1e-6; layers and spaces are called the same."""
    models = [trained(make, seed).double() for seed in (0, 1)]
    data = [torch.randn(8, 3, 16, 16, dtype=torch.float64) for _ in range(3)]
    for repair in ("none", "refit"):
        ways: list[Any] = [
            zipfx.zip(models, data, repair=repair, front=front, progress=False)
            for front in ("symbolic", ONLY_THE_BATCH)
        ]
        reports = [merged.meta["zipfx"] for merged in ways]
        assert [report.front for report in reports] == ["symbolic", "export"]
        a, b = ({r.name for r in report.refits} for report in reports)
        assert a == b
        assert bool(a) == (repair != "none")
        a, b = ({(s.name, s.size) for s in report.spaces} for report in reports)
        assert a == b
        outputs = [merged(data[0]).detach() for merged in ways]
        assert torch.allclose(*outputs, rtol=1e-6, atol=1e-6 * float(outputs[0].abs().max()))
