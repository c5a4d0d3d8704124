"""Joint graph: run the K trunks side by side and accumulate one covariance per space.

The joint graph is interleaved node by node: a place is observed as soon as all K models have
computed it, so that an activation dies as early as in its own model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import getitem

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from zipfx.analysis import Probe, Space
from zipfx.errors import ZipError, first_line
from zipfx.model.copies import alias
from zipfx.model.graph_module import NAMED, GraphModule
from zipfx.model.running import State
from zipfx.model.tensors import clone_tensors, first_samples
from zipfx.modes import as_caller
from zipfx.observe.choose_places import Choose, reads_and_source
from zipfx.observe.data import Arguments, Calibration
from zipfx.observe.observer import Observer, Seen
from zipfx.observe.padding import by_position
from zipfx.trace.nodes import describe


def joint_graph(
    modules: Sequence[fx.GraphModule],
    observers: Mapping[str, Sequence[tuple[str, Observer]]],
    clone_inputs: bool,
) -> fx.GraphModule:
    """One GraphModule that runs K corresponding models up to the last observed node.

    observers: node name in model 0 -> (attribute name, observer) read once it has run.
    clone_inputs: the models write into their inputs, so each gets its own copy.
    """
    root = nn.Module()
    own = [alias(m).eval() for m in modules]  # what forwards keep in attributes stays there
    root.models = nn.ModuleList(own)
    root.observers = nn.ModuleDict({n: o for group in observers.values() for n, o in group})
    root.probes = nn.ModuleDict()
    graph = fx.Graph()
    seen: list[dict[fx.Node, fx.Node]] = [{} for _ in modules]
    joint: dict[str, tuple[fx.Node, ...]] = {}
    nodes = [list(m.graph.nodes) for m in modules]
    needed = [
        i for i, node in enumerate(nodes[0]) if node.name in observers or node.op == "placeholder"
    ]
    for i in range(max(needed, default=-1) + 1):
        node = nodes[0][i]
        if node.op == "placeholder":
            shared = graph.node_copy(node)
            for k, mine in enumerate(seen):
                given = graph.call_function(clone_tensors, (shared,)) if clone_inputs else shared
                mine[nodes[k][i]] = given
            continue
        copies, heard = [], []
        addresses = {o.inner for _, o in observers.get(node.name, ()) if o.inner is not None}
        for k, mine in enumerate(seen):
            node_k = nodes[k][i]
            copy = graph.node_copy(node_k, mine.__getitem__)
            if node.op in NAMED:
                copy.target = f"models.{k}.{node_k.target}"
            if addresses:
                where = f"model {k}: {describe(node_k)}"
                root.probes[f"{i}_{k}"] = Probe(own[k], node_k.op, node_k.target, addresses, where)
                copy.op, copy.target = "call_module", f"probes.{i}_{k}"
                heard.append(graph.call_function(getitem, (copy, 1)))
                copy = graph.call_function(getitem, (copy, 0))
            mine[node_k] = copy
            copies.append(copy)
        joint[node.name] = tuple(copies)
        for name, observer in observers.get(node.name, ()):
            read = joint[observer.node] if observer.inner is None else tuple(heard)
            graph.call_module(f"observers.{name}", read)
    graph.output(())
    module = GraphModule(root, graph, "Joint")
    graph.lint()
    return module


def observe(
    modules: Sequence[fx.GraphModule],
    spaces: Iterable[Space],
    data: Calibration,
    *,
    states: Sequence[State] = (),
    clone_inputs: bool = False,
    choose: Choose = reads_and_source,
    progress: bool = False,
) -> Seen:
    """The statistics of every space at the places to which a sample came (a space in which nothing
    ever varies has none).

    Args:
        modules: K traced models that correspond.
        spaces: of the first of them.
        states: what their forwards write to: each batch begins with that as it is now, and so do
            they afterwards.
        choose: the places at which a space is observed; several are averaged (`combine`).

    Raises:
        ZipError: no data; NaN or Inf in activations (with the space and the model).
    """
    observers: dict[str, list[tuple[str, Observer]]] = {}
    of_space: dict[str, list[Observer]] = {}
    for i, space in enumerate(spaces):
        for j, place in enumerate(choose(space)):
            observer = Observer(place, len(modules))
            observers.setdefault(place.after or place.node, []).append((f"space{i}_{j}", observer))
            of_space.setdefault(space.name, []).append(observer)
    joint = joint_graph(modules, observers, clone_inputs)
    batches = 0
    with torch.no_grad():
        batched = tqdm(data.by_source(), desc="zipfx: observe", disable=not progress, leave=False)
        every = [o for group in of_space.values() for o in group]
        tried = False
        for _, (args, kwargs), mask in batched:
            if mask is not None and len(mask) > 1 and not tried:
                _find_order(joint, every, (args, kwargs), mask, states)
                tried = True
            for observer in every:
                observer.mask = mask
            _run(joint, args, kwargs)
            for state in states:
                state.reset()
            batches += 1
    if not batches:
        raise ZipError("the calibration data is empty: calib_loader gave no batch")
    reached: dict[str, list[Observer]] = {}
    for name, group in of_space.items():
        for observer in (o for o in group if o.moments.count):
            if (bad := observer.first_broken()) is not None:
                raise ZipError(
                    f"activations of space {name!r} are NaN or Inf in model {bad} on the "
                    "calibration data; check that model's weights and the input normalisation"
                )
            reached.setdefault(name, []).append(observer)
        if not any(bool(o.moments.variance().any()) for o in reached.get(name, ())):
            reached.pop(name, None)  # nothing varies there
    return Seen(reached, batches)


def _find_order(
    joint: fx.GraphModule,
    observers: Sequence[Observer],
    arguments: Arguments,
    mask: Tensor,
    states: Sequence[State],
) -> None:
    """Find out in which order places have the rows of a batch that were flattened: it is run, and
    some of its sequences alone."""
    rows, length = mask.shape
    some = (rows + 1) // 2
    sizes = rows * length, some * length
    for observer in observers:
        observer.tried = dict.fromkeys(sizes)
    try:
        for given in (arguments, first_samples(arguments, some)):
            with suppress(ZipError):  # it may take no other number of sequences
                _run(joint, *clone_tensors(given))
            for state in states:
                state.reset()
        for observer in observers:
            whole, part = (observer.tried or {}).values()
            if whole is not None:
                observer.turned = None if part is None else by_position(whole, part, rows, some)
    finally:
        for observer in observers:
            observer.tried = None


def _run(joint: fx.GraphModule, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    try:
        with as_caller():
            joint(*args, **kwargs)
    except ZipError:
        raise
    except Exception as error:
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        raise ZipError(
            f"the models fail on a calibration batch with inputs {shapes or list(kwargs)}: "
            f"{first_line(error)}"
        ) from error
