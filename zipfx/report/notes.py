"""Notes: what a report says of a merge beside its numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from torch import nn

from zipfx.analysis import Analysis, Space
from zipfx.match import comparable
from zipfx.model.copies import hooked, structural_copy
from zipfx.model.tensors import is_batch_norm
from zipfx.repair import Refitted
from zipfx.report.files.made import extra_texts
from zipfx.text import summary


def blind(spaces: Sequence[Space], names: Collection[str]) -> list[str]:
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


def hooks(models: Sequence[nn.Module]) -> list[str]:
    """Hooks of the caller, which are no part of the result."""
    return [
        f"hooks of model {k} are not part of the result: "
        + ", ".join(repr(path) if path else "those of the model itself" for path in paths)
        for k, model in enumerate(models)
        if (paths := hooked(model))
    ]


def unrepaired_norms(batches: int, unmeasured: Sequence[str]) -> list[str]:
    """What repair="bn" left as it was."""
    if not batches:
        return ['repair="bn" changed nothing: the merge has no BatchNorm']
    return [
        "BatchNorms to which fewer than two values came are as they were fused: "
        + ", ".join(unmeasured)
    ] * bool(unmeasured)


def unfitted(refits: Sequence[Refitted]) -> list[str]:
    """What refitting left as it was for want of data."""
    unseen = [r.name for r in refits if r.unseen]
    notes = []
    if unseen:
        notes.append(
            "not refitted for want of data (each loader takes two samples, one to be held out): "
            f"{', '.join(unseen)}"
        )
    if not any(r.changed for r in refits):
        notes.append(
            "the repair changed nothing: no layer that it could change got better on held-out data"
        )
    return notes


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
