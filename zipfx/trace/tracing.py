"""Tracing: a model becomes a `torch.fx.GraphModule` that keeps its module names.

The model itself is never touched: fronts work on a structural copy that shares its parameters and
owns its buffers, in eval mode, without the caller's hooks. What comes out is compared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.model.callables import name_of_callable
from zipfx.model.calls.arguments import Argument, call, in_order, spelled
from zipfx.model.calls.expect import Expectation, expect_given
from zipfx.model.calls.sizes import expect_sizes
from zipfx.model.copies import alias, structural_copy, views
from zipfx.model.graph_module import GraphModule, plain
from zipfx.model.running import untouched
from zipfx.model.tensors import alike, batch_size, clone_tensors, close, first_samples, leaves
from zipfx.modes import as_caller
from zipfx.trace.fronts.exported import Export, switched_off
from zipfx.trace.fronts.front import Front, Given, twin_of, with_record
from zipfx.trace.fronts.recorded import recorded, tracers
from zipfx.trace.fronts.symbolic import Tracer
from zipfx.trace.fronts.written import is_written, rewritten
from zipfx.trace.record import KEY, record_of

FrontName = Literal["auto", "symbolic", "export"]
FRONTS: tuple[FrontName, ...] = get_args(FrontName)


def front_of(front: Any) -> FrontName | Front:
    """A front, as a caller may name it.

    Raises:
        ZipError: there is none of this name.
    """
    if callable(front) or front in FRONTS:
        return front  # type: ignore[no-any-return]
    raise ZipError(
        f"front={front!r} is unknown; choose one of {list(FRONTS)}, zipfx.Export(...), or a "
        "function from a model and what it is given to a graph (zipfx.trace.Front)"
    )


def trace(
    model: nn.Module,
    tracer: fx.Tracer | None = None,
    device: torch.device | None = None,
    inputs: Sequence[Any] | None = None,
    by_name: Sequence[str] = (),
    *,
    folded: bool = False,
    front: FrontName | Front = "auto",
) -> fx.GraphModule:
    """Trace a model, in eval mode, without changing it.

    With `inputs` the graph is compared with the model, since a symbol is never None nor a tensor to
    `isinstance`. Where symbolic tracing fails or goes astray, Python's questions (how long is this
    list, is this size odd) are answered as for these inputs; the graph stays symbolic, and
    the notes of its `Record` say where forward went by a shape. Where that goes astray too,
    `x += y` is taken for the write that it is, not for `x = x + y`. Where no symbol can follow
    forward at all, torch.export runs it (`fronts.exported`).

    Args:
        model: any module that `torch.fx` can trace; a GraphModule keeps its graph as it is.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
        device: where the traced module is to live; default: where the model is.
        inputs: forward's arguments, on that device; by_name: the names of the last of them, which
            can only be given by name (`calls.in_order`).
        folded: whether weights that modules compute are plain ones (`parametrized.fold`).
        front: "symbolic": by torch.fx only; "export": by torch.export; "auto": the second where the
            first fails; or a `Front`.

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
    if tracer is not None and front not in ("auto", "symbolic"):
        raise ZipError(f"tracer= is for torch.fx, and front={front!r} is not: give one of them")
    with _own_randomness(model):
        if tracer is None and isinstance(model, fx.GraphModule):
            return _as_traced(model, device, folded)
        given = Given(None, (), device, folded)
        if inputs is not None:
            given = replace(given_of(model, inputs, by_name), device=device, folded=folded)
        if tracer is not None or inputs is None:
            return recorded(model, tracer or Tracer(), replace(given, arguments=()))
        return _first(_attempts(model, given, front), model)


def _attempts(
    model: nn.Module, given: Given, front: FrontName | Front
) -> Iterator[tuple[str, Given, Callable[[], fx.GraphModule]]]:
    """Ways to trace a model, as the front asks for them: how, with what, and what gives a graph."""
    if callable(front) and not isinstance(front, Export):
        yield name_of_callable(front), given, lambda: front(model, given)
        return
    if front in ("auto", "symbolic"):
        for make in tracers(model, given):
            yield "symbolic", given, lambda: recorded(model, make(), given)  # noqa: B023
    if front != "symbolic":
        export = front if isinstance(front, Export) else Export()
        yield "export", switched_off(given), lambda: export(model, given)


def _first(
    attempts: Iterator[tuple[str, Given, Callable[[], fx.GraphModule]]],
    model: nn.Module,
) -> fx.GraphModule:
    """The first graph that computes what the model computes.

    Raises:
        ZipError: none does.
    """
    failures: dict[str, ZipError] = {}
    for kind, own, make in attempts:
        try:
            module = _checked(make(), model, own)
        except ZipError as error:
            failures[kind] = error
            continue
        except Exception as error:  # of a front of the caller's, or of what torch makes of names
            failures[kind] = ZipError(
                f"front={kind!r} fails on {type(model).__name__}: {first_line(error)}"
            )
            failures[kind].__cause__ = error
            continue
        module.meta[KEY] = replace(record_of(module), front=kind)
        if kind == "export":
            _tell_of_export(module, model, own, failures.get("symbolic"))
        return module
    first, *others = failures.values()
    raise first if not others else ZipError(f'{first}. Nor does front="export": {others[-1]}')


def _tell_of_export(
    module: fx.GraphModule, model: nn.Module, given: Given, failure: ZipError | None
) -> None:
    """Note why a model was exported, and whether the graph is the model's for a single sample, too:
    torch.export takes a size of 1 for one that never changes."""
    record, notes, expects = record_of(module), [], []
    if failure is not None:
        why = str(failure).partition(". ")[0]
        notes = [f"traced by torch.export, since {why[:1].lower()}{why[1:]}"]
    count = batch_size(given.values)
    alone = first_samples(tuple(given.values or ()), 1)
    if count is not None and count > 1 and not _alike(model, module, alone, given.arguments):
        several = [a.name for a, v in zip(given.arguments, given.values or (), strict=True)
                   if isinstance(v, torch.Tensor) and v.ndim and len(v) == count]  # fmt: skip
        conditions = [f"L[{name!r}].size()[0] >= 2" for name in several]
        text = f"{count} samples"
        expects = [Expectation(", ".join(several), expect_sizes, (text, *conditions))]
    module.meta[KEY] = replace(
        record, notes=(*record.notes, *notes), expects=(*record.expects, *expects)
    )


def given_of(model: nn.Module, inputs: Sequence[Any], by_name: Sequence[str] = ()) -> Given:
    """One value for each argument of forward, defaults included, and these arguments.

    Raises:
        ZipError: they are none that forward takes.
    """
    count = len(inputs) - len(by_name)
    try:
        named = dict(zip(by_name, inputs[count:], strict=True))
        values, names = in_order(model.forward, inputs[:count], named)
        return Given(values, spelled(model.forward, values, names))
    except TypeError as error:
        raise ZipError(f"example_inputs do not fit the model's forward: {error}") from error


def _own_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Whatever is drawn inside, the caller's generators are left as they were."""
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.is_cuda})
    return torch.random.fork_rng(devices=devices)


def _checked(module: fx.GraphModule, model: nn.Module, given: Given) -> fx.GraphModule:
    """The module, if it computes what the model computes (or the model itself does not run)."""
    inputs, arguments = given.values or (), given.arguments
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
    return _alike(model, module, fewer, arguments)


def _alike(
    model: nn.Module,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
) -> bool:
    """Whether a model and its graph both take these inputs, and give the same for them."""
    found = []
    for own in (model, module):
        try:
            with torch.no_grad(), _own_randomness(module):
                found.append(_run_twice(own, inputs, arguments))
        except Exception:  # one of the two does not take them
            return False
    return alike(*found)


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


def _as_traced(model: fx.GraphModule, device: torch.device | None, folded: bool) -> fx.GraphModule:
    """A graph that was traced before, with its order and names."""
    twin = twin_of(model, Given(None, (), device, folded))
    assert isinstance(twin, fx.GraphModule)
    for node in twin.graph.nodes:
        if node.op == "call_module" and len(node.meta.get("nn_module_stack", ())) < 2:  # was lost
            parts = plain(str(node.target)).split(".")
            paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
            stack = {path: (path, type(twin.get_submodule(path))) for path in paths}
            node.meta["nn_module_stack"] = stack
    name, graph = type(model).__name__, twin.graph
    graph = rewritten(twin, name) if is_written(graph) else graph
    module = GraphModule(twin, graph, name)
    return with_record(module, twin, replace(record_of(model), sets=(), front="given"))
