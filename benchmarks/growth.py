"""How do time and memory of the analysis grow with the network?

    python -m benchmarks.growth --out benchmarks/results/growth_cpu_202611.md

Three measurements of `zipfx.analyze` in float32, on one image and one thread: the process time on
a ResNet-50, a Swin-B and a DenseNet-201 (64 pixels, with and without the numeric check; the median
of three); the process time on ResNets of up to 500 layers, with the exponent of its growth in the
number of graph nodes; and the peak memory beside that of one forward pass, each in a process of its
own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.resnet import BasicBlock, ResNet

import zipfx
from benchmarks import evaluate, memory
from zipfx.trace.tracing import trace

NETWORKS = ("resnet50", "swin_b", "densenet201")
DEPTHS = (50, 100, 200, 350, 500)
MIB = 2**20


def image() -> Tensor:
    return torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def deep(layers: int) -> nn.Module:
    """A ResNet of basic blocks: three in the last stage, the others shared among the first three.

    >>> sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in deep(50).modules()) - 3  # shortcuts
    50
    """
    blocks = (layers - 2) // 2 - 3
    stages = [blocks // 3 + (i < blocks % 3) for i in range(3)]
    return ResNet(BasicBlock, [*stages, 3]).eval()


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = deep(int(name)) if name.isdigit() else get_model(name, weights=None).eval()
    return model


# ------------------------------------------------------------------ time
def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """Median process time of a function over some calls."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return statistics.median(found)


def times(name: str) -> tuple[int, float, float]:
    """Nodes of the traced graph; seconds of its analysis without and with the numeric check."""
    model, x = build(name), image()
    nodes = len(trace(model).graph.nodes)
    plain = seconds(lambda: zipfx.analyze(model, x, verify=False))
    return nodes, plain, seconds(lambda: zipfx.analyze(model, x))


# ------------------------------------------------------------------ memory
WORK = {
    "forward": lambda model, x: model(x),
    "analyze": lambda model, x: zipfx.analyze(model, x, verify=False),
    "verify": lambda model, x: zipfx.analyze(model, x),
}


def added(name: str, work: str) -> int:
    """Peak memory of this process in bytes during the work, over what it held before.

    The model's own memory does not count. A small network goes first, for libraries to be loaded.
    """
    with torch.no_grad():
        small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
        for warm in WORK.values():
            warm(small, image())
        model, x = build(name), image()
        memory.reset_peak()  # forget that of building
        before = memory.resident()
        WORK[work](model, x)
    return memory.peak_resident() - before


def measured(name: str, work: str, threads: int) -> int:
    """`added`, in a process of its own."""
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.growth", "--threads", str(threads),
        "--child", name, work,
    ]  # fmt: skip
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# ------------------------------------------------------------------ the report
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    evaluate.add_arguments(parser)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="of ResNets")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(added(*options.child))
        return
    rows, grown, held = [], [], []
    for name in options.networks:
        nodes, plain, verified = times(name)
        rows.append((name, str(nodes), f"{plain:.2f}", f"{verified:.2f}"))
        print(*rows[-1], flush=True)
    for layers in options.depths:
        grown.append((layers, *times(str(layers))))
        print(*grown[-1], flush=True)
    for name in [*options.networks, str(max(options.depths))]:
        peaks = [measured(name, work, options.threads) for work in WORK]
        shown = f"ResNet of {name} layers" if name.isdigit() else name
        size = sum(t.numel() * t.itemsize for t in build(name).state_dict().values())
        held.append((shown, *(f"{n / MIB:.0f}" for n in (size, *peaks))))
        held[-1] += tuple(f"{(size + n) / (size + peaks[0]):.1f}" for n in peaks[1:])
        print(*held[-1], flush=True)
    powers = [evaluate.exponent([g[1] for g in grown], [g[i] for g in grown]) for i in (2, 3)]
    seconds_header = ("nodes", "analyze (s)", "with verify (s)")
    parts = [
        "# Time and memory of the analysis",
        evaluate.environment("benchmarks.growth"),
        "float32, one image of 64 pixels. Seconds: process time, the median of 3.",
        evaluate.table(("network", *seconds_header), rows),
        "## ResNets of basic blocks",
        f"Seconds grow with the number of nodes to the power {powers[0]:.2f}, with the numeric "
        f"check {powers[1]:.2f} (least squares of logarithms). Widths are 64, 128, 256 and 512; "
        "three blocks are in the last stage, the others shared among the first three.",
        evaluate.table(
            ("layers", *seconds_header),
            [(str(n), str(nodes), f"{a:.2f}", f"{b:.2f}") for n, nodes, a, b in grown],
        ),
        "## Peak memory",
        "MiB that the process holds at most (VmHWM), over what it held when the model was "
        "built, and then (last two columns) with the model's own, as a multiple of model and "
        "forward pass. The numeric check widens each weight to float64 when a node uses it.",
        evaluate.table(
            ("network", "model", "forward", "analyze", "with verify", "analyze / forward",
             "with verify / forward"),
            held,
        ),
    ]  # fmt: skip
    evaluate.publish("\n\n".join(parts), options.out)


if __name__ == "__main__":
    main()
