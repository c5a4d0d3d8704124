"""Retrace: a model as zip traced it, with nothing known of the inputs but what they were like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from zipfx.errors import ZipError
from zipfx.observe import example_arguments, example_batch
from zipfx.report.files.recipe import Recipe, misfit
from zipfx.report.files.stand_ins import Traced, drawn
from zipfx.report.files.stored import named
from zipfx.trace import (
    ExampleTracer,
    Front,
    FrontName,
    Tracer,
    given_of,
    trace,
    tracers,
    with_tensors,
)

_META = torch.device("meta")
Make = Callable[[], fx.Tracer | None]


@dataclass(frozen=True, eq=False)
class Way:
    """How models are traced again: as the file says, and with what the caller gives.

    device: where inputs are drawn that forward has to run on.
    """

    traced: Traced
    tracer: fx.Tracer | None
    example_inputs: Any
    device: torch.device
    front: FrontName | Front = "auto"

    def inputs(self, model: nn.Module) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Forward's arguments, and the names of the last of them (`arguments.in_order`)."""
        if self.example_inputs is not None:
            example = example_batch(self.example_inputs, self.device)
            return example_arguments(model.forward, *example)
        return _arguments(model, self.traced, self.device)


def retraced(model: nn.Module, k: int, recipe: Recipe, way: Way) -> fx.GraphModule:
    """Model k as zip traced it: in the first of the ways to trace that gives what was saved.

    Most models are traced without inputs. Others are asked for shapes only, for which the "meta"
    device will do. What needs values (a flag in a buffer), or torch.export, is run on inputs that
    are drawn.

    Raises:
        ZipError: none of them does.
    """
    search = _Search(model, k, recipe, way.device)
    if way.tracer is not None or isinstance(model, fx.GraphModule):
        found = search.first([lambda: way.tracer])
    elif way.traced.front != "symbolic":
        found = search.by_front(way)
    elif way.example_inputs is not None:
        found = search.first(_ways(model, *way.inputs(model)))
    else:
        found = search.with_stand_ins(way.traced)
    if found is not None:
        return found
    own = way.traced.tracer
    raise ZipError(
        f"model {k} is not of the architecture that was saved: "
        + [*search.misfits, *search.failures][0]
        + f". zip was given tracer={own}: give the same to load" * bool(own and way.tracer is None)
    )


class _Search:
    """For a way to trace model k that gives what a recipe says.

    misfits: of the graphs that were found; failures: why there was none.
    """

    def __init__(self, model: nn.Module, k: int, recipe: Recipe, device: torch.device) -> None:
        self.model, self.k, self.recipe, self.device = model, k, recipe, device
        self.misfits: list[str] = []
        self.failures: list[str] = []
        self.unfinished: list[int] = []
        # a shape that is not the one that was traced with may make a loop endless
        self.most = 1000 + 20 * sum(step.part in (None, k) for step in recipe.steps)

    def with_stand_ins(self, traced: Traced) -> fx.GraphModule | None:
        """With inputs that are like those that zip traced with."""
        try:
            shapes = _arguments(self.model, traced, _META)
        except ZipError:
            found = self.first([Tracer])  # which needs none
            if found is None:
                raise
            return found
        found = self.first(_ways(self.model, *shapes))
        if found is None and self.unfinished:
            makers = _ways(self.model, *_arguments(self.model, traced, self.device))
            found = self.first([makers[i] for i in self.unfinished])
        return found

    def by_front(self, way: Way) -> fx.GraphModule | None:
        """The graph that another front than torch.fx gives, if it fits."""
        front: FrontName | Front = "export" if way.front == "auto" else way.front
        model = off_meta(self.model)
        inputs, by_name = way.inputs(model)
        try:
            module = trace(model, inputs=inputs, by_name=by_name, folded=True, front=front)
        except ZipError as error:
            self.failures.append(str(error))
            return None
        found = misfit(self.recipe, self.k, module)
        if found is not None:
            self.misfits.append(found)
        return None if found else module

    def first(self, makers: Sequence[Make]) -> fx.GraphModule | None:
        """The first graph that fits; in unfinished those that values could help."""
        self.unfinished = []
        for i, make in enumerate(makers):
            tracer = None
            try:
                tracer = make()
                if isinstance(tracer, ExampleTracer):
                    tracer.most = self.most
                module = trace(self.model, tracer, folded=True)
            except ZipError as error:
                self.failures.append(str(error))
                if isinstance(tracer, ExampleTracer) and not tracer.overfull:
                    self.unfinished.append(i)
                continue
            found = misfit(self.recipe, self.k, module)
            if found is None:
                return _off_meta_graph(module, self.device)
            self.misfits.append(found)
        return None


def _ways(model: nn.Module, inputs: Sequence[Any], by_name: Sequence[str]) -> list[Make]:
    """The tracers that are tried with these inputs."""
    found: list[Make] = tracers(model, given_of(model, inputs, by_name))
    return found


def _arguments(
    model: nn.Module, traced: Traced, device: torch.device
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Stand-ins for forward's arguments, and the names of the last of them (`calls.in_order`)."""
    found = drawn(traced.inputs, device)
    if not isinstance(found, tuple):
        raise ZipError("example inputs are stored as a tuple, and these are none; save it again")
    names = traced.names
    if len(names) > len(found):
        raise ZipError(f"{len(names)} of {len(found)} example inputs have names; save it again")
    count = len(found) - len(names)
    named = dict(zip(names, found[count:], strict=True))
    return example_arguments(model.forward, found[:count], named)


def off_meta(model: nn.Module) -> nn.Module:
    """The model, or zeros in its place where it has shapes only."""
    if not any(t.is_meta for t in named(model).values()):
        return model
    return with_tensors(model, lambda t: torch.zeros_like(t, device="cpu"))


def _off_meta_graph(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A traced module whose nodes do not name the device that it was only traced on."""

    def moved(a: Any) -> Any:
        return device if a == _META else a

    for node in module.graph.nodes:
        arguments = node.args, node.kwargs
        if _META in tree_leaves(arguments):
            node.args, node.kwargs = fx.node.map_aggregate(arguments, moved)
    return module
