"""Batches: run graphs over all of them at once, and stop where something is to be looked at."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from zipfx.errors import ZipError, first_line
from zipfx.model.calls.arguments import in_order
from zipfx.model.memory import storage_key
from zipfx.model.running import State
from zipfx.model.tensors import batch_size, clone_tensors, leaves
from zipfx.modes import as_caller
from zipfx.observe import Calibration


class Line:
    """A graph that batches run along, and which values die after which node; own: the storages of
    its module's tensors; state: those that forward writes to."""

    def __init__(self, module: fx.GraphModule, state: State | None = None) -> None:
        tensors = (*module.parameters(), *module.buffers())
        self.state = state or State(())
        self.own = {storage_key(t) for t in tensors}
        self.engine = fx.Interpreter(module, garbage_collect_values=False)
        self.engine.extra_traceback = False
        self.nodes = list(module.graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.named = {node.name: node for node in self.nodes}
        self.last: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node.users:
                self.last.setdefault(max(node.users, key=self.at.__getitem__), []).append(node)


class Run:
    """One batch on its way: `values` are those of the nodes that somebody still waits for. It has
    the state of the module to itself, as if no other batch had ever run.

    >>> from torch import nn
    >>> module = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()))
    >>> line = Line(module)
    >>> run = Run(line, [Tensor([-1.0, 1.0])])
    >>> run.advance(line.nodes[1])
    >>> [(node.name, value.tolist()) for node, value in run.values.items()]
    [('_0', [0.0, 1.0])]
    """

    def __init__(self, line: Line, inputs: Any) -> None:
        self.line, self.next = line, 0
        self.values: dict[fx.Node, Any] = {}
        self.state = line.state.initial
        left = [*inputs][::-1]
        self.inputs = (left.pop() for _ in range(len(left)))  # lets go of what it has given

    def advance(self, stop: fx.Node, *, inclusive: bool = True) -> None:
        """Compute everything up to a node that has not run yet."""
        line, engine = self.line, self.line.engine
        engine.env, engine.args_iter = self.values, self.inputs
        end = line.at[stop] + inclusive
        line.state.reset(self.state)
        while self.next < end:
            node = line.nodes[self.next]
            try:
                with as_caller():
                    self.values[node] = engine.run_node(node)
            except Exception as error:
                raise ZipError(
                    f"node {node.name!r} fails on a calibration batch: {first_line(error)}"
                ) from error
            for dead in line.last.get(node, ()):
                del self.values[dead]
            self.next += 1
        self.state = line.state.values()  # values may be views of it: it stays until another runs

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node that comes next is given."""
        found: Any = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = found
        return args, kwargs

    def value(self, name: str) -> Tensor:
        """What a node has computed."""
        found: Tensor = self.values[self.line.named[name]]
        return found


class Batch:
    """A batch, and how far it has come in one graph, or in several beside it.

    source: number of its loader; images: (n,) int64, the number of each among all of its loader, by
    content: neither the order of batches nor how data is cut into them makes a difference; of: how
    many its loader has; mask: which positions are samples (None: all); line, lines: the graphs;
    run, runs: None until it starts.
    """

    def __init__(
        self, source: int, inputs: tuple[Any, ...], images: int, mask: Tensor | None = None
    ) -> None:
        self.source, self.inputs, self.mask = source, inputs, mask
        self.images, self.of = torch.arange(images), images
        self.run: Run | None = None
        self.runs: dict[int, Run] = {}

    def start(self, line: Line, lines: Mapping[int, Line]) -> Run:
        """The way through the graph, begun if it is not."""
        if self.run is None:
            self.run = Run(line, clone_tensors(self.inputs))
            self.runs = {k: Run(other, clone_tensors(self.inputs)) for k, other in lines.items()}
        return self.run

    def again(self) -> Batch:
        """The same batch, which has not begun."""
        new = Batch(self.source, self.inputs, len(self.images), self.mask)
        new.images, new.of = self.images, self.of
        return new

    def nbytes(self) -> int:
        """Of the values that wait; views count once, the tensors of the modules do not."""
        found: dict[int, int] = {}
        for run in (self.run, *self.runs.values()):
            if run is not None:
                storages = [
                    t.untyped_storage()
                    for t in tree_leaves(list(run.values.values()))
                    if isinstance(t, Tensor)
                ]
                found |= {s._cdata: s.nbytes() for s in storages if s._cdata not in run.line.own}
        return sum(found.values())


class Room:
    """What all batches may keep while others run, in bytes."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.held: dict[int, int] = {}

    def settle(self, batch: Batch) -> None:
        """A batch has been looked at: it keeps its values, or starts again when it is needed."""
        if self.memory == math.inf:
            return
        self.held.pop(id(batch), None)
        size = batch.nbytes()
        if sum(self.held.values()) + size > self.memory:
            batch.run, batch.runs = None, {}
        else:
            self.held[id(batch)] = size


def gathered(forward: Callable[..., Any], data: Calibration) -> list[Batch]:
    """All batches, on memory of their own, since a loader may fill the same again.

    Raises:
        ZipError: there is none, or one does not fit forward.
    """
    batches: list[Batch] = []
    known: dict[int, list[bytes]] = {}
    for source, (args, kwargs), mask in data.by_source():
        inputs = clone_tensors(positional(forward, args, kwargs))
        found = digests(inputs, batch_size((args, kwargs)), mask)
        batches.append(Batch(source, inputs, len(found), mask))
        known.setdefault(source, []).extend(found)
    if not batches:
        raise ZipError("the calibration data is empty: calib_loader gave no batch")
    for source, found in known.items():
        order = sorted(range(len(found)), key=found.__getitem__)
        number = torch.empty(len(found), dtype=torch.int64)
        number[torch.tensor(order)] = torch.arange(len(found))
        mine = [batch for batch in batches if batch.source == source]
        sizes = [len(batch.images) for batch in mine]
        for batch, images in zip(mine, number.split(sizes), strict=True):
            batch.images, batch.of = images, len(found)
    return batches


def digests(inputs: Any, samples: int | None, mask: Tensor | None = None) -> list[bytes]:
    """A digest of what each sample holds (of the batch, if its tensors have no first dimension in
    common), but for what only fills it up."""
    tensors = [t for t in leaves(inputs) if isinstance(t, Tensor)]
    n = samples or 1
    rows: list[list[bytes]] = [[] for _ in range(n)]
    for t in tensors:
        t = (t if t.layout == torch.strided else t.to_dense()).detach().cpu().resolve_conj()
        t = t.contiguous()
        own = samples is not None and t.ndim > 0 and len(t) == n
        parts = list(t) if own else [t] * n
        if own and mask is not None and t.shape[:2] == mask.shape:
            parts = [part[kept] for part, kept in zip(parts, mask.cpu(), strict=True)]
        for row, part in zip(rows, parts):
            row.append(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    return [hashlib.blake2b(b"|".join(row)).digest() for row in rows]


def positional(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """One value for every argument of forward, as a graph takes them.

    Raises:
        ZipError: they are not its arguments.
    """
    try:
        return in_order(forward, args, kwargs)[0]
    except TypeError as error:
        raise ZipError(f"a calibration batch does not fit the model's forward: {error}") from error
