"""A base and its fine-tunes, with data: three subjects for `benchmarks.fine_tunes`.

Letters: N samples, T characters of a window. Each subject has two tasks, k = 0 and 1, and a
fine-tune of the base for each.

- ``characters``: the small transformer of examples/characters.py; the base is trained on both
  texts, the prose of the language reference (`pydoc_data.topics`) and the source code of the
  standard library, the fine-tunes go on with one of them each.
- ``digits``: the network of examples/digits.py; the base is trained on all ten for a short while,
  the fine-tunes go on with 0-4 and 5-9.
- ``cifar``: a stranger's ResNet-20 that knows all ten classes (`benchmarks.zoo`), fine-tuned on
  classes 0-4 and 5-9. Needs the checkpoints and images that are not part of the repository.
"""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import data, zoo
from examples import digits
from examples.characters import Setting, Transformer, drawn

HALVES = (range(0, 5), range(5, 10))


@dataclass(frozen=True)
class Samples:
    """Inputs (N, ..) and what belongs to them: class ids (N,), or next characters (N, T)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Tensor | slice) -> Samples:
        return Samples(self.inputs[index], self.labels[index])

    def batches(self, size: int = 100) -> list[tuple[Tensor]]:
        """The inputs only, as `zipfx.zip` takes them."""
        return [(part,) for part in self.inputs.split(size)]


class Measure(Protocol):
    """What is measured of the probabilities (N, .., D) that are given for each task's samples."""

    columns: tuple[str, str]
    digits: int  # after the point

    def scores(self, given: Sequence[Tensor], tasks: Sequence[Samples]) -> tuple[float, float]:
        """One number for each column."""
        ...

    def quality(self, scores: tuple[float, float]) -> float:
        """One number, the larger the better, to choose factors by."""
        ...


@dataclass(frozen=True)
class Subject:
    """Networks and data. Each of the sets has one part for each task.

    calibration: inputs for methods that read data; choice: labelled, to choose factors on; test:
    what is reported. None of the three has a sample of another, and none of the last two was
    trained on by a fine-tune.
    """

    name: str
    base: nn.Module
    tunes: tuple[nn.Module, nn.Module]
    calibration: tuple[Samples, Samples]
    choice: tuple[Samples, Samples]
    test: tuple[Samples, Samples]
    measure: Measure

    @property
    def has_norms(self) -> bool:
        """Whether there are BatchNorms."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.base.modules())


@torch.inference_mode()
def likely(modules: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    """Probabilities (N, .., D); of several modules, an ensemble, the mean."""
    parts = [
        torch.stack([module(part).softmax(-1) for module in modules]).mean(0)
        for part in inputs.split(200)
    ]
    return torch.cat(parts)


class Bits:
    """Bits per character of each text; the fewer the better."""

    columns, digits = ("prose, bits", "code, bits"), 2

    def scores(self, given: Sequence[Tensor], tasks: Sequence[Samples]) -> tuple[float, float]:
        """See `Measure`."""
        prose, code = (
            -p.gather(-1, t.labels.unsqueeze(-1)).log2().mean().item()
            for p, t in zip(given, tasks, strict=True)
        )
        return prose, code

    def quality(self, scores: tuple[float, float]) -> float:
        """See `Measure`."""
        return -sum(scores)


class Percent:
    """Percent right: among all ten classes at once, and among the five of each task, the mean."""

    columns, digits = ("all ten", "each task, mean"), 1

    def scores(self, given: Sequence[Tensor], tasks: Sequence[Samples]) -> tuple[float, float]:
        """See `Measure`."""
        labels = torch.cat([t.labels for t in tasks])
        own = [
            digits.accuracy(p, t.labels, half)
            for p, t, half in zip(given, tasks, HALVES, strict=True)
        ]
        return digits.accuracy(torch.cat([*given]), labels, range(10)), sum(own) / len(own)

    def quality(self, scores: tuple[float, float]) -> float:
        """See `Measure`."""
        return sum(scores)


def trained(
    model: nn.Module,
    draw: Callable[[], Samples],
    steps: int,
    optimizer: torch.optim.Optimizer,
    peak: float,
    clip: float = math.inf,
) -> nn.Module:
    """The model itself, after steps of cross-entropy on what is drawn, in eval mode."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    model.train()
    for _ in range(steps):
        batch = draw()
        outputs = model(batch.inputs)
        loss = cross_entropy(outputs.flatten(0, -2), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return model.eval()


def texts() -> tuple[Tensor, Tensor]:
    """Prose and code, characters as ids (N,) uint8 in 0..127."""
    from pydoc_data.topics import topics

    prose = "\n".join(topics[name] for name in sorted(topics))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    ascii = (bytearray(text.encode("ascii", "ignore")) for text in (prose, code))
    first, second = (torch.frombuffer(text, dtype=torch.uint8) for text in ascii)
    return first, second


def windows(text: Tensor, count: int, generator: torch.Generator, context: int = 64) -> Samples:
    """Random pieces of a text and the same, one character later."""
    every = drawn(text, count, context + 1, generator).long()
    return Samples(every[:, :-1], every[:, 1:])


def characters(
    seed: int, steps: tuple[int, int] = (400, 300), samples: int = 400, width: int = 96
) -> Subject:
    """See above; steps: of the base and of each fine-tune; samples: windows of each set."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [(t[: len(t) // 10], t[len(t) // 10 : len(t) // 5], t[len(t) // 5 :]) for t in texts()]

    def go_on(model: nn.Module, kinds: Sequence[int], steps: int, peak: float) -> nn.Module:
        def draw() -> Samples:
            found = [windows(parts[k][2], 48 // len(kinds), generator) for k in kinds]
            return Samples(*(torch.cat(c) for c in zip(*((f.inputs, f.labels) for f in found))))

        optimizer = torch.optim.AdamW(model.parameters(), peak, weight_decay=0.05)
        return trained(model, draw, steps, optimizer, peak, clip=1.0)

    base = go_on(Transformer(Setting(width)), (0, 1), steps[0], 4e-3)
    a, b = (go_on(copy.deepcopy(base), (k,), steps[1], 4e-3) for k in range(2))
    test, choice, calibration = (
        (windows(parts[0][i], samples, generator), windows(parts[1][i], samples, generator))
        for i in range(3)
    )
    return Subject("characters", base, (a, b), calibration, choice, test, Bits())


def _halves(samples: Samples) -> tuple[Samples, Samples]:
    a, b = (samples[torch.isin(samples.labels, torch.tensor(half))] for half in HALVES)
    return a, b


def of_digits(seed: int, steps: tuple[int, int] = (30, 200)) -> Subject:
    """See above; steps: of the base and of each fine-tune."""
    torch.manual_seed(seed)
    images, labels, test, expected = digits.split(seed)
    known, choice = Samples(images[:1000], labels[:1000]), Samples(images[1000:], labels[1000:])

    def go_on(model: nn.Module, chosen: Samples, steps: int, peak: float) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), peak, momentum=0.9, weight_decay=5e-4)
        return trained(
            model, lambda: chosen[torch.randint(len(chosen), (64,))], steps, optimizer, peak
        )

    base = go_on(digits.Network(), known, steps[0], 0.05)
    parts = _halves(known)
    a, b = (go_on(copy.deepcopy(base), part, steps[1], 0.05) for part in parts)
    return Subject(
        "digits", base, (a, b), parts, _halves(choice), _halves(Samples(test, expected)), Percent()
    )


def cifar(
    seed: int, steps: int = 150, samples: int = 500, test: int = 2000, peak: float = 0.03
) -> Subject:
    """See above; seed: also which checkpoint (a, b, d); samples: images of each task."""
    torch.manual_seed(seed)
    base, info = zoo.load(f"cifar10_resnet20_{'abd'[seed % 3]}")
    images = data.read("jpeg")
    order = torch.randperm(len(images["train"]), generator=torch.Generator().manual_seed(seed))
    aside, known = order[: 4 * samples + 400], order[4 * samples + 400 :]

    def of(split: str, index: Tensor) -> Samples:
        chosen = images[split][index]
        return Samples(info.normalise(chosen.pixels(torch.arange(len(chosen)))), chosen.labels)

    def go_on(half: Sequence[int]) -> nn.Module:
        mine = known[torch.isin(images["train"].labels[known], torch.tensor(half))]

        def draw() -> Samples:
            chosen = of("train", mine[torch.randint(len(mine), (64,))])
            flipped = torch.rand(64) < 0.5
            mirrored = torch.where(flipped.view(-1, 1, 1, 1), chosen.inputs.flip(3), chosen.inputs)
            return Samples(mirrored, chosen.labels)

        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), peak, momentum=0.9, weight_decay=5e-4)
        return trained(model, draw, steps, optimizer, peak)

    a, b = (go_on(half) for half in HALVES)
    halves = _halves(of("train", aside))
    tested = torch.randperm(len(images["test"]), generator=torch.Generator().manual_seed(0))[:test]
    return Subject(
        "cifar",
        base,
        (a, b),
        (halves[0][:samples], halves[1][:samples]),
        (halves[0][samples : 2 * samples], halves[1][samples : 2 * samples]),
        _halves(of("test", tested)),
        Percent(),
    )


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "digits": of_digits,
    "characters": characters,
    "cifar": cifar,
}
