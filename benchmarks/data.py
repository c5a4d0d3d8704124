"""Labelled images from one of several sources behind one function, decoded when they are needed.

- ``jpeg``: CIFAR-10 from the shared folder's zip of JPEG images, decoded once into a cache outside
  the repository (``ZIPFX_CACHE``, else ``$XDG_CACHE_HOME/zipfx``, else ``~/.cache/zipfx``).
- ``torchvision:cifar10`` and ``torchvision:cifar100``: the lossless originals, as torchvision
  unpacks them into ``root``; downloaded only where that is asked for.
- ``torchvision:imagenet``: ILSVRC 2012 as torchvision lays it out (``train/``, ``val/``,
  ``meta.bin``; the archives are unpacked where only they are there).
- ``torchvision:imagefolder``: ``train/CLASS/*`` and ``val/CLASS/*`` (or ``test/CLASS/*``).
"""

from __future__ import annotations

import argparse
import io
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import zoo

SOURCES = (
    "jpeg",
    *(f"torchvision:{kind}" for kind in ("cifar10", "cifar100", "imagenet", "imagefolder")),
)


@dataclass(frozen=True)
class Images:
    """Labels (N,) int64, sorted, of ``classes`` classes, and what decodes the images themselves.

    ``pixels``: indices (n,) -> images (n, 3, H, W) uint8.
    """

    labels: Tensor
    pixels: Callable[[Tensor], Tensor]
    classes: int

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.labels[index], lambda i: self.pixels(index[i]), self.classes)

    def __len__(self) -> int:
        return self.labels.numel()


@dataclass(frozen=True)
class Batches:
    """Normalised batches (size, 3, H, W) float32, made anew each time they are run through, so
    that no more than one is in memory. ``flips`` (N,) bool: the images to mirror left-right."""

    images: Images
    normalise: Callable[[Tensor], Tensor]
    flips: Tensor | None = None
    size: int = 100

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.arange(len(self.images)).split(self.size):
            pixels = self.images.pixels(index)
            if self.flips is not None:
                pixels = torch.where(self.flips[index, None, None, None], pixels.flip(3), pixels)
            yield self.normalise(pixels)


def read(
    source: str = "jpeg", root: str | Path = "data", *, size: int = 224, download: bool = False
) -> dict[str, Images]:
    """``{"train": images, "test": images}`` of one of the `SOURCES`.

    Args:
        source: one of `SOURCES`.
        root: torchvision's folder.
        size: images of a folder are resized (the shorter side to 8 / 7 of it) and cropped to it.
        download: fetch CIFAR where it is not in ``root``.

    Raises:
        FileNotFoundError: the data is not there; the message says what to do.
    """
    if source == "jpeg":
        archive = zoo.shared_path("data", "cifar10-jpeg.zip")
        return {split: _cached(archive, split) for split in ("train", "test")}
    kind = source.removeprefix("torchvision:")
    folders = kind in ("imagenet", "imagefolder")
    if folders and download:
        raise ValueError(f"{source} can not be downloaded: put it into {root}")
    try:
        if folders:
            return {s: _folder(kind, Path(root), s, size) for s in ("train", "test")}
        return {s: _cifar(kind, Path(root), s, download) for s in ("train", "test")}
    except (RuntimeError, FileNotFoundError) as error:
        advice = "" if folders else "; --download fetches it"
        raise FileNotFoundError(f"{source} is not in {root}: {error}{advice}") from error


def subset(images: Images, count: int = 4000, classes: Sequence[int] | None = None) -> Images:
    """The fixed random ``count`` images (seed 0, of these classes) for all figures."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    if classes is not None:
        order = order[torch.isin(images.labels[order], torch.tensor(classes))]
    return images[order[:count]]


def calibration(
    train: Images,
    tasks: Sequence[Sequence[int]],
    per_task: int,
    normalise: Callable[[Tensor], Tensor],
    *,
    seed: int,
    flips: bool = True,
    batch_size: int = 100,
) -> Batches:
    """Batches that mix ``per_task`` images of each task's classes.

    Images are drawn without replacement within a task and flipped left-right with probability 1/2.
    The same seed gives the same images with and without flips. Too few are a `ValueError`.
    """
    generator = torch.Generator().manual_seed(seed)
    picked = []
    for classes in tasks:
        of_task = torch.isin(train.labels, torch.tensor(classes)).nonzero().flatten()
        if of_task.numel() < per_task:
            raise ValueError(f"{per_task} images of a task with {of_task.numel()}: ask for less")
        picked.append(of_task[torch.randperm(of_task.numel(), generator=generator)[:per_task]])
    index = torch.cat(picked)
    images = train[index[torch.randperm(index.numel(), generator=generator)]]
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return Batches(images, normalise, mirrored if flips else None, batch_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose the source of `read`; `chosen` reads it."""
    parser.add_argument("--data", choices=SOURCES, default="jpeg", help="source of the images")
    parser.add_argument("--root", default="data", help="folder of torchvision's data")
    parser.add_argument("--size", type=int, default=224, help="pixels a side, of image folders")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR where it is absent")


def chosen(options: argparse.Namespace) -> dict[str, Images]:
    """What the options of `add_arguments` choose."""
    return read(options.data, options.root, size=options.size, download=options.download)


def _of_arrays(images: Tensor, labels: Tensor, classes: int) -> Images:
    return Images(labels, images.__getitem__, classes)


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
        images, labels = stored["images"], stored["labels"]
    classes = int(labels.max()) + 1
    return _of_arrays(torch.from_numpy(images), torch.from_numpy(labels), classes)


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


def _cifar(kind: str, root: Path, split: str, download: bool) -> Images:
    from torchvision import datasets

    of_kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    dataset = of_kind(str(root), train=split == "train", download=download)
    labels = torch.tensor(dataset.targets)
    order = labels.argsort(stable=True)
    images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2)[order].contiguous()
    return _of_arrays(images, labels[order], len(dataset.classes))


def _folder(kind: str, root: Path, split: str, size: int) -> Images:
    from torchvision import datasets, transforms

    if split == "test" and (kind == "imagenet" or (root / "val").is_dir()):
        split = "val"
    dataset: Any
    if kind == "imagenet":
        dataset = datasets.ImageNet(str(root), split)
    else:
        dataset = datasets.ImageFolder(str(root / split))
    prepare = transforms.Compose(
        [
            transforms.Resize(round(size * 8 / 7)),  # 256 for 224, as torchvision's models are used
            transforms.CenterCrop(size),
            transforms.PILToTensor(),
        ]
    )

    def pixels(index: Tensor) -> Tensor:
        return torch.stack([prepare(dataset.loader(dataset.samples[i][0])) for i in index.tolist()])

    return Images(torch.tensor(dataset.targets), pixels, len(dataset.classes))
