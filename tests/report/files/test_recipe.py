"""What a file says of its models is compared with the models at hand."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.saved import edited, images, network, refuse, reloaded, same, zipped


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (lambda: [network()] * 3, "it is a merge of 2 models, and 3 are given"),
        (lambda: [network()], "at least two models; got 1"),
        (lambda: [network(width=9)] * 2, r"model 0 .* node '_0' .* out_channels was 8 and is 9"),
        (lambda: [network(), network(4)], r"model 1 .* node '_7' .*: out_features was 3 and is 4"),
        (lambda: [network()[:3]] * 2, "it has no node '_3' .call_module 3."),
        (lambda: [nn.Linear(2, 2)] * 2, "model 0 is not of the architecture that was saved"),
        (
            lambda: [nn.Sequential(*network()[:4], nn.GELU(), *network()[5:])] * 2,
            "layer was ReLU and is GELU",
        ),
    ],
)
def test_other_models(models: Callable[[], list[nn.Module]], says: str, file: Path) -> None:
    refuse(file, says, models())


def test_models_that_are_tied_otherwise(tmp_path: Path) -> None:
    def make(tie: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        if tie:
            model[2].weight = model[0].weight
        return model

    path, x = tmp_path / "merged.safetensors", torch.randn(32, 4)
    for tie, says in ((True, "in the file only"), (False, "in the models only")):
        zipfx.save(zipfx.zip([make(tie), make(tie)], [x], progress=False), path)
        refuse(path, f"'2.weight' is tied to another tensor {says}", [make(not tie)] * 2)


def test_models_in_another_order_are_refused(tmp_path: Path) -> None:
    makers = [lambda k=k: network(3 + k).eval() for k in range(3)]
    merged = zipped("2", [make() for make in makers])
    zipfx.save(merged, tmp_path / "merged")
    refuse(
        tmp_path / "merged", r"model 0 .*: out_features was 3 and is 5", [m() for m in makers[::-1]]
    )


def test_models_that_are_not_patched_alike_are_refused(tmp_path: Path) -> None:
    def make(patched: bool) -> nn.Module:
        model = network().eval()
        if patched:
            model[2].forward = types.MethodType(double_relu, model[2])
        return model

    merged = zipped("0", [make(True), make(True)])
    found = reloaded(merged, [make(True), make(True)], tmp_path)
    assert same(found(images()), merged(images()))
    path = tmp_path / "one.safetensors"
    refuse(
        path, "layer was ReLU with forward=.*test_recipe.double_relu and is ReLU", [make(False)] * 2
    )


def double_relu(self: nn.Module, x: Tensor) -> Tensor:
    return x.relu() * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h["report"].update(flops=1e400), "Report.flops is inf|flops is inf"),
        (lambda h: h["report"].update(flops="many"), "flops is 'many', not of type int"),
        (
            lambda h: h["report"]["spaces"][0].update(correlation="high"),
            "correlation is 'high', no",
        ),
        (lambda h: h["report"]["spaces"][0].update(correlation=10**400), "is out of range"),
        (
            lambda h: h["report"].update(matcher=list(range(10**4))),
            r"matcher is \[0, 1.{70,90}\.\.\.",
        ),
        (lambda h: h["report"].update(models=3), "its report is of 3 models"),
        (
            lambda h: h["report"].update(partial=None),
            "zipped up to None, and its graph of 2 models",
        ),
        (lambda h: h["recipe"].update(models=10**12), "it is a merge of 1000000000000 models"),
        (lambda h: h["recipe"].update(heads=[1, 0]), "heads .1, 0. of 2 models make no sense"),
        (lambda h: h["recipe"].update(heads=[0, 0]), "heads .0, 0. of 2 models make no sense"),
        (lambda h: h.update(training=["nothing"]), "tells of 'nothing', which the models do not"),
        (lambda h: h.update(frozen=["0"]), "tells of '0', which the models do not have"),
        (lambda h: h.update(complex=["nothing"]), "tells of a tensor 'nothing', which it does not"),
        (lambda h: h.update(strides={"nothing": [1]}), "tells of a tensor 'nothing', which it doe"),
        (lambda h: h.update(strides={"0.bias": [-1]}), "'0.bias' is damaged"),
        (lambda h: h.update(strides={"0.bias": [2**63]}), "'0.bias' is damaged"),
        (lambda h: h.update(strides={"0.bias": [10**30]}), "'0.bias' is damaged"),
        (lambda h: h.update(strides={"0.bias": [1, 1]}), "'0.bias' is damaged"),
        (lambda h: h.update(strides={"0.bias": [0]}), "'0.bias' is damaged"),
        (
            lambda h: h["recipe"]["steps"][5].update(reads=["_2"]),
            "node 'head0_4' reads '_2', which is not its '_3'",
        ),
        (
            lambda h: h["recipe"]["steps"][2].update(reads=["input_1"]),
            "node '_1' reads 'input_1', which is not its '_0'",
        ),
        (
            lambda h: h["recipe"]["results"][1].update(reads=["head0_7"]),
            "node 'output' reads 'head0_7', which is not its '_7'",
        ),
    ],
)
def test_headers_that_say_what_can_not_be(
    change: Callable[[Any], Any], says: str, deeper: Path, tmp_path: Path
) -> None:
    refuse(edited(deeper, tmp_path, lambda tensors, header: change(header)), says)
