"""What every benchmark measures of a network, and how it is written down.

Letters: N images, D outputs of one head. A method is a list of modules; each output of each module
is one head. One head serves all tasks; of several, head k serves task k.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Accuracy:
    """In percent. ``joint``: all classes at once; ``tasks``: each task among its own classes."""

    joint: float
    tasks: tuple[float, ...]

    @property
    def average(self) -> float:
        return sum(self.tasks) / len(self.tasks)


@torch.inference_mode()
def heads(modules: Sequence[nn.Module], batches: Iterable[Tensor]) -> list[Tensor]:
    """Every head's outputs (N, D), in order, on the CPU, for ``batches`` of images."""
    outputs = [
        [head.cpu() for module in modules for head in _as_tuple(module(batch))] for batch in batches
    ]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def expand(outputs: Tensor, classes: Sequence[int], total: int) -> Tensor:
    """Logits (N, D) as (N, total): column i is class ``classes[i]``, the others are -inf.

    So heads that know only their own classes can be compared with one another.
    """
    wide = outputs.new_full((len(outputs), total), -torch.inf)
    wide[:, list(classes)] = outputs
    return wide


def accuracy(
    outputs: Sequence[Tensor],
    labels: Tensor,
    tasks: Sequence[Sequence[int]],
    embeddings: Tensor | None = None,
) -> Accuracy:
    """Accuracies of `heads` on images with ``labels`` (N,), where ``tasks`` list class ids.

    With ``embeddings`` (classes, D) a head's scores are its cosines to all of them, and the joint
    scores are the mean over the heads. Without, a head's outputs are logits (N, classes), and the
    joint scores are, for each task, the softmax over its classes, summed over the tasks: for
    disjoint tasks the largest of all, for equal tasks the mean of the heads. A head that knows no
    class of a task (see `expand`) gives it nothing.
    """
    columns = [torch.tensor(classes) for classes in tasks]
    if embeddings is None:
        scores = list(outputs)
    else:
        scores = [normalize(output) @ embeddings.T for output in outputs]
    per_task = scores * len(tasks) if len(scores) == 1 else scores

    if embeddings is None:
        joint = torch.zeros_like(scores[0])
        for score, column in zip(per_task, columns, strict=True):
            joint[:, column] += score[:, column].softmax(1).nan_to_num(0)
    else:
        joint = torch.stack(scores).mean(0)

    own = []
    for score, column in zip(per_task, columns, strict=True):
        of_task = torch.isin(labels, column)
        own.append(_percent(column[score[of_task][:, column].argmax(1)], labels[of_task]))
    return Accuracy(_percent(joint.argmax(1), labels), tuple(own))


def parameters(modules: Iterable[nn.Module]) -> int:
    """Number of parameter elements; what modules share counts once."""
    unique = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(unique.values())


@torch.inference_mode()
def flops(modules: Iterable[nn.Module], image: Tensor) -> int:
    """Floating-point operations (two per multiply-add) for one ``image`` (1, 3, H, W)."""
    with FlopCounterMode(display=False) as counter:
        for module in modules:
            module(image)
    return int(counter.get_total_flops())


@torch.no_grad()
def reset_batch_norm(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy whose BatchNorm statistics are the averages over ``batches``; all else unchanged.

    Only the norms are in train mode meanwhile, so each batch is normalised by its own statistics.
    """
    module = copy.deepcopy(module).eval()
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
        norm.train()
    for batch in batches:
        module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return module.eval()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table: the first column is text, the others are numbers."""
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, align, *rows))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """``mean`` of the values, or ``mean ± standard deviation`` where there are several."""
    numbers = torch.tensor(values, dtype=torch.float64)
    mean = f"{numbers.mean().item():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {numbers.std().item():.{digits}f}"


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The power p of the size that time grows with, by least squares of logarithms.

    >>> round(exponent([10, 20, 40], [1.0, 4.0, 16.0]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options ``--threads`` and ``--out`` that every benchmark has."""
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of torch")
    parser.add_argument("--out", type=Path, help="markdown file to write the result to")


def environment(script: str, packages: Sequence[str] = ()) -> str:
    """Command, date, versions (also of `packages`), processor and threads, as a markdown list."""
    named = ("zipfx", "torch", "torchvision", *packages, "numpy", "scipy")
    versions = ", ".join(f"{name} {_version(name)}" for name in named)
    return "\n".join(
        (
            f"- command: `{shlex.join(['python', '-m', script, *sys.argv[1:]])}`",
            f"- date: {datetime.date.today().isoformat()}",
            f"- versions: Python {platform.python_version()}, {versions}",
            f"- processor: {_processor()}, {torch.get_num_threads()} thread(s)",
        )
    )


def publish(text: str, out: Path | None) -> None:
    """Prints the result, and writes it to ``out`` where one is given."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


def _as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _percent(predicted: Tensor, labels: Tensor) -> float:
    return 100 * (predicted == labels).double().mean().item()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from a checkout" if package == "zipfx" else "not installed"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
