"""Real CIFAR-10 checkpoints: the network class, and where the state dicts lie.

The checkpoints are not part of this repository. They are looked for in ``../shared`` beside the
repository root, or in the folder that the environment variable ``ZIPFX_SHARED`` names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, pad, relu

Shortcut = Literal["conv", "pad"]

ALL_CLASSES = tuple(range(10))


def shared_path(*parts: str) -> Path:
    """A path in the shared folder; `FileNotFoundError` with what to do where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("ZIPFX_SHARED", default)).joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: set the environment variable ZIPFX_SHARED to the folder that "
            "holds zoo/ (checkpoints) and data/ (images)"
        )
    return path


class PadShortcut(nn.Module):
    """Shortcut option A of He et al. (2016): every second pixel, zeros for the new channels.

    (B, C, H, W) -> (B, C + 2 * added, H / 2, W / 2), without parameters.
    """

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added, self.added))


class Block(nn.Module):
    """Basic residual block: (B, inputs, H, W) -> (B, planes, H / stride, W / stride)."""

    def __init__(self, inputs: int, planes: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != planes:
            self.shortcut = (
                PadShortcut((planes - inputs) // 2)
                if shortcut == "pad"
                else nn.Sequential(
                    nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(planes),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR (He et al., 2016): (B, 3, 32, 32) -> (B, outputs).

    ``width`` 1 has 16, 32 and 64 channels; ``shortcut`` says what stands where the shape changes:
    ``"conv"`` a 3 x 3 convolution and BatchNorm, ``"pad"`` the parameter-free option A.
    """

    def __init__(self, width: int = 1, outputs: int = 10, shortcut: Shortcut = "conv") -> None:
        super().__init__()
        planes = [16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, planes[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.layer1 = _stage(planes[0], planes[0], 1, shortcut)
        self.layer2 = _stage(planes[0], planes[1], 2, shortcut)
        self.layer3 = _stage(planes[1], planes[2], 2, shortcut)
        self.linear = nn.Linear(planes[2], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = adaptive_avg_pool2d(x, 1).flatten(1)
        logits: Tensor = self.linear(x)
        return logits


def _stage(inputs: int, planes: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    return nn.Sequential(
        Block(inputs, planes, stride, shortcut),
        Block(planes, planes, 1, shortcut),
        Block(planes, planes, 1, shortcut),
    )


@dataclass(frozen=True)
class Info:
    """What a checkpoint needs to be used: class ids in 0..9, and the input normalisation.

    ``mean`` and ``std`` are per channel, for pixels in 0..1. ``embeddings`` (10, 384) holds the
    unit-length text embedding of each class name where the network's output is one, else None.
    """

    name: str
    classes: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    embeddings: Tensor | None = None

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images (N, 3, 32, 32) in 0..255 -> float32 of the same shape."""
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN = tuple(v / 255 for v in (125.3, 123.0, 113.9))
CIFAR_STD = tuple(v / 255 for v in (63.0, 62.1, 66.7))


def load(name: str) -> tuple[ResNet20, Info]:
    """The checkpoint ``name`` (such as ``"cifar10_text_w2_a"``), in eval mode, and its facts."""
    stored = _read(f"{name}.pt")
    if "state_dict" not in stored:  # a bare state dict: trained on all classes, option A
        info = Info(name, ALL_CLASSES, IMAGENET_MEAN, IMAGENET_STD)
        state = stored
    else:
        state = stored["state_dict"]
        embeddings = None
        if stored["loss"] == "text":
            embeddings = _read("cifar10_text_embeddings.pt")["embedding"]
        info = Info(name, tuple(stored["classes"]), CIFAR_MEAN, CIFAR_STD, embeddings)
    return resnet20(state), info


def resnet20(state: Mapping[str, Tensor]) -> ResNet20:
    """The `ResNet20` that this state dict is of, in eval mode."""
    width, outputs = len(state["conv1.weight"]) // 16, len(state["linear.bias"])
    convolutions = any("shortcut.0" in name for name in state)
    model = ResNet20(width, outputs, "conv" if convolutions else "pad")
    model.load_state_dict(state)
    return model.eval()


def _read(file: str) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(shared_path("zoo", file), weights_only=True)
    return stored
