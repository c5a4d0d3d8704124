"""Recorded: the front that records what Python does, by the tracers of torch.fx.

It keeps modules whole, so that a merge has the layers of the model, and is tried first.
"""

from __future__ import annotations

import copy
import linecache
import traceback
from typing import Any

import torch
from torch import fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.model.copies import views
from zipfx.model.graph_module import HIDDEN, GraphModule, hidden_names
from zipfx.model.running import decomposed, untouched
from zipfx.model.tensors import clone_tensors
from zipfx.modes import as_caller
from zipfx.trace.fronts.by_example import ExampleTracer
from zipfx.trace.fronts.front import Given, twin_of, with_record
from zipfx.trace.fronts.symbolic import (
    OPENED,
    Tracer,
    is_marked,
    is_tracing_code,
    refusing_autocast,
)
from zipfx.trace.record import Record
from zipfx.trace.tidy import (
    drop_answered,
    expectations,
    give_defaults,
    sink_shapes,
    written_in_place,
)


def tracers(model: nn.Module, given: Given) -> list[Any]:
    """What makes the tracers that are tried with a model, in this order."""
    arguments, values = given.arguments, tuple(given.values or ())
    found: list[Any] = [
        lambda: Tracer(arguments),
        lambda: ExampleTracer(clone_tensors(values), arguments),
        lambda: ExampleTracer(clone_tensors(values), arguments, writes=True),
    ]
    known = all(x is not None for x in values)  # what is not given could be a mask
    if known and any(type(m) in OPENED for m in model.modules()):
        found.insert(0, lambda: ExampleTracer(clone_tensors(values), arguments, opened=True))
    if known and any(map(is_marked, model.modules())):
        both = {"opened": True, "marked": True, "writes": True}
        found.insert(0, lambda: ExampleTracer(clone_tensors(values), arguments, **both))
    return found


def recorded(model: nn.Module, tracer: fx.Tracer, given: Given) -> fx.GraphModule:
    """The graph that a tracer records; see `Front`."""
    twin = twin_of(model, given)
    own = frozenset(name for name, _ in twin.named_buffers(remove_duplicate=False))
    aware = tracer if isinstance(tracer, ExampleTracer) else None
    root = copy.deepcopy(twin, views(twin)) if aware else twin
    attributes = {path: _attributes(m) for path, m in root.named_modules()}
    try:
        with (
            untouched([*root.parameters(), *root.buffers()] if aware else []),  # forward runs
            decomposed(None),  # transformers ask whether one kernel may do it all
            as_caller(),
            refusing_autocast(lambda: aware is not None and aware.runs),
        ):
            graph = tracer.trace(root)
    except ZipError:
        raise
    except Exception as error:
        raise ZipError(_untraceable(root, error)) from error
    if aware and aware.marked and aware.notes:
        raise ZipError(
            "modules that timm keeps whole would hold for these inputs only, if they were traced: "
            f"{aware.notes[0]}"
        )
    give_defaults(graph)
    asked: set[fx.Node] = aware.questions.asked if aware else set()
    expects = [] if given.values is None else expectations(graph, given.values, asked)
    drop_answered(graph, asked)
    sink_shapes(graph)
    constants = {f"{n.target}" for n in graph.nodes if n.op == "get_attr"} & set(vars(root))
    twin.__dict__.update({name: vars(root)[name] for name in constants - set(vars(twin))})
    sets = _put_back(root, attributes, constants)
    module = GraphModule(twin, graph, type(model).__name__)
    lost = [name for name in sets if name not in written_in_place(graph)]
    notes = [
        *(aware.notes if aware else ()),
        *[f"forward sets {', '.join(lost)}, which the result does not"] * bool(lost),
        *(
            f"the backward of {name} is not part of the result, since its forward was traced: call "
            "it in a function marked with torch.fx.wrap to keep it"
            for name in getattr(tracer, "functions", ())
        ),
    ]
    written_down = frozenset(dict(module.named_buffers())) - own
    record = Record(written_down, tuple(notes), tuple(sets), tuple(expects))
    return with_record(module, twin, record)


def _put_back(
    root: nn.Module, attributes: dict[str, dict[str, dict[str, Any]]], constants: set[str]
) -> list[str]:
    """Give what forward has set while it was traced its value of before; the names of it."""
    found = []
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # which keeps methods that were looked up
            continue
        before = attributes.get(path, {})
        for kind, entries in _attributes(module).items():
            known: dict[str, Any] = before.get(kind, {})
            for name in {**known, **entries}:
                if known.get(name) is entries.get(name) and (name in known) == (name in entries):
                    continue
                if not path and name in constants and name not in known:
                    continue  # a tensor that forward wrote down
                found.append(f"{path}.{name}".lstrip("."))
                own = vars(module) if kind == "" else vars(module)[kind]
                own.pop(name, None)
                own.update({name: known[name]} if name in known else {})
    return found


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of a module, its parameters and its buffers, as they are now."""
    own = vars(module)
    return {"": dict(own), **{kind: dict(own[kind]) for kind in ("_parameters", "_buffers")}}


def _untraceable(root: nn.Module, error: Exception) -> str:
    for name in hidden_names(root):
        if name.rpartition(".")[2] in str(error):
            return f"the model has {name!r}, {HIDDEN}"
    names = {id(m): name for name, m in root.named_modules()}
    place, path = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, code = frame.f_code.co_filename, frame.f_code
        if is_tracing_code(file) or "/torch/" in file.replace("\\", "/"):
            continue
        place = f" at {file}:{line} ({linecache.getline(file, line).strip()})"
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        path = names.get(id(owner), path)
    inside = f" in module {path!r}" if path else ""
    return (
        f"torch.fx can not trace {type(root).__name__}{inside}{place}: {first_line(error)}. Move "
        "the line into a function marked with torch.fx.wrap, make the module that holds it a leaf "
        "with a tracer of your own (tracer=...), or zip a smaller module that does not hold it, "
        "such as the part before it"
    )
