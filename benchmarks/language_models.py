"""Language models of the usual size: time and memory of a default zip.

    python -m benchmarks.language_models --out benchmarks/results/language_models_cpu_202611.md

GPT-2 small and BERT-base (12 layers of 768 features; random weights, from transformers'
configurations), two of each, 16 sequences of 128 tokens in batches of 4, default matcher and
repair. Each pair has a process of its own. Forward: both models on all batches, once. Peak: of the
whole process, in GiB, models included (all of them together take what is said first).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zipfx
from benchmarks import evaluate

MODELS = {"GPT-2 small": "GPT2LMHeadModel", "BERT-base": "BertForSequenceClassification"}
STAGES = ("trace", "correspond", "analyze", "observe", "match", "fuse", "repair")


def build(name: str, seed: int) -> nn.Module:
    """A model of the default configuration of its class, which is the usual size."""
    import transformers

    torch.manual_seed(seed)
    cls: Any = getattr(transformers, MODELS[name])
    model: nn.Module = cls(cls.config_class())
    return model.eval()


def measure(name: str, threads: int) -> dict[str, Any]:
    """Seconds of every stage, and the peak of memory in GiB."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    models = [build(name, seed) for seed in (0, 1)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 30000, (16, 128), generator=generator)
    data = [{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in tokens.split(4)]
    start = time.perf_counter()
    with torch.no_grad():
        for model in models:
            for batch in data:
                model(**batch)
    forward = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    merged = zipfx.zip(models, data, progress=False)
    total = time.perf_counter() - start
    report = merged.meta["zipfx"]
    return {
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "front": report.front,
        "spaces": len(report.spaces),
        "refits": len(report.refits),
        "forward": forward,
        **{stage: report.seconds.get(stage, 0.0) for stage in STAGES},
        "total": total,
        "models": before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", choices=list(MODELS), help="measure this, and print it as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.threads)))
        return
    rows = []
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.language_models", "--one", name]
        command += ["--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append((name, json.loads(done.stdout.splitlines()[-1])))
        print(rows[-1], flush=True)
    torch.set_num_threads(arguments.threads)
    columns = ("model", *rows[0][1])
    lines = [
        "| " + " | ".join([name, *(_text(value) for value in row.values())]) + " |"
        for name, row in rows
    ]
    text = "\n".join(
        [
            "# Language models of the usual size",
            "",
            evaluate.environment("benchmarks.language_models", ["transformers"]),
            "",
            " ".join((__doc__ or "").split("\n\n", 2)[2].split()),
            "Stages and forward in seconds.",
            "",
            "| " + " | ".join(columns) + " |",
            "|" + " --- |" * len(columns),
            *lines,
            "",
        ]
    )
    evaluate.publish(text, arguments.out)


def _text(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
