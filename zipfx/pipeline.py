"""Pipeline: the stages of a zip, in order. The only file that sees them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from zipfx.analysis import Analysis, analyze_trunk
from zipfx.arguments import Job
from zipfx.match import Matcher, match_models
from zipfx.merge import Fused, fuse_models
from zipfx.modes import fixed_randomness, own_modes
from zipfx.observe import (
    BatchToArgs,
    Example,
    MaskOf,
    Seen,
    comparable,
    example_of,
    observe,
    observed,
    pin_hidden,
)
from zipfx.repair import Repair, Repaired
from zipfx.report import Done, Report, Stages, count_flops
from zipfx.trace import KEY, Front, TracedModels, correspond, trace_all


@own_modes()
def zip(
    models: Sequence[nn.Module],
    calib_loader: Iterable[Any] | None,
    *,
    partial: str | None = None,
    matcher: str | Matcher = "zip",
    repair: str | Repair | None = None,
    example_inputs: Any = None,
    max_samples: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int = 0,
    batch_to_args: BatchToArgs | None = None,
    mask: MaskOf | None = None,
    tracer: fx.Tracer | None = None,
    front: str | Front = "auto",
    verify: bool = True,
    places: str = "source",
) -> fx.GraphModule:
    """Merge K models of one architecture into one multi-task model, without training.

    The models are left unchanged.

    Args:
        models: K >= 2 modules that `torch.fx` can trace; they must correspond node by node up to
            the cut. Any initialisation, any tasks; one device, one dtype each.
        calib_loader: an iterable of batches, or a sequence of K of them (one per model, taken in
            turns; every model sees all of it). A batch is a tensor, a tuple or list whose first
            item is the input, or a dict of keyword arguments; anything else with `batch_to_args`.
            Labels are never read. None only with matcher="weights" or "identity".
        partial: qualified name (any that it has) of the last module to be zipped; what runs later
            becomes one head per model. None: everything is zipped, and the models' outputs are
            averaged.
        matcher: "zip", "permute", "optimal", "kmeans", "weights" (no data needed), "identity"
            (weight averaging), "svd" (for study), an instance such as `Zip(alpha=0.1)`, or a
            function of your own (see `Matcher`).
        repair: what is re-estimated on the calibration data once the weights are fused: "refit",
            every layer by least squares (default where there is data; also a `Refit` with settings
            of your own); "affine", a scale and a shift of every output of a layer; "bn", the
            statistics of BatchNorms; "none"; or a function of your own (`zipfx.repair.Repair`).
            With a loader for each model, "refit" and "affine" ask of each task's data for the
            features of that task's model only, which is better.
        example_inputs: input (or tuple of arguments) to analyse with; default: two samples of the
            first batch, or, without data, random ones of a size that the first weight suggests.
        max_samples: calibrate on at most this many samples of each loader; no more are drawn.
        device: where to calibrate and match; default: where the models are.
        progress: show progress bars.
        seed: of everything random; the caller's generators are restored afterwards.
        batch_to_args: a function from a batch to the input, a tuple of arguments, or a dict.
        mask: a function from a batch to which of its positions are samples, a tensor (B, T) of
            booleans (None: all of them). Default: where there is an `attention_mask`, as that says.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
        front: what makes graphs of the models: "symbolic" (torch.fx, which keeps modules), "export"
            (torch.export; also a `zipfx.Export` with settings), "auto" (the second where the first
            fails), or a function of your own (`zipfx.trace.Front`).
        verify: check the analysis numerically (see `analyze`).
        places: where a space is observed: "source" (wherever a weight reads it, and before the
            activation of the last read; the best on real pairs, see benchmarks/places.py), "last"
            (the last read only), "reads" (all reads) or "all". Correlations are averaged.

    Returns:
        A GraphModule on the device, in the dtype and in the mode of models[0]. Full zip: its output
        is structured as one model's. Partial zip: a tuple with one entry per model. What was done
        is in `.meta["zipfx"]`, a `Report`.

    Raises:
        ZipError: models that do not correspond, data that can not be used, NaN in activations, ...;
            the message says what to do. The models are unharmed.

    Source: ZipIt! (Stoica et al., ICLR 2024): merge and unmerge matrices (section 4), partial zip
    (section 4.2); BatchNorm statistics as in REPAIR (Jordan et al., 2023).

    >>> import torch, zipfx
    >>> from torch import nn
    >>> net = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> data = [torch.randn(32, 4) for _ in range(3)]
    >>> merged = zipfx.zip([net(), net()], data, partial="1", progress=False)
    >>> [tuple(y.shape) for y in merged(data[0])]
    [(32, 3), (32, 3)]
    >>> merged.meta["zipfx"].layers
    (1, 2)
    """
    job = Job.of(
        models, calib_loader, partial=partial, matcher=matcher, repair=repair,
        example_inputs=example_inputs, max_samples=max_samples, device=device, progress=progress,
        seed=seed, batch_to_args=batch_to_args, mask=mask, tracer=tracer, front=front,
        verify=verify, places=places,
    )  # fmt: skip
    stages = Stages(job.device)
    with fixed_randomness(job.seed), torch.no_grad():
        with stages.stage("trace"):
            example = example_of(job.models[0], job.data, job.example_inputs, job.device)
            traced = _traced(job, example)
        with stages.stage("correspond"):
            traced = correspond(traced)
        with stages.stage("analyze"):
            traced, analysis = _analysed(job, example, traced)
        with stages.stage("observe"):
            seen = _seen(job, example, traced, analysis)
        with stages.stage("match"):
            spaces = tuple(analysis.spaces)
            matches = match_models(
                job.matcher, spaces, seen, traced.parameters, len(models), progress=job.progress
            )
        with stages.stage("fuse"):
            fused = fuse_models(traced, analysis, matches, job.models, job.device)
        with stages.stage("repair"):
            repaired = _repaired(job, example, traced, fused)
        flops = [count_flops(m, traced.inputs) for m in (fused.module, *traced.modules)]
        last_notes = fused.finish(job.models, job.home)
    done = Done(job, example, traced, analysis, seen, matches, fused, repaired)
    fused.module.meta[KEY] = Report.of(done, stages, flops, last_notes)
    return fused.module


def _traced(job: Job, example: Example) -> TracedModels:
    return trace_all(
        job.models, example.inputs, example.by_name, example.given,
        partial=job.partial, tracer=job.tracer, front=job.front, device=job.device, home=job.home,
        progress=job.progress,
    )  # fmt: skip


def _analysed(job: Job, example: Example, traced: TracedModels) -> tuple[TracedModels, Analysis]:
    """The analysis of the trunk, where the trunk ends for it, and what it was analysed with."""
    analysis = analyze_trunk(traced, verify=job.verify, seed=job.seed)
    if analysis.facts.empty and example.more is not None:
        # data chooses rows: with more samples there may be some everywhere
        traced = replace(traced, inputs=example.more())
        analysis = analyze_trunk(traced, verify=job.verify, seed=job.seed)
    traced = replace(traced, last=analysis.grouping.last)
    return traced, pin_hidden(analysis) if job.observes else analysis


def _seen(job: Job, example: Example, traced: TracedModels, analysis: Analysis) -> Seen | None:
    """Statistics of the spaces; None where nothing is to be observed."""
    if example.data is None or not job.observes:
        return None
    return observe(
        traced.modules,
        [comparable(space) for space in observed(tuple(analysis.spaces))],
        example.data,
        states=traced.states,
        clone_inputs=analysis.writes_inputs,
        choose=job.choose,
        progress=job.progress,
    )


def _repaired(job: Job, example: Example, traced: TracedModels, fused: Fused) -> Repaired:
    if example.data is None:
        return Repaired(None)
    return job.repair(fused, traced, example.data, progress=job.progress)
