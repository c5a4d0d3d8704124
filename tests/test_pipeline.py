"""The whole job: what the stages do together."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn

import zipfx


def network(outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(12 * 16, outputs),
    ).double().eval()  # fmt: skip


def images(count: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 3, size, size, generator=generator).double() for _ in range(count)]


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-12 * b.abs().max())


@pytest.mark.sweep
@pytest.mark.parametrize("partial", [None, "0", "1", "3", "6"])
def test_three_permuted_copies_are_one(partial: str | None) -> None:
    model, data = network(4, 0), images(4)
    spaces = zipfx.analyze(model, data[0])
    models = [model, *(spaces.permuted(model, spaces.random_permutations(i)) for i in (1, 2))]
    merged = zipfx.zip(
        models, data, partial=partial, matcher="permute", repair="none", progress=False
    )
    outputs = [merged(data[0])] if partial is None else merged(data[0])
    assert len(outputs) == (1 if partial is None else 3)
    for output in outputs:
        assert close(output, model(data[0]))


def test_heads_may_differ() -> None:
    a, b = network(4, 0), network(7, 1)
    merged = zipfx.zip([a, b], images(3), partial="3", progress=False)
    x = images(1)[0]
    assert [tuple(y.shape) for y in merged(x)] == [(16, 4), (16, 7)]
    assert [tuple(zipfx.head(merged, k)(x).shape) for k in (0, 1)] == [(16, 4), (16, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["classifier", "segmenter"])
def test_a_segmenter_and_a_classifier_share_a_trunk(first: str) -> None:
    # over 10 s on a busy machine: two ResNet-50 are traced, verified and merged
    torch.manual_seed(0)
    classifier = torchvision.models.resnet50().eval()
    segmenter = torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None
    ).eval()
    classifier.load_state_dict(segmenter.backbone.state_dict(), strict=False)
    models = [classifier, segmenter] if first == "classifier" else [segmenter, classifier]
    partial = "layer1" if first == "classifier" else "backbone.layer1"
    x = torch.randn(2, 3, 40, 40)
    merged = zipfx.zip(
        models, [x], partial=partial, matcher="permute", repair="none", progress=False
    )
    for got, model in zip(merged(x), models, strict=True):
        expected = model(x)
        if isinstance(expected, dict):
            got, expected = got["out"], expected["out"]
        torch.testing.assert_close(got, expected)


def test_matching_is_reported() -> None:
    data = images(3)
    merged = zipfx.zip([network(4, 0), network(4, 1)], data, partial="1", progress=False)
    report = merged.meta["zipfx"]
    assert report.layers == (1, 3)
    assert [(s.name, s.size, s.within + s.across) for s in report.spaces] == [("0", 8, 8)]
    assert report.batches == {"observe": 3, "repair": 3}
    assert report.parameters == sum(p.numel() for p in merged.parameters())
    assert 0.5 < report.flops / sum(report.model_flops) < 1
    assert set(report.seconds) == {
        "trace",
        "analyze",
        "correspond",
        "observe",
        "match",
        "fuse",
        "repair",
    }
    text = str(report)
    assert "zip of 2 models, up to '1': 1 of 3 layers" in text
    assert "0.weight" in text  # the input channels are pinned, and it says so


def test_too_few_samples_are_noted() -> None:
    models, x = [network(4, 0), network(4, 1)], images(1, 8)[0]
    notes = zipfx.zip(models, [x], progress=False).meta["zipfx"].notes
    assert not any("few calibration samples" in note for note in notes)
    wide = [nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2)) for _ in range(2)]
    (note,) = zipfx.zip(wide, [torch.randn(9, 3)], progress=False).meta["zipfx"].notes
    assert "fewer than features in 1 of 1 spaces (9 for the 40 features of '0')" in note


def test_loaders_may_be_lists_of_tuples() -> None:
    models, (a, b) = [network(4, 0), network(4, 1)], images(2)
    as_lists = zipfx.zip(models, [[(a, 0), (a, 1)], [(b,)]], progress=False)
    loaders = [torch.utils.data.DataLoader(x.repeat(n, 1, 1, 1), 16) for x, n in ((a, 2), (b, 1))]
    as_loaders = zipfx.zip(models, loaders, progress=False)
    assert as_lists.meta["zipfx"].batches == as_loaders.meta["zipfx"].batches == {
        "observe": 3, "repair": 3,
    }  # fmt: skip
    assert close(as_lists(a), as_loaders(a))


def test_device_argument_does_not_move_the_models() -> None:
    a, b = network(4, 0), network(4, 1)
    before = copy.deepcopy(a.state_dict())
    merged = zipfx.zip([a, b], images(2), device="cpu", progress=False)
    assert next(merged.parameters()).device == next(a.parameters()).device
    assert all(torch.equal(before[k], v) for k, v in a.state_dict().items())
    assert merged.meta["zipfx"].partial is None


def test_a_cut_reads_the_values_that_leave() -> None:
    """What crosses the cut is observed there, also if no weight of the trunk reads it."""
    data = images(3)
    model = network(4, 0)
    spaces = zipfx.analyze(model, data[0])
    other = spaces.permuted(model, spaces.random_permutations(3))
    merged = zipfx.zip([model, other], data, partial="4", matcher="permute", progress=False)
    assert [s.correlation for s in merged.meta["zipfx"].spaces] == pytest.approx([1, 1])
