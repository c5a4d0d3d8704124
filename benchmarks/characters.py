"""Two language models of different initialisation become one: every way to merge them.

    python -m benchmarks.characters --seeds 2 --out benchmarks/results/characters_cpu_202611.md

The two character models of examples/characters.py, of prose and of code, are trained anew for every
seed, from four initialisations in all, as the example's own transformer and as GPT2LMHeadModel.
Bits per character on held-out text, mean and deviation over the seeds (less is better). Merges are
made with 400 windows of 64 characters of each model's training text. The ensemble, at twice the
cost, is the rival. Where a partial zip has heads, the row is the mean of their probabilities; the
row below it has each head on its own text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks import evaluate
from benchmarks.document import Document
from examples import characters
from examples.characters import TEXTS, Parts, Setting

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


def table(setting: Setting, parts: Parts, seeds: int, folder: Path | None) -> str:
    """One row for each way to merge, over all seeds."""
    scores: dict[str, list[list[float]]] = {}
    sizes: dict[str, float] = {}
    for seed in range(seeds):
        models = trained(setting, parts, seed, folder)
        for name, found, size in characters.rows(models, parts, setting, seed):
            scores.setdefault(name, []).append([*found, sum(found) / len(found)])
            sizes[name] = size
    rows = [
        [name, *(evaluate.spread(column, 2) for column in zip(*found)), f"{sizes[name]:.2f}"]
        for name, found in scores.items()
    ]
    return evaluate.table(["", *TEXTS, "mean", "parameters"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
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
        found = table(setting, parts, options.seeds, options.models)
        document.add(f"## {KINDS[kind]}", found)


if __name__ == "__main__":
    main()
