"""Tracing: a model becomes a `torch.fx.GraphModule` that keeps its module names.

The model itself is never touched: tracing works on a structural copy that shares its parameters
and owns its buffers, in eval mode, without the caller's hooks.
"""

from __future__ import annotations

import copy
import linecache
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.model.calls import Argument, Expectation, call, expect_given, in_order, spelled
from zipfx.model.copies import alias, structural_copy, views
from zipfx.model.graph_module import HIDDEN, GraphModule, check_names, hidden_names, plain
from zipfx.model.parametrized import fold
from zipfx.model.running import decomposed, untouched
from zipfx.model.tensors import clone_tensors, close, leaves
from zipfx.modes import as_caller
from zipfx.trace.by_example import ExampleTracer
from zipfx.trace.record import KEY, Record, record_of
from zipfx.trace.symbolic import OPENED, Tracer, is_tracing_code, refusing_autocast
from zipfx.trace.tidy import (
    drop_answered,
    expectations,
    give_defaults,
    packed,
    sink_shapes,
    written_in_place,
)


def trace(
    model: nn.Module,
    tracer: fx.Tracer | None = None,
    device: torch.device | None = None,
    inputs: Sequence[Any] | None = None,
    by_name: Sequence[str] = (),
    *,
    folded: bool = False,
) -> fx.GraphModule:
    """Trace a model, in eval mode, without changing it.

    With `inputs` the graph is compared with the model, since a symbol is never None nor a tensor to
    `isinstance`. Where symbolic tracing fails or goes astray, Python's questions (how long is this
    list, is this size odd) are answered as for these inputs; the graph stays symbolic, and
    the notes of its `Record` say where forward went by a shape. Where that goes astray too,
    `x += y` is taken for the write that it is, not for `x = x + y`.

    Args:
        model: any module that `torch.fx` can trace; a GraphModule keeps its graph as it is.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
        device: where the traced module is to live; default: where the model is.
        inputs: forward's arguments, on that device; by_name: the names of the last of them, which
            can only be given by name (`calls.in_order`).
        folded: whether weights that modules compute are plain ones (`parametrized.fold`).

    Returns:
        A GraphModule with the model's parameters (shared), copies of its buffers, and the same
        qualified names. `node.meta["nn_module_stack"]` tells the modules a node came from.

    Raises:
        ZipError: the model can not be traced; the message names the line that could not.
            The graph computes something else than the model.

    >>> import torch
    >>> gm = trace(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
    >>> [node.op for node in gm.graph.nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    if tracer is not None and not isinstance(tracer, fx.Tracer):
        raise ZipError(f"tracer={tracer!r} is no instance of torch.fx.Tracer")
    with _own_randomness(model):
        if tracer is None and isinstance(model, fx.GraphModule):
            return _as_traced(model, device, folded)
        if tracer is not None or inputs is None:
            return _traced(model, tracer or Tracer(), device, inputs, folded)
        inputs, arguments = _arguments(model, inputs, by_name)
        *first, last = ways(model, inputs, by_name)
        for make in first:
            with suppress(ZipError):
                found = _traced(model, make(), device, inputs, folded)
                return _checked(found, model, inputs, arguments)
        found = _traced(model, last(), device, inputs, folded)
        return _checked(found, model, inputs, arguments)


def ways(
    model: nn.Module, inputs: Sequence[Any], by_name: Sequence[str] = ()
) -> list[Callable[[], fx.Tracer]]:
    """The ways to trace a model with inputs, in the order in which they are tried."""
    inputs, arguments = _arguments(model, inputs, by_name)
    found: list[Callable[[], fx.Tracer]] = [
        lambda: Tracer(arguments),
        lambda: ExampleTracer(clone_tensors(inputs), arguments),
        lambda: ExampleTracer(clone_tensors(inputs), arguments, writes=True),
    ]
    given = all(x is not None for x in inputs)  # what is not given could be a mask
    if given and any(type(m) in OPENED for m in model.modules()):
        found.insert(0, lambda: ExampleTracer(clone_tensors(inputs), arguments, opened=True))
    return found


def _arguments(
    model: nn.Module, inputs: Sequence[Any], by_name: Sequence[str]
) -> tuple[tuple[Any, ...], list[Argument]]:
    """One value for each argument of forward, defaults included, and these arguments."""
    count = len(inputs) - len(by_name)
    try:
        named = dict(zip(by_name, inputs[count:], strict=True))
        values, names = in_order(model.forward, inputs[:count], named)
        return values, spelled(model.forward, values, names)
    except TypeError as error:
        raise ZipError(f"example_inputs do not fit the model's forward: {error}") from error


def _own_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Whatever is drawn inside, the caller's generators are left as they were."""
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.is_cuda})
    return torch.random.fork_rng(devices=devices)


def _checked(
    module: fx.GraphModule,
    model: nn.Module,
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
) -> fx.GraphModule:
    """The module, if it computes what the model computes (or the model itself does not run)."""
    device = next((t.device for t in module.parameters()), None)
    away = any(t.device != device for t in model.parameters())
    twin = structural_copy(model, share_parameters=not away).to(device if away else None)
    found = []
    for own in (twin, module):
        try:
            with torch.no_grad(), _own_randomness(module):
                found.append([leaves(y) for y in _run_twice(own, inputs, arguments)])
        except Exception as error:
            if own is twin:
                return module
            raise _astray(model, first_line(error)) from error
    for again, (expected, ours) in enumerate(zip(*found, strict=True)):
        theirs, mine = ([t for t in ts if isinstance(t, torch.Tensor)] for ts in (expected, ours))
        if [(t.shape, t.dtype) for t in theirs] != [(t.shape, t.dtype) for t in mine]:
            raise _astray(model, "outputs have other shapes")
        if not all(map(close, theirs, mine)):
            if again:
                raise _stateful(model, module)
            raise _astray(model, "outputs have other values")
    record = record_of(module)
    expects = tuple(
        e
        for e in record.expects
        if e.check is not expect_given or not _does_without(e, twin, module, inputs, arguments)
    )
    module.meta[KEY] = replace(record, expects=expects)
    return module


def _does_without(
    expectation: Expectation,
    model: nn.Module,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
) -> bool:
    """Whether a graph gives what the model gives without an argument that it was traced with."""
    names = [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]
    fewer = [None if n == expectation.name else x for n, x in zip(names, inputs, strict=True)]
    try:
        with torch.no_grad(), _own_randomness(module):
            found = [leaves(_run_twice(own, fewer, arguments)) for own in (model, module)]
    except Exception:  # one of the two can not do without
        return False
    ours, theirs = ([t for t in ts if isinstance(t, torch.Tensor)] for ts in found)
    alike = [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    return alike and all(map(close, ours, theirs))


def _run_twice(
    module: nn.Module, inputs: Sequence[Any], arguments: Sequence[Argument]
) -> list[Any]:
    """What a module computes when it is run, and when it is run again; it may write to its
    parameters, and so does not find them changed."""
    forward: Any
    if isinstance(module, fx.GraphModule):
        forward = fx.Interpreter(alias(module), graph=module.graph).run
    else:
        forward = copy.deepcopy(module, views(module))
    results = []
    with untouched([*module.parameters(), *module.buffers()]), as_caller():
        for _ in range(2):
            values = clone_tensors(tuple(inputs))
            traced = isinstance(module, fx.GraphModule)
            results.append(
                clone_tensors(forward(*values) if traced else call(forward, values, arguments))
            )
    return results


def _astray(model: nn.Module, what: str) -> ZipError:
    return ZipError(
        f"the traced graph does not compute what {type(model).__name__} computes on the example "
        f"inputs ({what}): forward asks what a symbol can not answer (isinstance, try, random "
        "numbers of Python). Move that into a function marked with torch.fx.wrap, or make the "
        "module that holds it a leaf with a tracer of your own (tracer=...)"
    )


def _stateful(model: nn.Module, module: fx.GraphModule) -> ZipError:
    sets = record_of(module).sets
    where = f" (forward sets {', '.join(sets)})" * bool(sets)
    return ZipError(
        f"{type(model).__name__} computes something else when it is run again{where}, and the "
        "traced graph does not: what forward keeps for the next call must be in a buffer "
        "(register_buffer) that it writes to in place"
    )


def _traced(
    model: nn.Module,
    tracer: fx.Tracer,
    device: torch.device | None,
    inputs: Sequence[Any] | None = None,
    folded: bool = False,
) -> fx.GraphModule:
    twin = _twin(model, device, folded)
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
    give_defaults(graph)
    asked: set[fx.Node] = aware.questions.asked if aware else set()
    expects = [] if inputs is None else expectations(graph, inputs, asked)
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
    return _with_tree(module, twin, record)


def _twin(model: nn.Module, device: torch.device | None, folded: bool) -> nn.Module:
    twin = structural_copy(model, share_parameters=device is None).to(device)
    if folded:
        fold(twin)
    return twin


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


def _as_traced(model: fx.GraphModule, device: torch.device | None, folded: bool) -> fx.GraphModule:
    """A graph that was traced before, with its order and names."""
    twin = _twin(model, device, folded)
    assert isinstance(twin, fx.GraphModule)
    for node in twin.graph.nodes:
        if node.op == "call_module" and len(node.meta.get("nn_module_stack", ())) < 2:  # was lost
            parts = plain(str(node.target)).split(".")
            paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
            stack = {path: (path, type(twin.get_submodule(path))) for path in paths}
            node.meta["nn_module_stack"] = stack
    module = GraphModule(twin, packed(twin.graph, type(model).__name__), type(model).__name__)
    return _with_tree(module, twin, replace(record_of(model), sets=()))


def _with_tree(module: fx.GraphModule, twin: nn.Module, record: Record) -> fx.GraphModule:
    module.meta[KEY] = record
    # constants are part of the code, not of the state
    module._non_persistent_buffers_set = twin._non_persistent_buffers_set | record.constants
    module.eval()
    check_names(module, module.graph)
    module.graph.lint()
    return module


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
