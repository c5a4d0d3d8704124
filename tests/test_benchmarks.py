"""The benchmarks' own parts, on tiny data in the layouts of the real: nothing of ../shared."""

from __future__ import annotations

import csv
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import datasets
from torchvision.models import get_model

import zipfx
from benchmarks import (
    ablations,
    architectures,
    beyond,
    characters,
    checkpoints,
    data,
    evaluate,
    harness,
    matchers,
    repairs,
    several,
    tables,
    timm_models,
    zoo,
)
from benchmarks.harness import Bench, Method, Sizes

PER_CLASS = {"train": 4, "test": 2}


def _pickle(path: Path, **content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


def _pixels(labels: Sequence[int]) -> np.ndarray:
    """(n, 3072) uint8, every value of an image its label."""
    return np.repeat(np.array(labels, dtype=np.uint8)[:, None], 3072, axis=1)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with CIFAR-10 and CIFAR-100 as torchvision unpacks them, a few images a class."""
    ten, hundred = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-100-python"
    train = [*range(10)][::-1] * PER_CLASS["train"]
    for i in range(5):
        part = train[i * 8 : (i + 1) * 8]
        _pickle(ten / f"data_batch_{i + 1}", data=_pixels(part), labels=part)
    test = [*range(10)] * PER_CLASS["test"]
    _pickle(ten / "test_batch", data=_pixels(test), labels=test)
    _pickle(ten / "batches.meta", label_names=[f"class {i}" for i in range(10)])
    for split, count in PER_CLASS.items():
        labels = [*range(100)] * count
        _pickle(hundred / split, data=_pixels(labels), fine_labels=labels)
    _pickle(hundred / "meta", fine_label_names=[f"class {i}" for i in range(100)])
    for kind in (datasets.CIFAR10, datasets.CIFAR100):  # the real files' checksums are not ours
        for name in ("train_list", "test_list"):
            monkeypatch.setattr(kind, name, [[file, None] for file, _ in getattr(kind, name)])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    return tmp_path


def _folders(root: Path, split: str, classes: Sequence[str], count: int) -> None:
    for label, name in enumerate(classes):
        folder = root / split / name
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (50 + i, 40), (10 * label,) * 3).save(folder / f"{i}.JPEG")


def _state(path: Path, width: int = 1, outputs: int = 10, seed: int = 0, **facts: object) -> Path:
    torch.manual_seed(seed)
    model = zoo.ResNet20(width, outputs)
    torch.save({"state_dict": model.state_dict(), **facts}, path)
    return path


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_in_torchvisions_layout(cifar: Path, classes: int) -> None:
    images = data.read(f"torchvision:cifar{classes}", cifar)
    for split, count in PER_CLASS.items():
        found = images[split]
        assert found.classes == classes
        assert torch.equal(found.labels, torch.arange(classes).repeat_interleave(count))
        pixels = found.pixels(torch.arange(len(found)))
        assert pixels.shape == (classes * count, 3, 32, 32)
        assert pixels.dtype == torch.uint8
        assert torch.equal(pixels[:, 0, 0, 0].long(), found.labels)


@pytest.mark.parametrize("kind", ["imagefolder", "imagenet"])
def test_image_folders_are_resized_and_cropped(tmp_path: Path, kind: str) -> None:
    names = ("n01", "n02", "n03")
    _folders(tmp_path, "train", names, 4)
    _folders(tmp_path, "val", names, 2)
    torch.save(({name: (name,) for name in names}, []), tmp_path / "meta.bin")
    images = data.read(f"torchvision:{kind}", tmp_path, size=28)
    assert [len(images[split]) for split in ("train", "test")] == [12, 6]
    pixels = images["test"].pixels(torch.tensor([0, 3, 5]))
    assert pixels.shape == (3, 3, 28, 28)
    assert pixels[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert images["test"].labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_is_absent_is_said_and_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cifar100 is not in .*--download fetches it"):
        data.read("torchvision:cifar100", tmp_path)
    with pytest.raises(FileNotFoundError, match="imagefolder is not in"):
        data.read("torchvision:imagefolder", tmp_path)
    with pytest.raises(ValueError, match="imagenet can not be downloaded"):
        data.read("torchvision:imagenet", tmp_path, download=True)


def test_calibration_images_are_of_each_task_and_the_same_again(cifar: Path) -> None:
    train = data.read("torchvision:cifar10", cifar)["train"]
    tasks, normalise = [(0, 1), (7, 8, 9)], Tensor.float

    def labels(seed: int) -> Tensor:
        batches = data.calibration(train, tasks, 5, normalise, seed=seed, batch_size=4)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        first, second = torch.cat([*batches]), torch.cat([*batches])
        assert torch.equal(first, second)
        return first[:, 0, 0, 0]

    assert sum(label in (0, 1) for label in labels(0).tolist()) == 5
    assert sum(label in (7, 8, 9) for label in labels(0).tolist()) == 5
    assert not torch.equal(labels(0), labels(1))
    with pytest.raises(ValueError, match="9 images of a task with 8"):
        data.calibration(train, tasks, 9, normalise, seed=0)


def test_mirrored_images_are_the_same_images() -> None:
    pixels = torch.arange(8, dtype=torch.uint8).view(2, 1, 1, 4)
    images = data.Images(torch.tensor([0, 1]), pixels.__getitem__, 2)
    (batch,) = data.Batches(images, Tensor.float, torch.tensor([False, True]))
    assert batch.flatten().tolist() == [0, 1, 2, 3, 7, 6, 5, 4]


def test_joint_accuracy_by_shared_embedding() -> None:
    embeddings = torch.eye(4)
    outputs = [
        torch.tensor([[9.0, 0, 8, 0], [0, 1, 0, 2], [0, 0, 1, 0]]),
        torch.tensor([[0.0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0.1, 0]]),
    ]
    # Lengths do not count: the second head's cosine 1 to class 2 wins in the first row.
    found = evaluate.accuracy(outputs, torch.tensor([2, 1, 0]), [(0, 1), (2, 3)], embeddings)
    assert found.joint == pytest.approx(200 / 3)
    assert found.tasks == (100.0, 100.0)
    one = evaluate.accuracy(outputs[:1], torch.tensor([2, 1, 0]), [(0, 1), (2, 3)], embeddings)
    assert one.joint == 0  # the first head alone
    assert one.tasks == (100.0, 100.0)


def test_joint_accuracy_by_softmax_per_head() -> None:
    labels, tasks = torch.tensor([0, 3]), [(0, 1), (2, 3)]
    a = torch.tensor([[5.0, 0.0], [1.0, 0.0]])  # logits of its own two classes only
    b = torch.tensor([[98.0, 99.0], [90.0, 99.0]])  # large logits, but less sure of the first
    wide = [evaluate.expand(a, (0, 1), 4), evaluate.expand(b, (2, 3), 4)]
    found = evaluate.accuracy(wide, labels, tasks)
    assert (found.joint, found.tasks) == (100.0, (100.0, 100.0))
    alone = evaluate.accuracy(wide[:1], labels, tasks)  # knows nothing of classes 2 and 3
    assert alone.joint == 50
    full = [torch.tensor([[5.0, 0, 50, 0], [1, 0, 0, 0]]), torch.tensor([[0.0, 70, 98, 99]] * 2)]
    assert evaluate.accuracy(full, labels, tasks).joint == 50  # what is not of a task is ignored


def test_heads_of_equal_tasks_are_averaged() -> None:
    sure, unsure = torch.tensor([[3.0, 0, 0]]), torch.tensor([[0.0, 0.5, 0]])
    found = evaluate.accuracy([sure, unsure], torch.tensor([0]), [(0, 1, 2)] * 2)
    assert (found.joint, found.tasks) == (100.0, (100.0, 0.0))


def test_stages_blocks_and_class_ids() -> None:
    assert checkpoints.stages(zoo.ResNet20()) == ["layer1", "layer2", "layer3"]
    assert checkpoints.blocks(zoo.ResNet20())[::4] == ["layer1.0", "layer2.1", "layer3.2"]
    resnet = get_model("resnet18")
    assert checkpoints.stages(resnet) == [f"layer{i}" for i in range(1, 5)]
    assert checkpoints._class_ids("0-2,7") == (0, 1, 2, 7)


def test_checkpoints_of_any_torchvision_architecture(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        paths.append(tmp_path / f"{name}.pt")
        torch.save(get_model("squeezenet1_1", num_classes=7).state_dict(), paths[-1])
    found = checkpoints.from_files(paths, "torchvision:squeezenet1_1", 7)
    assert found.name == "a+b"
    assert found.tasks == [tuple(range(7))] * 2
    assert found.models[1](torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    with pytest.raises(ValueError, match="1 tasks for 2 checkpoints"):
        checkpoints.from_files(paths, "torchvision:squeezenet1_1", 7, tasks=[(0,)])
    with pytest.raises(ValueError, match="unknown architecture 'vgg'"):
        checkpoints.from_files(paths, "vgg", 7)


class Tiny(nn.Module):
    """Two stages of one layer and a head: what a merge of it takes is little but the harness."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = (
            nn.Sequential(nn.Conv2d(i, 6, 3, 4, 1), nn.BatchNorm2d(6), nn.ReLU()) for i in (3, 6)
        )
        self.linear = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.layer2(self.layer1(x)).mean((2, 3)))
        return logits


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of two `Tiny` networks, which the harness then builds."""

    def build(architecture: str, state: Mapping[str, Tensor]) -> nn.Module:
        model = Tiny()
        model.load_state_dict(state)
        return model.eval()

    monkeypatch.setattr(checkpoints, "build", build)
    monkeypatch.setattr(sys, "argv", ["benchmark"])  # results quote it
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        torch.save(Tiny().state_dict(), path)
    return paths


def _options(root: Path, paths: Sequence[Path]) -> list[str]:
    sizes = ["--images", "10", "--reset-images", "10", "--test-images", "20", "--batch-size", "20"]
    models = ["--models", *map(str, paths)]
    return ["--data", "torchvision:cifar10", "--root", str(root), *models, *sizes]


def _rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert comments[0].startswith("# command: `python -m benchmarks.")
    return list(csv.DictReader(lines[len(comments) :]))


@pytest.mark.slow
def test_the_table_has_every_row_as_markdown_csv_and_plots(
    cifar: Path, pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "table.md"
    tasks = ["--tasks", "0-4", "5-9"]
    arguments = [*_options(cifar, pair), *tasks, "--seeds", "2"]
    matchers.main([*arguments, "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    assert text.splitlines()[2].startswith("- command: `python -m benchmarks.matchers")
    zips = [f"zip {to}, alpha 0.3, beta 1" for to in ("full", "to layer2", "to layer1")]
    zips = [f"{zips[0]}, lstsq", *zips]
    originals = ["model a", "model b", "ensemble", "ensemble, statistics reset"]
    simple = ["weight averaging", "weight matching", "permute", "k-means", "optimal"]
    expected = [*originals, *simple, *zips]
    table = text.split("## a+b")[1]
    assert [n for n in expected if f"\n| {n} |" not in table] == []
    assert table.count(" ± ") > len(expected)
    assert text.strip() in capsys.readouterr().out.strip()
    rows = _rows(tmp_path / "out" / "table_a+b.csv")
    assert [row["method"] for row in rows] == [*originals[:3], *np.repeat(expected[3:], 2)]
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert (rows[-1]["layers_zipped"], rows[-1]["layers"]) == ("1", "3")
    assert int(rows[-1]["parameters"]) > int(rows[0]["parameters"])
    for name in ("flops", "layers", "correlation"):
        with Image.open(tmp_path / "out" / f"table_a+b_{name}.png") as picture:
            assert picture.size[0] > 300
            assert picture.info["Description"].startswith("- command: ")


@pytest.mark.slow
def test_sweeps_write_a_table_csv_and_plot_each(
    cifar: Path, pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALPHAS", "BETAS"):
        monkeypatch.setattr(ablations, name, (0.5,))
    two = {"permute": zipfx.Permute(), "zip": zipfx.Zip()}
    monkeypatch.setattr(ablations, "matchers_of", lambda options: two)
    out = tmp_path / "sweeps.md"
    short = ["--cuts", "layer1", "--counts", "5", "41"]  # there are only 40
    sweeps = ["--sweeps", *ablations.SWEEPS, "width"]
    ablations.main([*_options(cifar, pair), *short, *sweeps, "--out", str(out)])
    counts = {"layers": 4, "alpha": 2, "beta": 2, "similarity": 6, "unmerge": 4, "images": 4}
    for name, count in counts.items():
        rows = _rows(tmp_path / f"sweeps_a+b_{name}.csv")
        assert len(rows) == count, name
        assert (tmp_path / f"sweeps_a+b_{name}.png").exists()
        assert f"### a+b: {name}" in out.read_text(encoding="utf-8")
    assert {row["x"] for row in _rows(tmp_path / "sweeps_a+b_images.csv")} == {"5"}
    assert {row["channels"] for row in _rows(tmp_path / "sweeps_width.csv")} == {"6"}
    assert (tmp_path / "sweeps_width.png").exists()


@pytest.mark.slow
def test_repairs_are_compared_with_data_for_all_and_for_each(
    cifar: Path, pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairs, "COUNTS", (5, 41))  # there are only 40
    for name in ("RIDGES", "SAMPLES", "ROUNDS"):
        monkeypatch.setattr(repairs, name, getattr(repairs, name)[:2])
    monkeypatch.setattr(repairs, "MATCHERS", ("permute",))
    out = tmp_path / "repairs.md"
    arguments = [*_options(cifar, pair), "--tasks", "0-4", "5-9", "--cuts", "layer1"]
    repairs.main([*arguments, "--out", str(out)])
    counts = dict.fromkeys(("images", "samples", "rounds"), 2) | {"ridge": 3, "loaders": 4}
    for name, count in (counts | {"table": 10, "matchers": 6}).items():
        rows = _rows(tmp_path / f"repairs_a+b_{name}.csv")
        assert len(rows) == count, name
        assert (tmp_path / f"repairs_a+b_{name}.png").exists()
    methods = [row["method"] for row in _rows(tmp_path / "repairs_a+b_table.csv")]
    assert methods[-2:] == ["zip to layer1, bn", "zip to layer1, refit"]


def test_heads_of_other_classes_are_merged_only_up_to_a_cut(cifar: Path, tmp_path: Path) -> None:
    paths = [
        _state(tmp_path / f"{name}.pt", 1, 3, seed, classes=classes)
        for seed, (name, classes) in enumerate({"a": [0, 2, 4], "b": [1, 3, 5]}.items())
    ]
    images = data.read("torchvision:cifar10", cifar)
    found = checkpoints.from_files(paths, "resnet20", 10)
    bench = Bench(found, images, Sizes(images=5, reset=5, test=8, batch=10))
    assert set(bench.test.labels.tolist()) <= set(range(6))
    methods = [Method("all", "zip"), Method("some", "zip", "layer1")]
    (row,) = harness.run(bench, methods, seeds=1)
    assert row.name == "some"
    assert len(row.accuracies[0].tasks) == 2


def test_a_matcher_that_fails_leaves_a_row_without_numbers(cifar: Path, tmp_path: Path) -> None:
    paths = [_state(tmp_path / f"{name}.pt", seed=seed) for seed, name in enumerate("ab")]
    bench = Bench(
        checkpoints.from_files(paths, "resnet20", 10),
        data.read("torchvision:cifar10", cifar),
        Sizes(images=5, reset=5, test=8, batch=10),
    )
    failing = Method("too large", zipfx.Optimal(most=1), "layer1")
    table = tables.accuracy_table(
        "x", [*harness.originals(bench), *harness.run(bench, [failing], 1)]
    )
    assert "| too large | - | - |" in table
    assert "No numbers for too large: " in table


@pytest.mark.slow
def test_architectures_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = tmp_path / "rows.json", tmp_path / "table.md"
    options = ["architectures", "--quick", "--rows", str(rows), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*options, "--only", "squeezenet1_1"])
    architectures.main()
    first = out.read_text()
    assert "| squeezenet1_1 |" in first
    assert "exact 1 of 1" in first
    assert len(rows.read_text().splitlines()) == 1
    monkeypatch.setattr(architectures, "quick", lambda *_: pytest.fail("measured again"))
    architectures.main()
    table = [
        [line for line in text.splitlines() if "|" in line] for text in (first, out.read_text())
    ]
    assert table[0] == table[1]


@pytest.mark.slow
def test_models_of_timm_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    rows, out = tmp_path / "rows.json", tmp_path / "table.md"
    options = ["timm_models", "--rows", str(rows), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*options, "--only", "lcnet_035", "no_such_model"])
    timm_models.main()
    text = out.read_text()
    assert "Laws 1 to 3 hold for 1 of 2 models" in text
    assert "RuntimeError: Unknown model (no_such_model) |" in text
    assert "| lcnet_035 | symbolic | 64 |" in text
    monkeypatch.setattr(timm_models, "apart", lambda *_: pytest.fail("measured again"))
    timm_models.main()
    assert [line for line in out.read_text().splitlines() if "|" in line] == [
        line for line in text.splitlines() if "|" in line
    ]


def test_a_model_of_timm_that_ends_its_process_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_models, "fill", lambda row: os._exit(3))
    assert timm_models.apart("a", 60).failures == {"process": "the process ended with code 3"}
    monkeypatch.setattr(timm_models, "fill", lambda row: time.sleep(60))
    assert timm_models.apart("a", 0.1).failures == {"process": "takes longer than 0 s"}


def test_where_a_model_of_timm_keeps_the_laws() -> None:
    row = timm_models.Row("a", law_1=1e-14, law_2=1.0, law_3=1e-8, heads=0.0)
    assert not row.holds
    row.rounded = True  # to float32, in between
    assert row.holds
    row.law_2 = 1.1
    assert not row.holds
    assert len(set(timm_models.NAMES)) == 200


@pytest.mark.slow
def test_language_models_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, kept = tmp_path / "table.md", tmp_path / "models"
    options = ["--quick", "--models", str(kept), "--out", str(out), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["characters", *options])
    characters.main([*options, "--kinds", "own"])
    assert len(list(kept.iterdir())) == 1
    for name in ("ensemble", "zip, refit, logits", "same, a loader each: own heads"):
        assert out.read_text().count(f"| {name} |") == 1
    monkeypatch.setattr(characters.characters, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(characters.characters, "rows", lambda *_: [("all", [1.0, 2.0], 1.0)])
    characters.main([*options, "--kinds", "own"])
    assert "| all | 1.00 | 2.00 | 1.50 | 1.00 |" in out.read_text()


@pytest.mark.slow
def test_several_models_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    network, train = several.digits.Network, several.digits.train
    monkeypatch.setattr(several.digits, "Network", lambda: network(8))
    monkeypatch.setattr(several.digits, "train", lambda *a: train(*a, epochs=4))
    found = several.measured(several.SHARES[3], 1)
    assert len(found) == 1 + 2 * len(several.REPAIRS)
    assert all(0 <= value <= 100 for scores in found.values() for pair in scores for value in pair)
    assert found["zip, refit"][0][0] > found["zip, none"][0][0]


def test_what_a_refitted_output_misses_of_two_features_is_that_of_least_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beyond, "RIDGE", 0)
    torch.manual_seed(0)
    n, inputs, samples = 3, 5, 200
    tasks = []
    for _ in range(2):
        x = torch.cat([torch.ones(samples, 1), torch.randn(samples, inputs)], 1).double()
        tasks.append((x, x @ torch.randn(inputs + 1, n).double() + torch.randn(samples, n)))
    products = [(r := torch.cat(task, 1)).mT @ r / samples for task in tasks]
    loss, variance = beyond.missed(products, torch.arange(n))

    def fitted(x: Tensor, y: Tensor) -> Tensor:
        return x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]

    for i in range(n):
        for j in range(n):
            (x, y), (other, z) = tasks
            both = torch.cat([x, other]), torch.cat([y[:, i], z[:, j]])
            across = (fitted(*both) - both[1]).square().sum() / samples
            mean = fitted(x, (y[:, i] + y[:, j]) / 2)
            within = sum((mean - y[:, k]).square().sum() / samples for k in (i, j))
            assert float(loss[i, n + j]) == pytest.approx(float(across), rel=1e-9)
            assert float(loss[i, j]) == pytest.approx(float(within), rel=1e-9)
    assert torch.allclose(variance, torch.cat([y.var(0, correction=0) for _, y in tasks]))
