"""Exported: the front that goes through torch.export, for forwards that no symbol can follow.

torch.export runs forward on example inputs and keeps the aten calls (`written` makes the contract's
graph of them). Sizes that the model leaves free stay free; what it took for granted of the others
is checked whenever the graph is called (`calls.sizes`).
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from zipfx.errors import ZipError, first_line
from zipfx.model.calls.expect import (
    Expectation,
    expect_absent,
    expect_equal,
    expect_form,
    expect_off,
    form,
)
from zipfx.model.calls.sizes import expect_sizes, understood
from zipfx.model.copies import views
from zipfx.model.graph_module import HIDDEN, GraphModule, hidden_names
from zipfx.model.running import untouched
from zipfx.model.tensors import batch_size, clone_tensors, leaves, map_tensors
from zipfx.modes import as_caller
from zipfx.trace.fronts.front import Given, twin_of, with_record
from zipfx.trace.fronts.raised import raise_calls
from zipfx.trace.fronts.written import rewritten
from zipfx.trace.record import Record
from zipfx.values import ByValue

_LOGGERS = ("torch", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")
#: arguments that let forward keep something for its next call, if they are not given
_KEEPS = ("use_cache",)


@dataclass(frozen=True, eq=False)
class Export(ByValue):
    """Settings of front="export".

    Args:
        dynamic_shapes: which sizes may change, as `torch.export.export` takes them; None: all that
            the model leaves free, but at least that of batches.

    >>> from zipfx.trace import trace
    >>> traced = trace(nn.Linear(3, 4), inputs=(torch.zeros(2, 3),), front=Export())
    >>> [node.name for node in traced.graph.nodes]
    ['input_1', 'weight', 'bias', 'linear', 'output']
    """

    dynamic_shapes: Any = None

    def __call__(self, model: nn.Module, given: Given) -> fx.GraphModule:
        """See `Front`."""
        twin = twin_of(model, given)
        for name in hidden_names(twin):
            raise ZipError(f"the model has {name!r}, {HIDDEN}")
        given = switched_off(given)
        program, conditions = self._program(twin, given)
        graph = rewritten(_module(program), type(model).__name__, given.arguments)
        own = frozenset(name for name, _ in twin.named_buffers(remove_duplicate=False))
        _plant_constants(twin, graph, program, own)
        module = GraphModule(twin, graph, type(model).__name__)
        raise_calls(module, given.values or ())
        constants = frozenset(dict(module.named_buffers())) - own
        expects = (*_settings(given), *_sizes(given, conditions))
        return with_record(module, twin, Record(constants, expects=expects, front="export"))

    def _program(self, twin: nn.Module, given: Given) -> tuple[ExportedProgram, list[str]]:
        """What torch.export writes, and its conditions on sizes."""
        failure: Exception | None = None
        named = inputs_by_name(given)
        for shapes in self._shapes(given):
            try:
                program = _exported(twin, given, shapes)
            except Exception as error:  # of forward, or of torch.export
                failure = failure or error
                continue
            conditions = _conditions(program, given)
            if understood(conditions, named):
                return program, conditions
        raise ZipError(
            f"torch.export can not trace {type(twin).__name__}: "
            + (first_line(failure) if failure else "its conditions on sizes are not understood")
        ) from failure

    def _shapes(self, given: Given) -> list[Callable[[Tensor], Any] | Any]:
        """Which sizes are left free, in the order in which it is tried."""
        if self.dynamic_shapes is not None:
            return [self.dynamic_shapes]
        count = batch_size(given.values)

        def batches(t: Tensor) -> Any:
            return {0: Dim.AUTO} if t.ndim and len(t) == count else None

        return [lambda t: dict.fromkeys(range(t.ndim), Dim.AUTO), batches, lambda t: None]


def switched_off(given: Given) -> Given:
    """The same without caches: a graph keeps nothing between calls."""
    assert given.values is not None
    values = [
        False if a.name in _KEEPS and value is None else value
        for a, value in zip(given.arguments, given.values, strict=True)
    ]
    return replace(given, values=values)


def inputs_by_name(given: Given) -> dict[str, Any]:
    """What forward is given."""
    return {a.name: v for a, v in zip(given.arguments, given.values or (), strict=True)}


def _exported(twin: nn.Module, given: Given, shapes: Any) -> ExportedProgram:
    pairs = list(zip(given.arguments, clone_tensors(_at_least_two(given.values)), strict=True))
    args = tuple(value for a, value in pairs if not a.by_name)
    kwargs = {a.name: value for a, value in pairs if a.by_name}
    root = copy.deepcopy(twin, views(twin))
    if callable(shapes):
        collected = ShapesCollection()
        for t in leaves((args, kwargs)):
            if isinstance(t, Tensor):
                collected[t] = shapes(t)
        shapes = collected
    weights = [*root.parameters(), *root.buffers()]
    with _quietly(), untouched(weights), torch.no_grad(), as_caller():
        return torch.export.export(root, args, kwargs, dynamic_shapes=shapes, strict=False)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch.export warns of, logs and prints, where it fails with an error as well."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        aside = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(aside), redirect_stderr(aside):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _module(program: ExportedProgram) -> fx.GraphModule:
    found: Any = program.module()
    assert isinstance(found, fx.GraphModule)
    return found


def _at_least_two(values: Sequence[Any] | None) -> tuple[Any, ...]:
    """Two samples in place of one: torch.export takes a size of 1 for one that never changes."""
    given = tuple(values or ())
    if batch_size(given) != 1:
        return given
    return tuple(map_tensors(lambda t: torch.cat([t, t]) if t.ndim else t, given))


def _conditions(program: ExportedProgram, given: Given) -> list[str]:
    """What the program takes for granted of the sizes of its inputs."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    users = [n for n in nodes if n.name in program.graph_signature.user_inputs]
    found = dict.fromkeys(_plain(text, given) for text in getattr(program, "_guards_code", ()))
    for a, value in zip(given.arguments, given.values or (), strict=True):
        node = next((n for n in users if n.name == a.name), None)
        if isinstance(value, Tensor) and node is not None:
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, int):
                    found[f"L[{a.name!r}].size()[{dim}] == {size}"] = None
    return list(found)


def _plain(text: str, given: Given) -> str:
    """A condition with all arguments by their names, also those that forward has no names for."""
    names = "|".join(re.escape(a.name) for a in given.arguments)
    return re.sub(rf"L\['\w+'\]\['({names})'\]", r"L['\1']", text) if names else text


def _sizes(given: Given, conditions: Sequence[str]) -> list[Expectation]:
    named = inputs_by_name(given)
    about = [name for name in named if any(f"L[{name!r}]" in text for text in conditions)]
    if not about:
        return []
    shapes = "; ".join(f"{name}: {_shape(named[name])}" for name in about)
    return [Expectation(", ".join(about), expect_sizes, (shapes, *conditions))]


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return [tuple(t.shape) for t in leaves(value) if isinstance(t, Tensor)]


def _settings(given: Given) -> list[Expectation]:
    """Whatever is no tensor is as it was when forward was traced."""
    found = []
    for name, value in inputs_by_name(given).items():
        if value is None:
            found.append(Expectation(name, expect_absent))
        elif value is False and name in _KEEPS:
            found.append(Expectation(name, expect_off))
        elif isinstance(value, (bool, int, float, str)):
            found.append(Expectation(name, expect_equal, (value,)))
        else:
            found.append(Expectation(name, expect_form, (form(value, exact=True),)))
    return found


def _plant_constants(
    twin: nn.Module, graph: fx.Graph, program: ExportedProgram, own: Collection[str]
) -> None:
    """Give the model what forward wrote down, under names of one part; own: its buffers."""
    constants: Mapping[str, Any] = program.constants
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "get_attr" or name not in constants or name in own:
            continue
        node.target = "_constant_" + re.sub(r"\W", "_", name)
        vars(twin).setdefault(node.target, constants[name].detach().clone())


def unwrapped(models: Any) -> Any:
    """Models with the module of every exported program in its place.

    >>> program = torch.export.export(nn.Linear(2, 3), (torch.zeros(4, 2),))
    >>> isinstance(unwrapped([program])[0], nn.Module)
    True
    """
    if not isinstance(models, Sequence):
        return models
    return [m.module() if isinstance(m, ExportedProgram) else m for m in models]
