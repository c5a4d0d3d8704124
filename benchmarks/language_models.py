"""Language models of the usual size: time and memory of a default zip.

    python -m benchmarks.language_models --out benchmarks/results/language_models_cpu_202611.md

GPT-2 small and BERT-base (12 layers of 768 features; random weights, from transformers'
configurations), two of each, 16 sequences of 128 tokens in batches of 4, default matcher and
repair. Each pair has a process of its own. Forward: both models on all batches, once. Peak: of the
whole process, in GiB, models included (all of them together take what is said first). Match and
refit at half: how much of its time had passed, in percent, when the bar of a stage stood at half.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import zipfx
from benchmarks import evaluate
from zipfx import text

MODELS = {"GPT-2 small": "GPT2LMHeadModel", "BERT-base": "BertForSequenceClassification"}
STAGES = ("trace", "correspond", "analyze", "observe", "match", "fuse", "repair")


class Bars(text.tqdm):  # type: ignore[type-arg]
    """Progress bars that nobody sees, and that note when they stood where."""

    seen: ClassVar[dict[str, list[tuple[float, float]]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "file": io.StringIO()})
        self.mine = self.seen.setdefault(str(kwargs["desc"]), [(time.perf_counter(), 0.0)])

    def update(self, n: float | None = 1) -> bool | None:
        done = super().update(n)
        self.mine.append((time.perf_counter(), self.n / self.total))
        return done

    @classmethod
    def at_half(cls, desc: str) -> float:
        """Percent of its time that had passed when a bar stood at half; between two updates it goes
        on evenly."""
        marks = cls.seen[desc]
        times, stood = zip(*marks, strict=True)
        half = float(np.interp(0.5, stood, times))
        return 100 * (half - times[0]) / (times[-1] - times[0])


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
    text.tqdm = Bars  # type: ignore[misc]
    merged = zipfx.zip(models, data)
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
        "match at half": Bars.at_half("zipfx: match"),
        "refit at half": Bars.at_half("zipfx: refit"),
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
    page = "\n".join(
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
    evaluate.publish(page, arguments.out)


def _text(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
