"""Report: what a zip did, as frozen values and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from zipfx.analysis import Pinned, Space, pinned_lines
from zipfx.match import Matching, Merge, Pairs
from zipfx.merge import HeadPlan
from zipfx.model.callables import name_of_callable
from zipfx.repair import Refitted
from zipfx.report.files.made import Made, as_made
from zipfx.report.files.stand_ins import Traced, described
from zipfx.report.format.as_json import NOT_STORED
from zipfx.report.measure import Stages, count_layers
from zipfx.report.notes import Done, all_notes
from zipfx.text import table
from zipfx.trace import TracedModels, record_of
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
    refits: what became of each layer that was refitted; traced, made: what the models were traced
    with, and what the merge was like when it was made, for `zipfx.save`.

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
    front: str = field(default="symbolic")
    traced: Traced | None = field(default=None, repr=False, compare=False, metadata=NOT_STORED)
    made: Made | None = field(default=None, repr=False, compare=False, metadata=NOT_STORED)

    @classmethod
    def of(
        cls, done: Done, stages: Stages, flops: Sequence[int], last_notes: Sequence[str]
    ) -> Report:
        """The report of a zip; flops: of the merge, and of each model."""
        job, traced, merged, matches = done.job, done.traced, done.fused.module, done.matches
        spaces = done.analysis.spaces
        repaired = {} if done.repaired.batches is None else {"repair": done.repaired.batches}
        front = record_of(traced.as_traced[0]).front
        tracer = None if job.tracer is None else type(job.tracer).__qualname__
        return cls(
            models=len(job.models),
            partial=job.partial,
            matcher=name_of_callable(job.matcher),
            repair=job.repair_name,
            spaces=tuple(
                SpaceReport.of(s, *matches.by_space[s.name], s.name in matches.observed)
                for s in spaces
            ),
            layers=count_layers(done.analysis),
            parameters=_parameters(merged),
            model_parameters=tuple(map(_parameters, job.models)),
            flops=flops[0],
            model_flops=tuple(flops[1:]),
            seconds=dict(stages.seconds),
            bytes=dict(stages.bytes),
            pinned=spaces.pinned,
            unmerges=_unmerges(traced, done.fused.plans),
            batches={"observe": 0 if done.seen is None else done.seen.batches, **repaired},
            refits=done.repaired.refits,
            front=front,
            notes=tuple(all_notes(done, last_notes)),
            traced=Traced(described(traced.inputs), tracer, traced.by_name, front),
            made=as_made(merged, len(job.models), job.partial is not None),
        )

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


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _unmerges(traced: TracedModels, plans: Sequence[HeadPlan]) -> tuple[str, ...]:
    """Where the features of the models are restored, head by head."""
    return tuple(
        f"head {k} at {list(traced.modules[k].graph.nodes)[j].name}"
        for k, plan in enumerate(plans)
        for j, unmerges in plan.restored.items()
        if unmerges
    )


_LEGEND = (
    ["within, across: matches inside one model, and between; correlation: of the joined features"],
    [
        "error, then: mean square of what is missed of the targets on held-out data, before and",
        "after, relative to their variance; refitted: outputs that changed; ridge inf: only scaled",
    ],
)
