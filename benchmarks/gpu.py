"""Does a merge on CUDA equal the merge on the CPU, and what does each stage cost there?

One short script for a machine with a card; it says so and stops where there is none. It checks
that a pair of small ResNets merges to the same function on both devices (float64, so that no
matching can flip on rounding), by every matcher; times every stage of `zipfx.zip` for a pair of
ResNet-50s beside the bare forward passes of the two models over the same batches; and times the
greedy matcher where the covariance is, beside one join at a time on the CPU.

    python -m benchmarks.gpu --out benchmarks/results/gpu_CARD_202611.md
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torchvision
from torch import Tensor, nn

import zipfx
from benchmarks import evaluate, greedy

TOLERANCE = 1e-9  # relative, float64: reductions are ordered differently on the two devices
CUTS = (None, "layer1", "layer2.0", "layer3.0.conv1")
MATCHERS = ("zip", "permute", "optimal", "kmeans", "weights", zipfx.Zip(unmerge="lstsq"))
SIZES = (1024, 2048, 4096, 8192, 16384)


def pair(name: str, dtype: torch.dtype) -> list[nn.Module]:
    """Two networks of different random weights, with uneven norms."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torchvision.models.get_model(name).to(dtype).eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
        models.append(model)
    return models


def batches(count: int, size: int, side: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random images, the same on every device."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(size, 3, side, side, generator=generator, dtype=dtype).to(device)
        for _ in range(count)
    ]


def compare() -> tuple[float, str]:
    """Largest relative difference of a merge on CUDA from the one on the CPU."""
    models, worst, where = pair("resnet18", torch.float64), 0.0, ""
    merges = [("zip", cut) for cut in CUTS] + [(m, "layer2") for m in MATCHERS[1:]]
    for matcher, partial in merges:
        results = []
        for device in ("cpu", "cuda"):
            moved = [copy.deepcopy(m).to(device) for m in models]
            data = batches(4, 8, 64, torch.float64, device)
            merged = zipfx.zip(moved, data, matcher=matcher, partial=partial, progress=False)
            with torch.no_grad():
                output = merged(data[0])
            outputs = output if isinstance(output, tuple) else (output,)
            results.append([y.cpu() for y in outputs])
        for a, b in zip(*results, strict=True):
            difference = float((a - b).abs().max() / a.abs().max())
            if difference >= worst:
                worst, where = difference, f"{matcher}, partial={partial}"
    return worst, where


def greedy_rows() -> list[list[str]]:
    """Seconds of `zipfx.Zip` on the card and of the same on the CPU, copies included."""
    rows = []
    for total in SIZES:
        statistics = greedy.low_rank(total, "cuda")
        found, seconds = [], []
        for device in ("cuda", "cpu"):
            best = math.inf
            for _ in range(3 if device == "cuda" or total < 8192 else 1):
                torch.cuda.synchronize()
                start = time.perf_counter()
                here = replace(
                    statistics,
                    mean=statistics.mean.to(device),
                    covariance=statistics.covariance.to(device),
                )
                matching = zipfx.Zip()(here, total // 2)
                best = min(best, time.perf_counter() - start)
            found.append(matching.assignment)
            seconds.append(best)
        same = "equal" if torch.equal(*found) else "NOT EQUAL"
        ratio = f"{seconds[1] / seconds[0]:.0f}"
        rows.append([str(total), *(f"{s:.3f}" for s in seconds), ratio, same])
        print(*rows[-1], flush=True)
    return rows


def forward_seconds(models: Sequence[nn.Module], data: Sequence[Tensor]) -> float:
    """Seconds for the bare forward passes of all models over all batches."""
    with torch.inference_mode():
        for model in models:  # warm up
            model(data[0])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for batch in data:
            for model in models:
                model(batch)
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print, and with --out write, the comparison and the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    evaluate.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    worst, where = compare()
    matched = greedy_rows()
    verdict = "equal" if worst <= TOLERANCE else "NOT EQUAL"
    models = [m.cuda() for m in pair("resnet50", torch.float32)]
    data = batches(16, 32, 224, torch.float32, "cuda")
    bare = forward_seconds(models, data)
    zipfx.zip(models, data[:1], progress=False)  # warm up
    merged = zipfx.zip(models, data, progress=False)
    report: zipfx.Report = merged.meta["zipfx"]
    rows = [
        [stage, f"{seconds:.2f}", f"{seconds / bare:.2f}", f"{report.bytes[stage] / 2**30:.2f}"]
        for stage, seconds in report.seconds.items()
    ]
    text = [
        "# Merging on a GPU",
        "",
        evaluate.environment("benchmarks.gpu"),
        f"- card: {torch.cuda.get_device_name()}",
        "",
        f"CUDA against CPU, ResNet-18 pair, float64, {len(CUTS)} cuts and {len(MATCHERS)} "
        f"matchers: largest relative difference {worst:.1e} ({where}), tolerance {TOLERANCE:g}: "
        f"{verdict}.",
        "",
        f"ResNet-50 pair, {len(data)} batches of {len(data[0])} images at 224, float32 without "
        f"TF32; bare forward passes of both models: {bare:.2f} s.",
        "",
        evaluate.table(("stage", "seconds", "times bare forward", "peak GiB"), rows),
        "",
        "Greedy matching of N features, covariance on the card (the best of 3 runs; on the CPU "
        "above 4096 of 1): in rounds there, or copied and one join at a time on the CPU.",
        "",
        evaluate.table(("N", "card (s)", "CPU (s)", "ratio", "result"), matched),
    ]
    evaluate.publish("\n".join(text), options.out)
    if worst > TOLERANCE:
        raise SystemExit(f"a merge on CUDA differs from the CPU's by {worst:.1e}")


if __name__ == "__main__":
    main()
