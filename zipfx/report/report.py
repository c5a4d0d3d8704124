"""Report: what a zip did, as frozen values and as a table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from zipfx.analysis.analysis import Analysis
from zipfx.analysis.labels.inside import decomposed
from zipfx.analysis.spaces.space_map import Pinned, Space, pinned_lines
from zipfx.match.matchers.matching import Matching, Merge, Pairs
from zipfx.model.copies import alias
from zipfx.model.running import untouched
from zipfx.model.tensors import clone_tensors, leaves
from zipfx.modes import as_caller
from zipfx.observe.data import batch_size
from zipfx.repair.layerwise import Refitted
from zipfx.text import table
from zipfx.values import ByValue


@dataclass(frozen=True, eq=False)
class SpaceReport(ByValue):
    """One space: matches within and across models (both 0 where M is no matching), and the mean
    correlation of the features that were joined (nan where nothing was observed)."""

    name: str
    size: int
    within: int
    across: int
    correlation: float

    @classmethod
    def of(cls, space: Space, merge: Merge, pairs: Pairs, observed: bool) -> SpaceReport:
        """What the merge of a space has joined."""
        counts = (merge.within, merge.across) if isinstance(merge, Matching) else (0, 0)
        return cls(space.name, space.size, *counts, pairs.mean if observed else math.nan)


@dataclass(frozen=True, eq=False)
class Report(ByValue):
    """What `zipfx.zip` did; at `merged.meta["zipfx"]`.

    layers: (zipped, all) of the layers that hold weights; parameters and flops: of the merged
    model (flops for one sample); model_parameters and model_flops: of each original; seconds and
    bytes: per stage (bytes: peak memory at its end, of the device, or resident on a CPU);
    unmerges: explicit index_select nodes at the cut; batches: read by observe and by repair;
    refits: what became of each layer that was refitted.

    Reports of equal merges are equal: seconds and bytes are of one run, so they do not count, and
    files leave them out.
    """

    models: int
    partial: str | None
    matcher: str
    repair: str
    spaces: tuple[SpaceReport, ...]
    layers: tuple[int, int]
    parameters: int
    model_parameters: tuple[int, ...]
    flops: int
    model_flops: tuple[int, ...]
    seconds: dict[str, float] = field(compare=False)
    bytes: dict[str, int] = field(compare=False)
    pinned: tuple[Pinned, ...]
    unmerges: tuple[str, ...]
    batches: dict[str, int]
    notes: tuple[str, ...] = field(default=())
    refits: tuple[Refitted, ...] = field(default=())

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("space", "size", "within", "across", "correlation")]
        rows += [
            (
                s.name,
                str(s.size),
                str(s.within),
                str(s.across),
                "-" if math.isnan(s.correlation) else f"{s.correlation:.3f}",
            )
            for s in self.spaces
        ]
        zipped = "everything" if self.partial is None else f"up to {self.partial!r}"
        total = sum(self.model_parameters)
        lines = [
            f"zip of {self.models} models, {zipped}: {self.layers[0]} of {self.layers[1]} layers; "
            f"matcher {self.matcher}, repair {self.repair}",
            f"parameters {self.parameters:,} (the models: {total:,}), "
            f"FLOPs per sample {self.flops:,} (the models: {sum(self.model_flops):,})",
            "batches "
            + ", ".join(f"{k} {v}" for k, v in self.batches.items())
            + "; seconds " * bool(self.seconds)
            + ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items()),
            "",
            *table(rows),
            *_LEGEND[0],
        ]
        if self.refits:
            lines += ["", *self._refits(), *_LEGEND[1]]
        if self.unmerges:
            lines += ["", f"explicit unmerge at the cut: {', '.join(self.unmerges)}"]
        if self.pinned:
            lines += ["", *pinned_lines(self.pinned)]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def _refits(self) -> list[str]:
        """A table of the errors that refitting found and left."""
        rows: list[tuple[str, ...]] = [("layer", "outputs", "refitted", "error", "then", "ridge")]
        rows += [
            (
                r.name,
                str(r.outputs),
                str(r.changed),
                f"{r.before:.3g}",
                f"{r.after:.3g}",
                f"{r.ridge:g}" if r.changed else "-",
            )
            for r in self.refits
        ]
        return table(rows)


_LEGEND = (
    ["within, across: matches inside one model, and between; correlation: of the joined features"],
    [
        "error, then: mean square of what is missed of the targets on held-out data, before and",
        "after, relative to their variance; refitted: outputs that changed; ridge inf: only scaled",
    ],
)


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
    nodes = {c.node for c in analysis.facts.ledger.contractions if c.node >= 0}
    nodes |= {
        i
        for i, n in enumerate(analysis.module.graph.nodes)
        if n.op == "call_module"
        and any(p.ndim > 1 for p in analysis.module.get_submodule(str(n.target)).parameters())
    }
    return sum(i <= analysis.grouping.last for i in nodes), len(nodes)
