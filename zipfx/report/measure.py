"""Measure: seconds, bytes and FLOPs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from zipfx.analysis import Analysis
from zipfx.model.copies import alias
from zipfx.model.running import decomposed, untouched
from zipfx.model.tensors import batch_size, clone_tensors, leaves
from zipfx.modes import as_caller


class Stages:
    """Seconds and peak bytes of each stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside (waiting for the device)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.bytes[name] = self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return 0
        import resource  # not there on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_flops(module: fx.GraphModule, inputs: tuple[Any, ...]) -> int:
    """FLOPs for one sample, by torch's counter, in eval mode; it can not look into fused kernels
    (of recurrent layers, and of attention), so these are off."""
    twin = alias(module).eval().requires_grad_(False)  # torch's counter hooks into gradients
    counter = FlopCounterMode(display=False)
    with untouched([*twin.parameters(), *twin.buffers()]), decomposed(twin), as_caller(), counter:
        fx.Interpreter(twin, graph=module.graph).run(*clone_tensors(inputs))
    first = next((t for t in leaves(inputs) if isinstance(t, Tensor) and t.ndim), None)
    samples = batch_size(inputs) or (1 if first is None else len(first))
    return int(counter.get_total_flops()) // max(1, samples)


def count_layers(analysis: Analysis) -> tuple[int, int]:
    """Nodes that read features or inputs with a weight: in the trunk, and in all."""
    nodes = {c.node for c in analysis.facts.constraints.contractions if c.node >= 0}
    nodes |= {
        i
        for i, n in enumerate(analysis.module.graph.nodes)
        if n.op == "call_module"
        and any(p.ndim > 1 for p in analysis.module.get_submodule(str(n.target)).parameters())
    }
    return sum(i <= analysis.grouping.last for i in nodes), len(nodes)
