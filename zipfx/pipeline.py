"""Zip: the stages in order. The only file that sees them all."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.analysis import Analysis, checked, run_analysis
from zipfx.checks import flag, whole
from zipfx.errors import ZipError, first_line
from zipfx.match import (
    Identity,
    Matched,
    Matcher,
    Weights,
    check_finite,
    comparable,
    match_spaces,
    match_weights,
    observed,
    resolve,
    unknown,
    wanted,
)
from zipfx.merge import (
    Assembly,
    constrained,
    copy_modes,
    find_computed,
    homes,
    limits,
    put_back,
    renew,
)
from zipfx.model.callables import name_of_callable
from zipfx.model.contents import check_models
from zipfx.model.running import state_of
from zipfx.model.tensors import named_tensors
from zipfx.modes import fixed_randomness, own_modes
from zipfx.observe import (
    PLACES,
    BatchToArgs,
    Statistics,
    calibration,
    combine,
    first_call,
    guessed_input,
    observe,
)
from zipfx.repair import (
    Refit,
    Refitted,
    bake,
    plan_targets,
    refit,
    repair_batch_norm,
    unfold,
    with_plain_weights,
)
from zipfx.report import (
    MADE,
    TRACED,
    Report,
    SpaceReport,
    Stages,
    Traced,
    as_made,
    count_flops,
    count_layers,
    described,
    few,
    hooks,
    not_loadable,
    unfitted,
    unlike_extras,
    unrepaired,
    unrepaired_norms,
)
from zipfx.report import blind as unobserved
from zipfx.trace import (
    NOTES,
    aligned,
    check_constants,
    check_outputs,
    counterparts,
    first_name,
    last_node,
    trace,
    unpacked,
)

REFITS = {"affine": Refit(ridges=(math.inf,), rounds=0), "refit": Refit()}
REPAIRS = ("none", "bn", *REFITS)
_FIRST = "the first samples of calib_loader"
_MANY = 256  # samples to analyse with, where two do not come everywhere


@own_modes()
def zip(
    models: Sequence[nn.Module],
    calib_loader: Iterable[Any] | None,
    *,
    partial: str | None = None,
    matcher: str | Matcher = "zip",
    repair: str | Refit | None = None,
    example_inputs: Any = None,
    max_samples: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int = 0,
    batch_to_args: BatchToArgs | None = None,
    tracer: fx.Tracer | None = None,
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
            statistics of BatchNorms; or "none". With a loader for each model, "refit" and "affine"
            ask of each task's data for the features of that task's model only, which is better.
        example_inputs: input (or tuple of arguments) to analyse with; default: two samples of the
            first batch, or, without data, random ones of a size that the first weight suggests.
        max_samples: calibrate on at most this many samples of each loader; no more are drawn.
        device: where to calibrate and match; default: where the models are.
        progress: show progress bars.
        seed: of everything random; the caller's generators are restored afterwards.
        batch_to_args: a function from a batch to the input, a tuple of arguments, or a dict.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
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
    merging = resolve(matcher)
    dataless = calib_loader is None
    if repair is None:
        repair = "none" if dataless else "refit"
    refitting = repair if isinstance(repair, Refit) else REFITS.get(str(repair))
    repair = "refit" if isinstance(repair, Refit) else repair
    if not isinstance(repair, str) or repair not in REPAIRS:
        raise ZipError(f"repair={repair!r} is unknown; choose one of {list(REPAIRS)}")
    if not isinstance(places, str) or places not in PLACES:
        raise ZipError(f"places={places!r} is unknown; choose one of {list(PLACES)}")
    check_models(models)
    verify, progress = flag("verify", verify), flag("progress", progress)
    if partial is not None and not isinstance(partial, str):
        raise ZipError(f"partial is {partial!r}; give the qualified name of a module, or None")
    by_data = not isinstance(merging, Identity | Weights)
    if dataless and (by_data or repair != "none"):
        raise ZipError(
            'calib_loader=None works only with matcher="weights" or "identity" and repair="none"; '
            "pass an iterable of batches"
        )
    observes = not dataless and not isinstance(merging, Weights)
    home = _device(models[0])
    try:
        away = home if device is None else torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError) as error:
        raise ZipError(f"device={device!r} is none: {first_line(error)}") from error
    stages, seed = Stages(away), whole("seed", seed) % 2**64
    with fixed_randomness(seed), torch.no_grad():
        data = (
            None
            if dataless
            else calibration(calib_loader, len(models), batch_to_args, max_samples, away)
        )
        with stages.stage("trace"):
            guessed = [guessed_input(models[0])] if dataless and example_inputs is None else []
            example = guessed[0] if guessed else example_inputs
            inputs, by_name, data, unread = first_call(models[0], data, example, away)
            elsewhere = None if away == home else away
            modules = [trace(m, tracer, elsewhere, inputs, by_name, folded=True) for m in models]
            given = "example_inputs" if data is None or example_inputs is not None else _FIRST
            states = [
                state_of(m, inputs, f"model {k} fails on {given}") for k, m in enumerate(modules)
            ]
            if any(isinstance(t, nn.Parameter) for state in states for t in state.tensors):
                # on memory of their own
                modules = [trace(m, tracer, away, inputs, by_name, folded=True) for m in models]
                states = [state_of(m, inputs) for m in modules]
            cut = None if partial is None else first_name(modules[0], partial)
            last = last_node(modules[0], cut)
            extras = unlike_extras(modules)
        with stages.stage("correspond"):
            if partial is None:
                check_outputs(modules, inputs)
            alike = aligned(modules, last, inputs, cut)
            states = [
                state if new is old else state_of(new, inputs)
                for state, new, old in builtins.zip(states, alike.modules, modules, strict=True)
            ]
            modules, last = alike.modules, alike.last
            check_constants(modules, last)
        with stages.stage("analyze"):
            analysis = _analyse(modules, inputs, last, verify, seed, given)
            if analysis.facts.empty and data is not None and example is None:
                # data chooses rows: with more of them there may be some everywhere
                inputs = first_call(models[0], data, None, away, _MANY)[0]
                analysis = _analyse(modules, inputs, last, verify, seed, given)
            last = analysis.grouping.last
            reason = "lies inside one node of the traced graph, where it can not be observed"
            while observes and (
                hidden := [s.name for s in observed(tuple(analysis.spaces)) if not s.places]
            ):
                analysis = analysis.pin(hidden, reason)
            spaces = tuple(analysis.spaces)
        with stages.stage("observe"):
            observers, batches = (
                ({}, 0)
                if data is None or not observes
                else observe(
                    modules,
                    [comparable(s) for s in observed(spaces)],
                    data,
                    states=states,
                    progress=progress,
                    choose=PLACES[places],
                    clone_inputs=_writes_inputs(analysis),
                )
            )
        counts: dict[str, int] = {"observe": batches}
        samples: dict[str, int] = {}

        def take(name: str) -> Statistics:
            found = combine(observers.pop(name), *wanted(merging))
            samples[name] = found.count
            return found

        with stages.stage("match"):
            blind = unknown(spaces, observers) if observes else set()
            by_weights = isinstance(merging, Weights)
            parameters = {} if observes and not blind else _corresponding(modules, last)
            check_finite(parameters, [s for s in spaces if not observes or s.name in blind])
            matched: Matched = {}
            if not by_weights:
                known = [s for s in spaces if s.name not in blind]
                matched = match_spaces(merging, known, take if observes else None, len(models))
            if isinstance(merging, Identity):
                rest = [s for s in spaces if s.name in blind]
                matched |= match_spaces(merging, rest, None, len(models))
            elif by_weights or blind:
                how = merging if isinstance(merging, Weights) else Weights()
                matched = match_weights(how, spaces, parameters, matched)
        with stages.stage("fuse"):
            job = Assembly(modules, analysis, matched, inputs)
            merged, plans, notes = job.full() if partial is None else job.partial()
            merged.to(away)
            found = find_computed(merged, models, homes(len(models), partial))
            named, told = constrained(merged, found)
            notes += told + renew(merged, models)
        refits: list[Refitted] = []
        with stages.stage("repair"):
            if repair == "bn" and data is not None:
                state = state_of(merged, inputs)
                counts["repair"], unmeasured = repair_batch_norm(
                    merged, data, state, progress=progress
                )
                notes += unrepaired_norms(counts["repair"], unmeasured)
            elif isinstance(refitting, Refit) and data is not None:
                states = [state_of(merged, inputs), *states]
                written = states[0].tensors
                plain, bakeable = with_plain_weights(merged, inputs, written)
                wide = unfold(plain, inputs)
                wides = [unfold(m, inputs, to_write=False) for m in modules]
                bounds = limits(
                    merged, found, named, [one.parameter for one in bakeable if not one.is_view]
                )
                steps, left = plan_targets(
                    wide, job, plans, len(data.loaders), wides, written, bounds
                )
                refits, counts["repair"] = refit(
                    wide, wides, steps, data, refitting, states, progress=progress
                )
                notes += [f"not refitted: {', '.join(left)}"] * bool(left)
                notes += unfitted(refits) + bake(merged, bakeable)
        flops = [count_flops(m, inputs) for m in (merged, *modules)]
        notes += put_back(merged, named)
        merged.to(home)
        copy_modes(merged, models)
        taken = dict.fromkeys(note for m in modules for note in m.meta[NOTES])
    own_tracer = None if tracer is None else type(tracer).__qualname__
    merged.meta[TRACED] = Traced(described(inputs), own_tracer, by_name)
    merged.meta["zipfx"] = Report(
        models=len(models),
        partial=partial,
        matcher=name_of_callable(merging),
        repair=repair,
        spaces=tuple(
            SpaceReport.of(s, *matched[s.name], observes and s.name not in blind) for s in spaces
        ),
        layers=count_layers(analysis),
        parameters=sum(p.numel() for p in merged.parameters()),
        model_parameters=tuple(sum(p.numel() for p in m.parameters()) for m in models),
        flops=flops[0],
        model_flops=tuple(flops[1:]),
        seconds=dict(stages.seconds),
        bytes=dict(stages.bytes),
        pinned=analysis.spaces.pinned,
        unmerges=tuple(
            f"head {k} at {list(modules[k].graph.nodes)[j].name}"
            for k, p in enumerate(plans)
            for j, u in p.restored.items()
            if u
        ),
        batches=counts,
        refits=tuple(refits),
        notes=(
            *analysis.spaces.notes,
            *(
                f"analysed with random inputs of shape {tuple(x.shape)}, guessed from the first "
                "weight: pass example_inputs=... to choose"
                for x in guessed
            ),
            *alike.notes,
            *hooks(models),
            *unread,
            *(note for note in taken if note not in analysis.spaces.notes),
            *few(spaces, samples),
            *([] if isinstance(merging, Identity) else unobserved(spaces, blind)),
            *notes,
            *unrepaired(analysis, merged, repair),
            *(extras[path] for path, _ in merged.named_modules() if path in extras),
            *([] if partial is not None else not_loadable(merged, models[0])),
        ),
    )
    merged.meta[MADE] = as_made(merged, len(models), partial is not None)
    return merged


def _corresponding(modules: Sequence[fx.GraphModule], last: int) -> dict[str, list[Tensor]]:
    """The parameters of all models, by their names in model 0."""
    tensors = counterparts(modules, last)
    names = named_tensors(modules[0]).items()
    return {n: tensors[id(t)] for n, t in names if id(t) in tensors and isinstance(t, nn.Parameter)}


def _device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _analyse(
    modules: Sequence[fx.GraphModule],
    inputs: tuple[Any, ...],
    last: int,
    verify: bool,
    seed: int,
    given: str,
) -> Analysis:
    if last == len(modules[0].graph.nodes) - 1:
        return run_analysis(modules[0], inputs, verify=verify, seed=seed, given=given)
    found = run_analysis(modules[0], inputs, verify=False, given=given)
    tuples = [i for i, f in enumerate(found.facts.nodes) if f.values and not f.is_tensor]
    found = found.cut(unpacked(modules, last, tuples))
    return checked(found, inputs, seed=seed) if verify else found


def _writes_inputs(analysis: Analysis) -> bool:
    nodes = list(analysis.module.graph.nodes)
    inputs = {i for i, n in enumerate(nodes) if n.op == "placeholder"}
    return any(inputs & fact.writes for fact in analysis.facts.nodes)
