"""Two language models of different initialisation become one: every way to merge them.

    python -m benchmarks.characters --seeds 2 --out benchmarks/results/characters_cpu_202611.md

The two character models of examples/characters.py, of prose and of code, are trained anew for every
seed, from four initialisations in all, as the example's own transformer and as GPT2LMHeadModel.
Bits per character on held-out text, mean and deviation over the seeds (less is better). Merges are
made with 400 windows of 64 characters of each model's training text, in one loader where nothing
else is said. The ensemble (the mean of both models' probabilities), at twice the cost, is the
rival. A partial zip has two heads; the row is the mean of their probabilities, "own heads" each
head on its own text. "logits" is `Refit(logits=True)`, which partial zips with a refit have, too.

With --study the rows are others: permute, refit, and one thing that is done in another way. The
residual stream is one space over all layers; it is matched by what the first, or the last, third of
the layers read of it, or with deeper layers counting more; by covariance, where large features
count more; with all positions of all windows (oversampling).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zipfx
from benchmarks import evaluate
from benchmarks.document import Document
from examples import characters
from examples.characters import TEXTS, Parts, Setting
from zipfx.analysis import Place
from zipfx.observe import PLACES, Choose

KINDS = {"own": "A transformer of the example's own", "gpt2": "GPT2LMHeadModel"}


def trained(setting: Setting, parts: Parts, seed: int, folder: Path | None) -> list[nn.Module]:
    """The models of a seed; kept in a folder, and taken from there where they are."""
    if folder is None:
        return characters.models_of(parts, setting, seed)
    kind = "gpt2" if setting.gpt2 else "own"
    path = folder / f"{kind}_{setting.steps}_{seed}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = characters.models_of(parts, setting, seed)
        torch.save([model.state_dict() for model in found], path)
    models = [characters.new_model(setting) for _ in TEXTS]
    for model, state in zip(models, torch.load(path, weights_only=True), strict=True):
        model.load_state_dict(state)
    return [model.eval() for model in models]


def table(of_seeds: Iterable[Iterable[tuple[str, list[float], float]]]) -> str:
    """Of the rows of every seed: mean and deviation."""
    scores: dict[str, list[list[float]]] = {}
    sizes: dict[str, float] = {}
    for rows in of_seeds:
        for name, found, size in rows:
            print(name, *(f"{value:.2f}" for value in found), flush=True)
            scores.setdefault(name, []).append([*found, sum(found) / len(found)])
            sizes[name] = size
    cells = [
        [name, *(evaluate.spread(column, 2) for column in zip(*found)), f"{sizes[name]:.2f}"]
        for name, found in scores.items()
    ]
    return evaluate.table(["", *TEXTS, "mean", "parameters"], cells)


def of_layers(model: nn.Module, ids: Tensor) -> dict[str, Choose]:
    """Ways to choose the places of the residual stream; of other spaces, as usual."""
    stream = max(zipfx.analyze(model, ids), key=lambda space: len(space.places)).name

    def choosing(of_reads: Callable[[list[Place]], Sequence[Place]]) -> Choose:
        usual, reads = PLACES["source"], PLACES["reads"]
        return lambda s: usual(s) if s.name != stream else of_reads(list(reads(s)))

    return {
        "the first third of the layers": choosing(lambda r: r[: len(r) // 3]),
        "the last third of the layers": choosing(lambda r: r[-(len(r) // 3) :]),
        "deeper layers count more": choosing(
            lambda r: [p for i, p in enumerate(r, 1) for _ in range(i)]
        ),
    }


def studied(
    models: Sequence[nn.Module], parts: Parts, setting: Setting, seed: int
) -> Iterator[tuple[str, list[float], float]]:
    """What is done in another way, bits per character on each text, and 1, the size."""

    loaders = [
        characters.calibration(ids, setting, 100 + seed + k) for k, (ids, _) in enumerate(parts)
    ]
    both = [batch for batches in zip(*loaders, strict=True) for batch in batches]
    ways = of_layers(models[0], both[0][0][:2])
    others: list[tuple[str, dict[str, Any]]] = [
        ("as it is", {}),
        *((name, {"places": name}) for name in ways),
        ("by covariance", {"matcher": zipfx.Permute(similarity="covariance")}),
        ("all positions", {"repair": zipfx.Refit(oversampling=1e6)}),
    ]
    PLACES.update(ways)
    for name, options in others:
        how = {"matcher": "permute", "repair": "refit", **options}
        predict = characters.mean_of([zipfx.zip(models, both, **how, progress=False)])
        yield name, [characters.bits(predict, test, setting) for _, test in parts], 1.0
    for name in ways:
        del PLACES[name]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--study", action="store_true", help="what else was tried, instead")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few steps")
    parser.add_argument("--models", type=Path, help="a folder that keeps the trained models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    text = (__doc__ or "").partition("202611.md\n\n")[2]
    document = Document("benchmarks.characters", "Two language models in one", text, options.out)
    parts = characters.read_all()
    for kind in options.kinds:
        setting = characters.QUICK if options.quick else Setting()
        setting = replace(setting, gpt2=kind == "gpt2")
        ways = studied if options.study else characters.rows
        pairs = [trained(setting, parts, seed, options.models) for seed in range(options.seeds)]
        every = [ways(models, parts, setting, seed) for seed, models in enumerate(pairs)]
        document.add(f"## {KINDS[kind]}", table(every))


if __name__ == "__main__":
    main()
