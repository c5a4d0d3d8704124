"""Models: K of them as graphs, which correspond node by node up to the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.model.running import State, state_of
from zipfx.model.tensors import named_tensors
from zipfx.text import weighed
from zipfx.trace.align.alignment import aligned
from zipfx.trace.align.correspond import check_constants, check_outputs, counterparts
from zipfx.trace.align.cut import first_name, last_node
from zipfx.trace.fronts.front import Front
from zipfx.trace.record import record_of
from zipfx.trace.tracing import FrontName, trace


@dataclass(frozen=True, eq=False)
class TracedModels:
    """K traced models, their weights folded where they are computed.

    modules: the graphs; as_traced: what they were before they became alike; states: what each
    forward writes to; inputs: one value for each placeholder; by_name: the names of the last of
    them; given: what messages call them; cut: the module behind which the heads begin, by the name
    that the graph has for it (None: there are no heads); last: index of the last node of the trunk;
    notes: of what was passed over to make them alike.
    """

    modules: Sequence[fx.GraphModule]
    as_traced: Sequence[fx.GraphModule]
    states: Sequence[State]
    inputs: tuple[Any, ...]
    by_name: tuple[str, ...]
    given: str
    cut: str | None
    last: int
    notes: tuple[str, ...] = ()

    def parameters(self) -> dict[str, list[Tensor]]:
        """The parameters of all trunks that correspond, by their names in model 0."""
        tensors = counterparts(self.modules, self.last)
        return {
            name: tensors[id(t)]
            for name, t in named_tensors(self.modules[0]).items()
            if id(t) in tensors and isinstance(t, nn.Parameter)
        }


def trace_all(
    models: Sequence[nn.Module],
    inputs: tuple[Any, ...],
    by_name: tuple[str, ...],
    given: str,
    *,
    partial: str | None = None,
    tracer: fx.Tracer | None = None,
    front: FrontName | Front = "auto",
    device: torch.device | None = None,
    home: torch.device | None = None,
    progress: bool = False,
) -> TracedModels:
    """Trace K models, see what they write to, and find the cut in the first of them.

    Args:
        front: see `trace`.
        device: where the graphs are to live; home: where the models do. Weights are shared with
            the models where both are the same, and no forward writes to them.

    Raises:
        ZipError: a model can not be traced, or fails on the inputs; `partial` is no cut.
    """

    def traced(where: torch.device | None, way: FrontName | Front) -> list[fx.GraphModule]:
        alike = weighed(models, [1] * len(models), "zipfx: trace", shown=progress)
        return [trace(m, tracer, where, inputs, by_name, folded=True, front=way) for m in alike]

    modules = traced(None if device == home else device, front)
    if {record_of(m).front for m in modules} == {"symbolic", "export"}:
        front = "export"  # what one of them needs, all can have
        modules = traced(None if device == home else device, front)
    states = [state_of(m, inputs, f"model {k} fails on {given}") for k, m in enumerate(modules)]
    if any(isinstance(t, nn.Parameter) for state in states for t in state.tensors):
        modules = traced(device, front)  # on memory of their own
        states = [state_of(m, inputs) for m in modules]
    cut = None if partial is None else first_name(modules[0], partial)
    last = last_node(modules[0], cut)
    return TracedModels(modules, modules, states, inputs, by_name, given, cut, last)


def correspond(models: TracedModels) -> TracedModels:
    """The models with nodes that correspond one by one, up to the cut.

    Raises:
        ZipError: they do not compute the same; constants or, without a cut, the shapes of outputs
            differ.
    """
    if models.cut is None:
        check_outputs(models.modules, models.inputs)
    alike = aligned(models.modules, models.last, models.inputs, models.cut)
    states = [
        state if new is old else state_of(new, models.inputs)
        for state, new, old in zip(models.states, alike.modules, models.modules, strict=True)
    ]
    check_constants(alike.modules, alike.last)
    return replace(
        models, modules=alike.modules, states=states, last=alike.last, notes=tuple(alike.notes)
    )
