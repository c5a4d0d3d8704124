"""Two language models of different initialisation become one, without training.

Model a reads characters of prose (Python's own documentation, `pydoc_data.topics`), model b those
of code (the standard library's source), each from its own initialisation. Both are small
transformers, trained here. `zipfx.zip` merges them in several ways; each row of the printed table
is one way, in bits per character (less is better; 7 is knowing nothing) on text that no model has
seen, of which no paragraph is in the training text either:

    prose, code   the two texts
    mean          of both
    size          parameters, in models

Calibration text comes from the training text. The rival is the ensemble, the mean of both models'
probabilities, at twice the size. A partial zip has two heads: first the mean of their probabilities
on both texts, then each head on its own text.

Run it with `python examples/characters.py`: some six minutes of one core. `--gpt2` takes
transformers' `GPT2LMHeadModel`, `--quick` tiny models for a few steps, to see that all runs.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import zipfx

CHARACTERS = 128  # ASCII
TEXTS = ("prose", "code")
Batches = list[tuple[Tensor]]
Parts = Sequence[tuple[Tensor, Tensor]]  # of each text: characters to train on, and to test on
Predict = Callable[[Tensor], Tensor]  # characters (B, T) -> log-probabilities (B, T, CHARACTERS)


@dataclass(frozen=True)
class Setting:
    """Sizes of a model, and of what it is trained, calibrated and tested with."""

    width: int = 96
    heads: int = 4
    layers: int = 4
    context: int = 64  # characters that a prediction may see
    steps: int = 1000
    batch: int = 24  # windows of `context` characters a step
    calibration: int = 400  # windows of each text
    test: int = 800  # windows of each text
    gpt2: bool = False


QUICK = Setting(width=32, heads=2, layers=2, context=32, steps=20, calibration=40, test=40)


class Block(nn.Module):
    """One layer of attention and one of a perceptron: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        read = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return changed


class Transformer(nn.Module):
    """Characters (B, context) int64 -> logits of the next ones (B, context, CHARACTERS)."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, setting.width)
        self.position = nn.Parameter(0.02 * torch.randn(setting.context, setting.width))
        blocks = (Block(setting.width, setting.heads) for _ in range(setting.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(setting.width)
        self.head = nn.Linear(setting.width, CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(ids) + self.position)))
        return logits


def new_model(setting: Setting) -> nn.Module:
    """A model with random weights."""
    if not setting.gpt2:
        return Transformer(setting)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=CHARACTERS,
        n_positions=setting.context,
        n_embd=setting.width,
        n_layer=setting.layers,
        n_head=setting.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def outputs_of(module: nn.Module, ids: Tensor) -> list[Tensor]:
    """Log-probabilities (B, T, CHARACTERS): one, or one for each head of a partial zip."""
    found = module(ids)
    heads = found if type(found) is tuple else (found,)
    logits = [head if isinstance(head, Tensor) else head.logits for head in heads]
    return [head.log_softmax(-1) for head in logits]


def read(text: str) -> tuple[Tensor, Tensor]:
    """Characters to train on, and the others, int64 in 0 .. CHARACTERS - 1.

    Both texts say some things twice, so a paragraph counts once, where it is first. The last tenth
    is for testing.
    """
    if text == "prose":
        documents = [topics[name] for name in sorted(topics)]
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        documents = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    paragraphs = dict.fromkeys("\n".join(documents).split("\n\n"))
    characters = "\n\n".join(paragraphs).encode("ascii", "ignore")
    ids = torch.frombuffer(bytearray(characters), dtype=torch.uint8).long()
    kept = len(ids) * 9 // 10
    return ids[:kept], ids[kept:]


def read_all() -> Parts:
    """Both texts."""
    return [read(text) for text in TEXTS]


def drawn(ids: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of text at random places, (count, length)."""
    starts = torch.randint(len(ids) - length, (count,), generator=generator)
    return ids[starts[:, None] + torch.arange(length)]


def train(ids: Tensor, setting: Setting, seed: int) -> nn.Module:
    """A model of the text (n,) ``ids``, in eval mode."""
    torch.manual_seed(seed)
    model = new_model(setting)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=setting.steps)
    for _ in range(setting.steps):
        windows = drawn(ids, setting.batch, setting.context + 1, generator)
        (predicted,) = outputs_of(model, windows[:, :-1])
        loss = cross_entropy(predicted.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def models_of(parts: Parts, setting: Setting, seed: int) -> list[nn.Module]:
    """One of each text, each from its own initialisation."""
    own = [len(parts) * seed + k for k in range(len(parts))]
    return [train(ids, setting, k) for k, (ids, _) in zip(own, parts, strict=True)]


def calibration(ids: Tensor, setting: Setting, seed: int) -> Batches:
    """Batches of training text, to merge with."""
    generator = torch.Generator().manual_seed(seed)
    windows = drawn(ids, setting.calibration, setting.context, generator)
    return [(part,) for part in windows.split(40)]


@torch.no_grad()
def bits(predict: Predict, ids: Tensor, setting: Setting) -> float:
    """Bits per character on windows that are spread evenly over the text (n,) ``ids``."""
    length = setting.context + 1
    starts = torch.linspace(0, len(ids) - length, setting.test).long()
    losses = []
    for part in starts.split(100):
        windows = ids[part[:, None] + torch.arange(length)]
        predicted = predict(windows[:, :-1])
        losses.append(cross_entropy(predicted.mT, windows[:, 1:], reduction="none"))
    return torch.cat(losses).double().mean().item() / math.log(2)


def mean_of(modules: Sequence[nn.Module]) -> Predict:
    """The mean of all probabilities that modules (and their heads) give."""

    def predict(ids: Tensor) -> Tensor:
        every = [output for module in modules for output in outputs_of(module, ids)]
        return torch.stack(every).logsumexp(0) - math.log(len(every))

    return predict


def size_of(modules: Sequence[nn.Module]) -> int:
    """Parameters, of which a shared one counts once."""
    return sum(p.numel() for module in modules for p in module.parameters())


def merges(
    models: Sequence[nn.Module], loaders: list[Batches], cut: str
) -> Iterator[tuple[str, nn.Module]]:
    """Every way to merge; loaders: batches of each text; cut: where the partial zip ends.

    With a loader for each text the merge is asked for what one model makes of its own text, with
    one loader of both for what all models make of all text, as the ensemble is.
    """
    both = [part for parts in zip(*loaders, strict=True) for part in parts]
    by_logits, half = zipfx.Refit(logits=True), {"matcher": "zip", "partial": cut}
    for name, data, options in (
        ("averaging by position", both, {"matcher": "identity", "repair": "none"}),
        ("permute", both, {"matcher": "permute", "repair": "none"}),
        ("zip", both, {"matcher": "zip", "repair": "none"}),
        ("averaging, refit", both, {"matcher": "identity", "repair": "refit"}),
        ("permute, refit", both, {"matcher": "permute", "repair": "refit"}),
        ("zip, refit", both, {"matcher": "zip", "repair": "refit"}),
        ("zip, refit, a loader each", loaders, {"matcher": "zip", "repair": "refit"}),
        ("zip, refit, logits", both, {"matcher": "zip", "repair": by_logits}),
        ("zip to the middle", both, {**half, "repair": "none"}),
        ("zip to the middle, refit", both, {**half, "repair": by_logits}),
        ("same, a loader each", loaders, {**half, "repair": by_logits}),
    ):
        yield name, zipfx.zip(models, data, **options, progress=False)


def rows(
    models: Sequence[nn.Module], parts: Parts, setting: Setting, seed: int
) -> Iterator[tuple[str, list[float], float]]:
    """The table: name, bits per character on each text, parameters in models."""
    tests = [test for _, test in parts]

    def scores(*modules: nn.Module) -> list[float]:
        return [bits(mean_of(modules), ids, setting) for ids in tests]

    for text, model in zip(TEXTS, models, strict=True):
        yield f"model of {text}", scores(model), 1.0
    yield "ensemble", scores(*models), float(len(models))
    loaders = [calibration(ids, setting, 100 + seed + k) for k, (ids, _) in enumerate(parts)]
    blocks = "transformer.h" if setting.gpt2 else "blocks"
    for name, merged in merges(models, loaders, f"{blocks}.{setting.layers // 2 - 1}"):
        size = size_of([merged]) / size_of(models[:1])
        yield name, scores(merged), size
        if size > 1:
            heads = [zipfx.head(merged, k) for k in range(len(models))]
            own = [bits(mean_of([h]), ids, setting) for h, ids in zip(heads, tests)]
            yield f"{name}: own heads", own, size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of training; default: 1000")
    parser.add_argument("--gpt2", action="store_true", help="transformers' GPT2LMHeadModel")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few steps")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else Setting()
    setting = replace(setting, gpt2=options.gpt2, steps=options.steps or setting.steps)
    start = time.perf_counter()
    torch.set_num_threads(1)  # models this small gain little from more
    parts = read_all()
    models = models_of(parts, setting, options.seed)
    print(f"two models trained in {time.perf_counter() - start:.0f} seconds")
    print(f"\n{'bits per character':36}{'prose':>8}{'code':>8}{'mean':>8}{'size':>8}")
    for name, found, size in rows(models, parts, setting, options.seed):
        numbers = [*found, sum(found) / len(found), size]
        print(f"{name:36}" + "".join(f"{number:8.2f}" for number in numbers), flush=True)
    print(f"{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
