"""Replay: run graphs over all batches at once, and stop wherever something is to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.calibrate import in_order
from zipfx.errors import ZipError, first_line
from zipfx.trace import alias, clone_tensors
from zipfx.untouched import untouched


class Line:
    """A graph that batches run along, and which values die after which node; own: the storages of
    its module's tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        tensors = (*module.parameters(), *module.buffers())
        self.own = {t.untyped_storage()._cdata for t in tensors}
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
    """One batch on its way: `values` are those of the nodes that somebody still waits for.

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
        left = [*inputs][::-1]
        self.inputs = (left.pop() for _ in range(len(left)))  # lets go of what it has given

    def advance(self, stop: fx.Node, *, inclusive: bool = True) -> None:
        """Compute everything up to a node that has not run yet."""
        line, engine = self.line, self.line.engine
        engine.env, engine.args_iter = self.values, self.inputs
        end = line.at[stop] + inclusive
        while self.next < end:
            node = line.nodes[self.next]
            try:
                self.values[node] = engine.run_node(node)
            except Exception as error:
                raise ZipError(
                    f"node {node.name!r} fails on a calibration batch: {first_line(error)}"
                ) from error
            for dead in line.last.get(node, ()):
                del self.values[dead]
            self.next += 1

    def value(self, name: str) -> Tensor:
        """What a node has computed."""
        found: Tensor = self.values[self.line.named[name]]
        return found


def positional(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """One value for every argument of forward, as a graph takes them.

    Raises:
        ZipError: they are not its arguments.
    """
    try:
        return in_order(forward, args, kwargs)
    except TypeError as error:
        raise ZipError(f"a calibration batch does not fit the model's forward: {error}") from error


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """In eval mode inside; modes are restored."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for m, mode in modes:
            m.training = mode


class Noting(fx.Interpreter):
    """Notes in `found` what there is to see at the nodes of a graph that runs in eval mode; nothing
    is written to."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(alias(module).eval(), graph=module.graph)
        self.found: dict[Any, Any] = {}

    def noted(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """What was found on these inputs, one for each placeholder."""
        own = (*self.module.parameters(), *self.module.buffers())
        with untouched(own), torch.no_grad():
            self.run(*clone_tensors(tuple(inputs)))
        return self.found


class _Shapes(Noting):
    """Notes the shapes of all tensors that nodes compute."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n] = value.shape
        return value


def shapes(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, torch.Size]:
    """Of all tensors that the nodes of a graph compute in eval mode; nothing is written to."""
    return _Shapes(module).noted(inputs)
