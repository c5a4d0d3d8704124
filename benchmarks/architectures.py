"""Are torchvision's classifiers analysed exactly, and completely?

    python -m benchmarks.architectures --out benchmarks/results/architectures_cpu_202611.md

For every model, randomly initialised, with random norm statistics and affines, in float64: the
spaces that `zipfx.analyze` finds, the parameter axes that an operation pins, the relative error
after every space is permuted at random (law 1), and the parameters of a full zip of two copies
relative to one model (law 2).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model, list_models

import zipfx
from benchmarks import evaluate

FAMILIES = (
    "resnet", "wide_resnet", "vgg", "alexnet", "squeezenet", "densenet", "mobilenet", "mnasnet",
    "efficientnet", "googlenet", "inception", "convnext",
)  # fmt: skip
NO_AUXILIARY = {"aux_logits": False, "init_weights": False}
AT_THE_ENDS = ("unlike any other", "output of the network")  # reasons that no analysis could avoid


def names(families: Sequence[str] = FAMILIES) -> list[str]:
    """All torchvision classifiers of these families."""
    found = list_models(module=torchvision.models)
    return [name for name in found if name.startswith(tuple(families))]


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A torchvision classifier in eval mode, with norms, biases and layer scales at random."""
    torch.manual_seed(0)
    options = NO_AUXILIARY if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = get_model(name, weights=None, **options).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, t in [*model.named_parameters(), *model.named_buffers()]:
            if t.is_floating_point() and (t.ndim == 1 or "layer_scale" in key):
                if key.endswith(("bias", "running_mean")):
                    t.copy_(0.3 * torch.randn(t.shape, generator=generator))
                else:
                    t.copy_(0.5 + torch.rand(t.shape, generator=generator))
    return model


def images(name: str, count: int, size: int = 64, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random images (count, 3, size, size); Inception needs at least 75 pixels."""
    pixels = 96 if name == "inception_v3" else size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, pixels, pixels, generator=generator).to(dtype)


def law_1(model: nn.Module, spaces: zipfx.SpaceMap, x: Tensor, seed: int = 1) -> float:
    """Relative error after every space was permuted at random."""
    with torch.no_grad():
        before = model(x)
        after = spaces.permuted(model, spaces.random_permutations(seed))(x)
        return float((after - before).abs().max() / before.abs().max())


def law_2(model: nn.Module, x: Tensor) -> float:
    """Parameters of a full zip of two copies, relative to one."""
    merged = zipfx.zip(
        [model, copy.deepcopy(model)], None, matcher="identity", repair="none",
        example_inputs=x, verify=False, progress=False,
    )  # fmt: skip
    return evaluate.parameters([merged]) / evaluate.parameters([model])


@dataclass(frozen=True)
class Row:
    """pinned: axes left fixed because an operation was not understood or keeps an order."""

    model: str
    parameters: int
    spaces: int
    features: int
    pinned: int
    error: float
    ratio: float
    seconds: float

    def cells(self) -> tuple[str, ...]:
        return (
            self.model, f"{self.parameters / 1e6:.1f}", str(self.spaces), str(self.features),
            str(self.pinned), f"{self.error:.0e}", f"{self.ratio:.3f}", f"{self.seconds:.1f}",
        )  # fmt: skip


HEADER = (
    "model", "parameters (M)", "spaces", "features", "pinned axes", "law 1 error",
    "law 2 ratio", "analyze (s)",
)  # fmt: skip


def pinned_axes(spaces: zipfx.SpaceMap) -> set[tuple[str, int]]:
    """Axes left fixed although they are neither the network's input nor its output."""
    return {(p.parameter, p.dim) for p in spaces.pinned if not p.reason.startswith(AT_THE_ENDS)}


def measure(name: str) -> Row:
    model, x = build(name), images(name, 2)
    start = time.perf_counter()
    spaces = zipfx.analyze(model, x, verify=False)
    seconds = time.perf_counter() - start
    error = law_1(model, spaces, x)
    sizes = [space.size for space in spaces]
    ratio = law_2(model.float(), x.float())
    return Row(
        name, evaluate.parameters([model]), len(sizes), sum(sizes), len(pinned_axes(spaces)),
        error, ratio, seconds,
    )  # fmt: skip


def report(rows: Sequence[Row]) -> str:
    exact = sum(row.error < 1e-12 for row in rows)
    return "\n\n".join(
        (
            "# torchvision's classifiers, analysed",
            evaluate.environment("benchmarks.architectures"),
            f"{exact} of {len(rows)} models compute the same function (float64, relative error "
            "below 1e-12) after a random permutation of every space. Norm statistics, affines and "
            "layer scales are random. Input: two images of 64 pixels (Inception v3: 96). Pinned "
            "axes: parameter axes left fixed though they are not the network's input or output. "
            "Law 2 ratio: parameters of a full zip of two copies over those of one. Seconds are "
            "of `zipfx.analyze` without its numeric check.",
            evaluate.table(HEADER, [row.cells() for row in rows]),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    evaluate.add_arguments(parser)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="name prefixes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in names(options.families):
        rows.append(measure(name))
        print(" ".join(rows[-1].cells()), flush=True)
    evaluate.publish(report(rows), options.out)


if __name__ == "__main__":
    main()
