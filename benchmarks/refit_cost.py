"""What does refitting cost, beside the calibration pass on the same images?

    python -m benchmarks.refit_cost --out benchmarks/results/refit_cost_cpu_202611.md
    python -m benchmarks.refit_cost --memory inf 512 128 --models resnet50 --images 64

Two models of random weights and their merge; each sees half of the images, as with one loader for
each task. "Calibration" is the pass that observes (both models run on all images), "refit" runs the
merged model and each image's own model, and solves.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import zipfx
from benchmarks import evaluate, memory


def measured(name: str, side: int, images: int, batch: int, refit: zipfx.Refit) -> tuple[str, ...]:
    """One row: seconds of the two passes, their ratio, and memory."""
    import torchvision

    models: list[nn.Module] = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(torchvision.models.get_model(name).eval())
    data = [DataLoader(torch.randn(images // 2, 3, side, side), batch) for _ in models]
    memory.reset_peak()
    before = memory.resident()
    merged = zipfx.zip(models, data, matcher="permute", repair=refit, progress=False)
    peak = memory.peak_resident() - before
    report: zipfx.Report = merged.meta["zipfx"]
    observe, repair = report.seconds["observe"], report.seconds["repair"]
    widest = max(p.shape[1] * p[0, 0].numel() for p in merged.parameters() if p.ndim > 1)
    return (
        name, str(side), str(images), f"{refit.rounds}", f"{refit.oversampling:g}",
        f"{refit.memory / 2**20:g}",
        f"{observe:.1f}", f"{repair:.1f}", f"{repair / observe:.2f}",
        str(widest), f"{peak / 2**20:.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    evaluate.add_arguments(parser)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--memory", type=float, nargs="+", help="MiB; only compares these")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = ("model", "pixels", "images", "rounds", "samples", "memory (MiB)", "calibration (s)",
              "refit (s)", "ratio", "most inputs", "peak MiB")  # fmt: skip
    settings = [zipfx.Refit(), zipfx.Refit(rounds=0), zipfx.Refit(rounds=0, oversampling=10)]
    if options.memory:
        settings = [zipfx.Refit(memory=mib * 2**20) for mib in options.memory]
    rows = []
    for name in options.models:
        for refit in settings:
            rows.append(measured(name, options.side, options.images, options.batch, refit))
            print(rows[-1], flush=True)
    text = [
        "# The cost of refitting",
        evaluate.environment("benchmarks.refit_cost"),
        "Most inputs: the largest C k k of a layer. Samples: for each unknown, at least. Memory: "
        "what values of batches may take while they wait for the layers to come. Peak: the "
        "highest resident set during `zipfx.zip` less what was resident before.",
        evaluate.table(header, rows),
    ]
    evaluate.publish("\n\n".join(text), options.out)


if __name__ == "__main__":
    main()
