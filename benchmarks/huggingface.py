"""Architectures of Hugging Face's transformers, given as they are: are they analysed and merged?

    python -m benchmarks.huggingface --out benchmarks/results/huggingface_cpu_202611.md
    python -m benchmarks.huggingface --only LlamaForCausalLM BertForSequenceClassification

Small models from their configuration classes (`huggingface_models`), random weights, in float64 (or
float32, where a model has kernels that know no other), called with a dict of keyword arguments. Of
each: the front that traced it; the spaces; axes that are left fixed, and why; the relative error
after every space is permuted at random (law 1); the parameters of a full zip of two copies relative
to one model (law 2); the relative error of the merge of a model and a permuted copy (law 3); that
of a fresh instance of the class into which the state of a merge of two that differ was loaded,
strictly, against the merge (law 7), and whether `zipfx.to_model` makes one; the layers that the
default repair refits (norms of batches by themselves among them) beside the number of modules that
have a weight matrix; seconds for `analyze` and the default zip. Laws 1 and 3 hold below 1e-12, or
below 1e-5 where a model computes in float32 in between.
"""

from __future__ import annotations

import argparse
import inspect
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zipfx
from benchmarks import evaluate
from benchmarks.architectures import AT_THE_ENDS, in_short
from benchmarks.huggingface_models import ALL, FIRST, Architecture

COLUMNS = (
    "architecture", "front", "spaces", "features", "pinned", "law 1", "law 2", "law 3", "law 7",
    "to_model", "refitted", "analyze (s)", "zip (s)",
)  # fmt: skip
BATCHES, SAMPLES = 3, 16


def run(model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of real numbers that a model gives, caches off."""
    off = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        found = model(**batch, **off)
    return [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point()]


def error(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of each tensor."""
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def dtype_of(architecture: Architecture) -> torch.dtype:
    """float64, if the model runs in it."""
    try:
        run(architecture.build(0, torch.float64), architecture.batch(2, 0, torch.float64))
    except RuntimeError:
        return torch.float32
    return torch.float64


def layers(model: nn.Module) -> int:
    """The modules that have a weight matrix of their own, embeddings apart; tied ones once."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    weights = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, kinds) or type(m).__name__ == "Conv1D"
    }
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return len(weights - tables)


def pinned(spaces: zipfx.SpaceMap) -> str:
    """The reasons for which axes are fixed, but for those at the ends of the network."""
    reasons = Counter(
        short for p in spaces.pinned if (short := in_short(p.reason)) not in AT_THE_ENDS
    )
    return "; ".join(f"{count} {why}" for why, count in reasons.most_common()) or "-"


def row(name: str, architecture: Architecture) -> tuple[list[str], bool]:
    """The row of a table, and whether all laws hold."""
    dtype = dtype_of(architecture)
    model = architecture.build(0, dtype)
    batch = architecture.batch(2, 0, dtype)
    start = time.process_time()
    spaces = zipfx.analyze(model, batch)
    analysed = time.process_time() - start
    twin = spaces.permuted(model, spaces.random_permutations(1))
    expected = run(model, batch)
    law_1 = error(expected, run(twin, batch))
    data = architecture.batches(BATCHES, SAMPLES, dtype)
    same = zipfx.zip([model, twin], data, matcher="permute", repair="none", progress=False)
    law_3 = error(expected, run(same, batch))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (same, model)]
    others = [model, architecture.build(1, dtype)]
    _share_constants(others)
    start = time.process_time()
    merged = zipfx.zip(others, data, progress=False)
    zipped = time.process_time() - start
    fresh = architecture.build(2, dtype)
    fresh.load_state_dict(merged.state_dict())
    law_7 = error(run(merged, batch), run(fresh, batch))
    to_model = type(zipfx.to_model(merged, like=model)) is type(model)
    report = merged.meta["zipfx"]
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    # what computes in float32 in between is as exact as that
    coarse = max(law_1, law_3) > exact and max(law_1, law_3) < 1e-5
    holds = (law_3 < exact or coarse) and (law_1 < exact or coarse)
    holds = holds and sizes[0] == sizes[1] and law_7 < 1e-5 and to_model
    refitted = len({r.name for r in report.refits})
    return [
        name,
        report.front + ("" if dtype == torch.float64 else " (float32)"),
        str(len(spaces)),
        str(sum(s.size for s in spaces)),
        pinned(spaces),
        f"{law_1:.0e}",
        f"{sizes[0] / sizes[1]:.3f}",
        f"{law_3:.0e}",
        f"{law_7:.0e}",
        "yes" if to_model else "no",
        f"{refitted} of {layers(model)}",
        f"{analysed:.1f}",
        f"{zipped:.1f}",
    ], holds


def _share_constants(models: list[nn.Module]) -> None:
    """Buffers that are not saved are constants of a class, and the same in all its models."""
    first = models[0]
    for model in models[1:]:
        for path, module in model.named_modules():
            for key in module._non_persistent_buffers_set & set(module._buffers):
                module._buffers[key] = first.get_submodule(path)._buffers[key]


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=list(ALL), help="names of architectures")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    rows, held, first = [], 0, {a.model for a in FIRST}
    of_first = 0
    for name in arguments.only:
        try:
            found, holds = row(name, ALL[name])
        except Exception as failure:  # whatever it is, it is a row
            text = str(failure).splitlines()[0].replace("|", "/")
            found, holds = [name, f"fails: {type(failure).__name__}: {text[:300]}"], False
        rows.append(found)
        held += holds
        of_first += holds and name in first
        print(" | ".join(found), "" if holds else " <- a law does not hold", flush=True)
    text = "\n".join(
        [
            "# Architectures of transformers, given as they are",
            "",
            evaluate.environment("benchmarks.huggingface", ["transformers"]),
            "",
            f"All laws hold for {held} of {len(rows)} architectures ({of_first} of "
            f"{len(first & set(arguments.only))} of those that were measured first).",
            "",
            " ".join((__doc__ or "").split("\n\n", 2)[2].split()),
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + " --- |" * len(COLUMNS),
            *("| " + " | ".join([*r, *[""] * (len(COLUMNS) - len(r))]) + " |" for r in rows),
            "",
        ]
    )
    evaluate.publish(text, arguments.out)


if __name__ == "__main__":
    main()
