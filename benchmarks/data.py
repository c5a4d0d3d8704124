"""CIFAR-10 as uint8 tensors in class order, from one of two sources behind one function.

``jpeg``: the shared folder's zip of JPEG images, decoded once into a cache outside the repository
(``ZIPFX_CACHE``, else ``$XDG_CACHE_HOME/zipfx``, else ``~/.cache/zipfx``).
``torchvision``: `torchvision.datasets.CIFAR10`, which downloads the lossless original to ``root``.
"""

from __future__ import annotations

import argparse
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import zoo

Source = Literal["jpeg", "torchvision"]


@dataclass(frozen=True)
class Images:
    """Images (N, 3, 32, 32) uint8 and their labels (N,) int64, sorted by label."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.images[index], self.labels[index])

    def __len__(self) -> int:
        return self.labels.numel()


def read(source: Source = "jpeg", root: str | Path = "data") -> dict[str, Images]:
    """``{"train": 50,000 images, "test": 10,000 images}``; ``root`` is torchvision's folder."""
    if source == "torchvision":
        return {split: _torchvision(Path(root), split) for split in ("train", "test")}
    archive = zoo.shared_path("data", "cifar10-jpeg.zip")
    return {split: _cached(archive, split) for split in ("train", "test")}


def subset(images: Images, count: int = 4000) -> Images:
    """The fixed random ``count`` images (seed 0) on which every figure is measured."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order[:count]]


def calibration(
    train: Images,
    tasks: Sequence[Sequence[int]],
    per_task: int,
    normalise: Callable[[Tensor], Tensor],
    *,
    seed: int,
    batch_size: int = 100,
) -> list[Tensor]:
    """Batches (batch_size, 3, 32, 32) float32 that mix ``per_task`` images of each task's classes.

    Images are drawn without replacement within a task and flipped left-right with probability 1/2.
    """
    generator = torch.Generator().manual_seed(seed)
    picked = []
    for classes in tasks:
        of_task = torch.isin(train.labels, torch.tensor(classes)).nonzero().flatten()
        picked.append(of_task[torch.randperm(of_task.numel(), generator=generator)[:per_task]])
    index = torch.cat(picked)
    images = train.images[index[torch.randperm(index.numel(), generator=generator)]]
    flip = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    return list(torch.split(normalise(images), batch_size))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options ``--data`` and ``--root`` that choose the source of `read`."""
    parser.add_argument("--data", choices=("jpeg", "torchvision"), default="jpeg")
    parser.add_argument("--root", default="data", help="folder of torchvision's copy")


def _cached(archive: Path, split: str) -> Images:
    folder = os.environ.get("ZIPFX_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = (Path(folder) if folder else home / "zipfx") / f"{archive.stem}-{split}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images, labels = _decode(archive, split)
        temporary = path.with_suffix(f".{os.getpid()}.npz")  # never half a file under the name
        np.savez(temporary, images=images, labels=labels)
        temporary.rename(path)
    with np.load(path) as stored:
        return Images(torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"]))


def _decode(archive: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels (N,), folders (classes) and files in alphabetical order."""
    with zipfile.ZipFile(archive) as files:
        names = sorted(
            name
            for name in files.namelist()
            if name.startswith(f"{split}/") and name.endswith(".jpg")
        )
        classes = sorted({name.split("/")[1] for name in names})
        pixels = np.stack(
            [np.asarray(Image.open(io.BytesIO(files.read(n))).convert("RGB")) for n in names]
        )
    labels = np.array([classes.index(name.split("/")[1]) for name in names], dtype=np.int64)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels


def _torchvision(root: Path, split: str) -> Images:
    from torchvision.datasets import CIFAR10

    dataset = CIFAR10(str(root), train=split == "train", download=True)
    labels = torch.tensor(dataset.targets)
    images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    return Images(images, labels)[labels.argsort(stable=True)]
