"""Made: what a merge was like when it was made, so that nothing is saved that could not be loaded.

A file holds weights, and which node copies which. Layers with their settings, and how the modules
lie in one another, come from the models. So what was changed of these since (a layer in place of
another one, a hook, a parametrization, a patched forward) would be lost, or would not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx, nn
from torch.nn.utils.prune import BasePruningMethod

from zipfx.errors import ZipError
from zipfx.merge import HEADS
from zipfx.model.callables import name_of_callable
from zipfx.model.contents import as_text
from zipfx.model.graph_module import extra_state, has_extra_state
from zipfx.report.files.recipe import GraphStep, Recipe, patched, recipe_of
from zipfx.report.files.stored import further_names, kind, named
from zipfx.trace import KEY, own_tensors


@dataclass(frozen=True)
class Unit:
    """A module of a merge.

    kind: its class; patched: what it has in place of methods of its class, by name; tensors: what
    they are like, by name; extra: state that it has besides, as text.
    """

    kind: str
    patched: dict[str, str]
    tensors: dict[str, str]
    extra: str | None = None


@dataclass(frozen=True)
class Made:
    """units: by path; steps: nodes of the graph, by name, and results by head; tied: further names
    of parameters -> first names."""

    units: dict[str, Unit] = field(repr=False)
    steps: dict[str | int | None, GraphStep] = field(repr=False)
    tied: dict[str, str] = field(repr=False)


def as_made(merged: fx.GraphModule, models: int, partial: bool) -> Made:
    """What a merge is like now; models, partial: as in `recipe_of`."""
    recipe = recipe_of(merged, models, partial)
    steps: dict[str | int | None, GraphStep] = {step.name: step for step in recipe.steps}
    steps |= {step.part: step for step in recipe.results}
    return Made(_units(merged), steps, _ties(merged))


def _units(merged: nn.Module) -> dict[str, Unit]:
    return {path: _unit(part) for path, part in merged.named_modules(remove_duplicate=False)}


def _unit(module: nn.Module) -> Unit:
    cls: type[nn.Module] = type(module)
    tensors = {name: f"{kind(t)} {tuple(t.shape)}" for name, t in own_tensors(module).items()}
    if isinstance(module, fx.GraphModule):  # each has a class of its own
        cls = fx.GraphModule
    extra = extra_text(module) if has_extra_state(module) else None
    return Unit(f"{cls.__module__}.{cls.__qualname__}", patched(module), tensors, extra)


def extra_text(module: nn.Module) -> str:
    """What tells the extra state of a module from another one."""
    return hashlib.sha256(as_text(extra_state(module)).encode()).hexdigest()[:16]


def extra_texts(model: nn.Module) -> dict[str, str]:
    """By path of a module with extra state, `extra_text`."""
    found = model.named_modules()
    return {path: extra_text(module) for path, module in found if has_extra_state(module)}


def _ties(merged: nn.Module) -> dict[str, str]:
    """Of parameters: those of buffers end when a module is moved to another device or dtype."""
    return further_names(
        {name: t for name, t in named(merged).items() if isinstance(t, nn.Parameter)}
    )


def check_as_made(merged: fx.GraphModule, models: int, partial: bool) -> Recipe:
    """The recipe of a merge, which is still what it was when it was made, but for the values of its
    tensors (and for heads that are no longer there).

    Raises:
        ZipError: it is not, or has hooks; the message names the first difference.
    """
    made = getattr(merged.meta.get(KEY), "made", None)
    if not isinstance(made, Made):
        raise ZipError("nothing is known of how it was made")
    for path, module in merged.named_modules():
        _check_hooks(path, module)
    for difference in _of_modules(made, merged):
        raise ZipError(difference)
    recipe = recipe_of(merged, models, partial)
    for difference in _of_graphs(made, recipe):
        raise ZipError(difference)
    return recipe


def _check_hooks(path: str, module: nn.Module) -> None:
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and ("forward" in name or "backward" in name):
            for hook in hooks.values():
                what = name.strip("_").removesuffix("s").replace("_", " ")
                says = f"{name_of_callable(hook)}: remove it first"
                if isinstance(hook, BasePruningMethod):
                    key = hook._tensor_name
                    says = (
                        f"which prunes {key!r}: make that permanent first, with "
                        f"torch.nn.utils.prune.remove(module, {key!r})"
                    )
                raise ZipError(f"{_called(path)} has a {what}, {says}")


def _called(path: str) -> str:
    return f"module {path!r}" if path else "it"


def _of_modules(made: Made, merged: nn.Module) -> Iterator[str]:
    now = _units(merged)
    partial = any(isinstance(key, int) for key in made.steps)

    def is_cut(path: str) -> bool:
        """Whether this belonged to a head that is no longer part of the merge."""
        home = path.split(".")[:2]
        return partial and home[0] == HEADS and ".".join(home) not in now

    was = {path: unit for path, unit in made.units.items() if not is_cut(path)}
    for path, unit in now.items():
        if path not in was:
            yield f"module {path!r} ({unit.kind}) was put into it"
        else:
            yield from _of_unit(path, was[path], unit)
    yield from (f"module {path!r} was taken out of it" for path in was if path not in now)
    yield from _of_ties({n: t for n, t in made.tied.items() if not is_cut(n)}, _ties(merged))


def _of_graphs(made: Made, recipe: Recipe) -> Iterator[str]:
    was = {k: s for k, s in made.steps.items() if s.part is None or s.part in recipe.heads}
    now: dict[str | int | None, GraphStep] = {step.name: step for step in recipe.steps}
    now |= {step.part: step for step in recipe.results}
    for key, step in now.items():
        if key not in was:
            yield f"node {step.name!r} ({step.does.op} {step.does.target}) was put into its graph"
        elif (what := _of_step(was[key], step)) is not None:
            yield f"at node {step.name!r} ({step.does.op} {step.does.target}): {what}"
    yield from (f"node {s.name!r} was taken out of it" for key, s in was.items() if key not in now)


def _of_step(was: GraphStep, now: GraphStep) -> str | None:
    if (was.part, was.source, was.reads, was.dims) != (now.part, now.source, now.reads, now.dims):
        return f"it read {was.reads} and reads {now.reads}"
    return was.does.difference(now.does)


def _of_unit(path: str, was: Unit, now: Unit) -> Iterator[str]:
    if was.kind != now.kind:
        yield f"module {path!r} was a {was.kind} and is a {now.kind}{_advice(now.kind)}"
    if was.extra != now.extra:
        yield f"the extra state (get_extra_state) of {_called(path)} was changed"
    for name in {**was.patched, **now.patched}:
        if was.patched.get(name) != now.patched.get(name):
            by = now.patched.get(name, "that of its class")
            yield f"{name!r} of {_called(path)} was replaced, by {by}"
    for name in {**was.tensors, **now.tensors}:
        before, after = was.tensors.get(name), now.tensors.get(name)
        full = f"{path}.{name}".lstrip(".")
        if before is None:
            yield f"a tensor {full!r} was put into it"
        elif after is None:
            yield f"the tensor {full!r} was taken out of it"
        elif before != after:
            yield f"{full!r} was {before} and is {after}"


def _advice(kind: str) -> str:
    if kind.startswith("torch.nn.utils.parametrize."):
        return " (torch.nn.utils.parametrize.remove_parametrizations makes it plain)"
    return " (adapters such as LoRA can be merged into the layers that they wrap)"


def _of_ties(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            if name in now:
                yield f"{name!r} was tied to {now[name]!r}"
            else:
                yield f"{name!r} is no longer tied to {was[name]!r}"
