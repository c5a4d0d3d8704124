"""Notes: what a report says of a merge beside its numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from zipfx.analysis import Analysis, Space
from zipfx.arguments import Job
from zipfx.match import Matches
from zipfx.merge import Fused
from zipfx.model.copies import hooked, structural_copy
from zipfx.model.tensors import is_batch_norm
from zipfx.observe import Example, Seen, comparable
from zipfx.repair import Repaired
from zipfx.report.files.made import extra_texts
from zipfx.text import summary
from zipfx.trace import TracedModels, record_of


@dataclass(frozen=True, eq=False)
class Done:
    """What every stage of a zip gave."""

    job: Job
    example: Example
    traced: TracedModels
    analysis: Analysis
    seen: Seen | None
    matches: Matches
    fused: Fused
    repaired: Repaired


def all_notes(done: Done, last: Sequence[str]) -> Iterator[str]:
    """The notes of a report, in the order of the stages; last: of what was done at the end."""
    models, merged = done.job.models, done.fused.module
    spaces = tuple(done.analysis.spaces)
    yield from done.analysis.spaces.notes
    yield from done.example.guessed
    yield from done.traced.notes
    yield from hooks(models)
    yield from done.example.left_out
    taken = dict.fromkeys(note for m in done.traced.modules for note in record_of(m).notes)
    yield from (note for note in taken if note not in done.analysis.spaces.notes)
    yield from few(spaces, {} if done.seen is None else done.seen.samples)
    yield from filled_up([] if done.seen is None else done.seen.unplaced)
    yield from unobserved(spaces, done.matches.blind)
    yield from done.fused.notes
    yield from done.repaired.notes
    yield from last
    yield from unrepaired(done.analysis, merged, done.job.repair_name)
    extras = unlike_extras(done.traced.as_traced)
    yield from (extras[path] for path, _ in merged.named_modules() if path in extras)
    if done.job.partial is None:
        yield from not_loadable(merged, models[0])


def unobserved(spaces: Sequence[Space], names: Collection[str]) -> list[str]:
    """Spaces of which nothing was observed, so that they were matched by weights."""
    rows = [s.name for s in spaces if s.name in names and s.places and not comparable(s).places]
    left = [s.name for s in spaces if s.name in names and s.name not in rows]
    notes = []
    if rows:
        notes.append(
            "matched by weights, since rows are sent there by what each model computes, so that "
            f"activations can not be compared: {', '.join(rows)}"
        )
    if left:
        notes.append(
            "matched by weights, since nothing varies there on the calibration data: "
            f"{', '.join(left)}"
        )
    return notes


def few(spaces: Sequence[Space], samples: Mapping[str, int]) -> list[str]:
    """Spaces of which too little was seen for correlations to mean anything."""
    few = [s for s in spaces if s.size > samples.get(s.name, s.size)]
    if not few:
        return []
    least = min(few, key=lambda s: samples[s.name] / s.size)
    return [
        f"few calibration samples: fewer than features in {len(few)} of {len(spaces)} spaces "
        f"({samples[least.name]} for the {least.size} features of {least.name!r}), so that "
        "correlations and fits say little; give more data"
    ]


def filled_up(unplaced: Sequence[str]) -> list[str]:
    """Spaces in which what only fills batches up was observed like all else."""
    return [
        "positions that the mask leaves out count as samples, as it can not be told which "
        "they are (give batches with more or fewer sequences than positions): "
        f"{summary(unplaced, 200)}"
    ] * bool(unplaced)


def hooks(models: Sequence[nn.Module]) -> list[str]:
    """Hooks of the caller, which are no part of the result."""
    return [
        f"hooks of model {k} are not part of the result: "
        + ", ".join(repr(path) if path else "those of the model itself" for path in paths)
        for k, model in enumerate(models)
        if (paths := hooked(model))
    ]


def unrepaired(analysis: Analysis, merged: nn.Module, repair: str) -> list[str]:
    """Running variances outside BatchNorm modules: repair does not find them."""
    known = {f"{name}.running_var" for name, m in merged.named_modules() if is_batch_norm(m)}
    left = sorted(analysis.spaces.variances - known)
    return [f"running statistics not re-estimated (no BatchNorm module): {', '.join(left)}"] * (
        repair == "bn" and bool(left)
    )


def unlike_extras(modules: Sequence[nn.Module]) -> dict[str, str]:
    """By path of a module: what is said of its extra state, where that is another in another model
    and so can not be merged."""
    first, *others = map(extra_texts, modules)
    unlike = [p for p, text in first.items() if any(o.get(p, text) != text for o in others)]
    return {
        path: f"extra state (get_extra_state) of {f'module {path!r}' if path else 'the model'} "
        "differs between the models: that of model 0 is kept"
        for path in unlike
    }


def not_loadable(merged: nn.Module, model: nn.Module) -> list[str]:
    """Whether the state of a full zip has other names than that of a model."""
    wanted = set(merged.state_dict())
    with suppress(Exception):  # the code of others
        wanted = set(structural_copy(model).state_dict())
    found = set(merged.state_dict())
    unlike = {"lacks": wanted - found, "has": found - wanted}
    told = [f"{what} {summary(sorted(names), 200)}" for what, names in unlike.items() if names]
    note = f"its state_dict does not load strictly into a {type(model).__name__}: it "
    return [note + " and ".join(told)] * bool(told)
