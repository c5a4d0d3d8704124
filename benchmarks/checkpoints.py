"""Sets of two or more checkpoints of one architecture, each with the task it was trained on.

The sets of ``../shared/zoo`` go by name. Your own are files: a state dict, or a dict that holds
it as ``state_dict`` and, where it was not trained on all classes, their ids as ``classes``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import zoo

SETS = {
    "text_w2": ("cifar10_text_w2_a", "cifar10_text_w2_b"),
    "ce_w1": ("cifar10_ce_w1_a", "cifar10_ce_w1_b"),
    "resnet20": ("cifar10_resnet20_a", "cifar10_resnet20_b"),
    "resnet20_abd": ("cifar10_resnet20_a", "cifar10_resnet20_b", "cifar10_resnet20_d"),
}
NORMALISATIONS = {
    "cifar": (zoo.CIFAR_MEAN, zoo.CIFAR_STD),
    "imagenet": (zoo.IMAGENET_MEAN, zoo.IMAGENET_STD),
}


@dataclass(frozen=True)
class Checkpoints:
    """K models in eval mode, and for each the ids of the classes of its task.

    ``embeddings`` (classes, D): unit-length targets that all models share; None: the outputs are
    logits, of all classes or of the task's own ones in this order.
    """

    name: str
    models: Sequence[nn.Module]
    tasks: Sequence[tuple[int, ...]]
    normalise: Callable[[Tensor], Tensor]
    embeddings: Tensor | None = None

    @property
    def letters(self) -> str:
        return "abcdefghijklmnopqrstuvwxyz"[: len(self.models)]

    @property
    def width(self) -> int:
        """Channels that the first convolution makes."""
        return next(m.out_channels for m in self.models[0].modules() if isinstance(m, nn.Conv2d))


def stages(model: nn.Module) -> list[str]:
    """The names of a model's stages, where the paper cuts: its children that have children.

    The last child with weights is the classifier, and no stage: a cut there would leave no head.
    """
    weighted = [n for n, child in model.named_children() if any(True for _ in child.parameters())]
    return [n for n in weighted[:-1] if any(True for _ in model.get_submodule(n).children())]


def blocks(model: nn.Module) -> list[str]:
    """The names of the blocks of all stages."""
    return [
        f"{stage}.{name}"
        for stage in stages(model)
        for name, block in model.get_submodule(stage).named_children()
        if any(True for _ in block.parameters())
    ]


def named(name: str) -> Checkpoints:
    """One of the `SETS`."""
    loaded = [zoo.load(member) for member in SETS[name]]
    info = loaded[0][1]
    tasks = [i.classes for _, i in loaded]
    return Checkpoints(name, [m for m, _ in loaded], tasks, info.normalise, info.embeddings)


def from_files(
    paths: Sequence[Path],
    architecture: str,
    classes: int,
    *,
    tasks: Sequence[tuple[int, ...]] | None = None,
    normalisation: str = "imagenet",
    embeddings: Path | None = None,
) -> Checkpoints:
    """A set of your own.

    Args:
        paths: of the files, as the module describes them.
        architecture: ``resnet20`` (`zoo.ResNet20`) or ``torchvision:NAME``.
        classes: how many the data has.
        tasks: class ids of each model, instead of what the files say.
        normalisation: one of `NORMALISATIONS`.
        embeddings: file with the tensor (classes, D), bare or as ``embedding``.
    """
    if len(paths) < 2:
        raise ValueError(f"a set needs two or more checkpoints, not {len(paths)}")
    if tasks is not None and len(tasks) != len(paths):
        raise ValueError(f"{len(tasks)} tasks for {len(paths)} checkpoints: give one for each")
    stored = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    models = [build(architecture, s.get("state_dict", s)) for s in stored]
    found = [tuple(s["classes"]) if "classes" in s else tuple(range(classes)) for s in stored]
    targets = None
    if embeddings is not None:
        targets = torch.load(embeddings, weights_only=True, map_location="cpu")
        targets = targets["embedding"] if isinstance(targets, Mapping) else targets
    mean, std = NORMALISATIONS[normalisation]
    name = "+".join(path.stem for path in paths)
    return Checkpoints(
        name, models, tasks or found, zoo.Info(name, (), mean, std).normalise, targets
    )


def build(architecture: str, state: Mapping[str, Tensor]) -> nn.Module:
    """A model of this architecture and as many outputs as the state dict has, in eval mode."""
    if architecture == "resnet20":
        return zoo.resnet20(state)
    library, _, name = architecture.partition(":")
    if library != "torchvision" or not name:
        raise ValueError(f"unknown architecture {architecture!r}: resnet20, or torchvision:NAME")
    from torchvision.models import get_model

    outputs = [len(tensor) for tensor in state.values() if tensor.ndim >= 2][-1]
    model: nn.Module = get_model(name, weights=None, num_classes=outputs)
    model.load_state_dict(state)
    return model.eval()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose sets of checkpoints; `chosen` reads them."""
    parser.add_argument("--sets", nargs="+", choices=SETS, help="of ../shared")
    parser.set_defaults(default_sets=["ce_w1"])
    parser.add_argument(
        "--models", nargs="+", type=Path, action="append", help="a set of your own; may be repeated"
    )
    parser.add_argument("--arch", default="resnet20", help="of --models: or torchvision:NAME")
    parser.add_argument(
        "--tasks", nargs="+", type=_class_ids, help="of --models: class ids, such as 0-4 5,7,9"
    )
    parser.add_argument("--normalise", choices=NORMALISATIONS, help="of --models")
    parser.add_argument("--embeddings", type=Path, help="of --models: file of the text targets")


def chosen(options: argparse.Namespace, classes: int) -> Iterator[Checkpoints]:
    """The sets that the options of `add_arguments` choose, loaded one at a time."""
    for name in options.sets or ([] if options.models else options.default_sets):
        yield named(name)
    folders = options.data in ("torchvision:imagenet", "torchvision:imagefolder")
    for paths in options.models or []:
        yield from_files(
            paths,
            options.arch,
            classes,
            tasks=options.tasks,
            normalisation=options.normalise or ("imagenet" if folders else "cifar"),
            embeddings=options.embeddings,
        )


def _class_ids(text: str) -> tuple[int, ...]:
    """ "0-4,7" -> (0, 1, 2, 3, 4, 7)"""
    ids: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return tuple(ids)
