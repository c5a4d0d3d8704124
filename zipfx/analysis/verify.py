"""Verify: permute every space, run the model, compare; pin what changes the function.

Part of every analysis: an escape that the labels can not see (a value computed through numpy, say)
shows here, and only here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call

from zipfx.analysis.spaces.reorder import Moves, axis_moves, moved, select
from zipfx.analysis.spaces.space_map import SpaceMap
from zipfx.analysis.spaces.values import Space
from zipfx.model.copies import alias
from zipfx.model.running import Wide
from zipfx.model.tensors import (
    clone_tensors,
    constant_names,
    inexact,
    leaves,
    map_tensors,
    named_tensors,
    widened,
)
from zipfx.modes import as_caller, as_library

aten = torch.ops.aten


class _Runner(fx.Interpreter):
    """Runs a graph in float64, with parameters that are permuted when they are used, and keeps the
    values of some nodes, as the last node of the trunk left them.

    A copy of the whole model would take more memory than all else together. What the graph writes
    to lives as long as the run.
    """

    def __init__(self, state: _Subject, moves: Mapping[str, Moves]) -> None:
        super().__init__(state.module, graph=state.graph)
        self.state, self.moves = state, moves
        self.written: dict[str, Tensor] = {}
        self.kept: dict[str, Any] = {}
        self.eps = torch.finfo(torch.float64).eps

    def own(self, t: Tensor) -> Tensor:
        """A parameter or buffer of the module as this run sees it."""
        name = self.state.names.get(id(t), "")  # else a constant in a module's attribute
        if not name or name in self.written:
            return self.written.get(name, t)
        with as_library():
            t = moved(self.state.uneven.get(name, t), self.moves.get(name, []))
            value = self.state.fresh(t)
        if name in self.state.written:
            self.written[name] = value
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaf = self.fetch_attr(str(target))
        tensors = {name: self.own(t) for name, t in named_tensors(leaf).items()}
        if not tensors:  # a compiled module, too
            return leaf(*args, **kwargs)
        return functional_call(leaf, tensors, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(str(target))
        return self.own(value) if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for t in leaves(value):
            if isinstance(t, Tensor) and inexact(t):
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        if n.name == self.state.last:
            seen = {m.name: v for m, v in (*self.env.items(), (n, value))}
            self.kept = clone_tensors({name: seen[name] for name in self.state.keep})
        return value


class _Subject:
    """The model under test, on its own memory; constant parameters (fresh norms, zero biases) are
    made uneven."""

    def __init__(
        self,
        module: fx.GraphModule,
        written: Collection[str],
        keep: Sequence[str],
        last: str,
        seed: int,
        wide: bool,
    ) -> None:
        self.module, self.graph = alias(module), module.graph
        self.written, self.keep, self.last, self.wide = written, keep, last, wide
        named = named_tensors(self.module)
        self.names = {id(t): name for name, t in named.items()}
        self.uneven: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        constants = constant_names(module)
        for name, t in named.items():
            learned = inexact(t) and name not in constants
            if learned and t.numel() > 1 and bool((t == t.flatten()[0]).all()):
                kind = torch.complex128 if t.is_complex() else torch.float64
                noise = torch.rand(t.shape, generator=generator, dtype=kind)
                noise = noise.to(t.device) + 0.5
                self.uneven[name] = noise if wide else noise.to(t.dtype)

    def run(
        self, inputs: Sequence[Any], moves: Mapping[str, Moves] | None = None
    ) -> tuple[dict[str, Any], float]:
        """The values of the kept nodes, and the precision of the coarsest value in between."""
        runner = _Runner(self, moves or {})
        with torch.no_grad(), as_caller(), Wide() if self.wide else nullcontext():
            runner.run(*map_tensors(self.fresh, tuple(inputs)))
        return runner.kept, runner.eps

    def fresh(self, t: Tensor) -> Tensor:
        """On memory of its own, in the dtype of the run."""
        wide = widened(t) if self.wide else t
        return t.clone() if wide is t else wide


def failing_spaces(
    module: fx.GraphModule,
    spaces: SpaceMap,
    inputs: Sequence[Any],
    written: Collection[str] = (),
    keep: Sequence[str] | None = None,
    last: str | None = None,
    seed: int = 0,
    *,
    wide: bool = True,
) -> set[str]:
    """Names of the spaces that can not be permuted without changing what `module` computes.

    written: the parameters and buffers that its graph writes to.
    keep: nodes whose values are compared once node `last` has run (default: the output); features
    at these nodes are expected in their new order, so that a trunk is checked without its heads.
    wide: whether it runs in float64; else in its own dtypes, and rounding is allowed for.
    """
    output = next(iter(reversed(module.graph.nodes))).name
    keep = keep or [output]
    state = _Subject(module, written, keep, last or output, seed, wide)
    before, eps = state.run(inputs)
    tolerance = 1e-12 if eps < 1e-10 else (16 if eps < 1e-5 else 2) * eps
    # cycles, so that no feature stays where it is
    drawn = spaces.random_permutations(seed)
    orders = {space.name: cycle(drawn[space.name], space.blocks) for space in spaces}

    bad: set[str] = set()
    noise: list[float] = []  # how much rounding alone changes the outputs, once it is asked for

    def near(expected: dict[str, Any], found: dict[str, Any], moves: dict[str, Moves]) -> bool:
        if all(_close(expected[name], found[name], tolerance) for name in keep):
            return True
        if not noise:
            shaken = map_tensors(lambda t: _shaken(state.fresh(t), eps), tuple(inputs))
            noise.append(_distance(found, state.run(shaken, moves)[0]))
        return all(_close(expected[name], found[name], 16 * noise[0]) for name in keep)

    def holds(names: Sequence[str]) -> bool:
        chosen = [spaces[name] for name in names]
        moves = axis_moves(chosen, orders)
        after, _ = state.run(inputs, moves)
        expected = {name: _reordered(before[name], name, chosen, orders) for name in keep}
        return near(expected, after, moves)

    def search(names: Sequence[str]) -> set[str]:
        if holds(names):
            return set()
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        found = search(names[:half]) | search(names[half:])
        return found or set(names)  # wrong only together: none of them is safe

    while left := [s.name for s in spaces if s.name not in bad]:
        worse = search(left)
        if not worse:
            break
        bad |= worse
    return bad


def _shaken(t: Tensor, eps: float) -> Tensor:
    """An input with every entry off by one rounding."""
    return t * (1 + eps) if inexact(t) else t


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of two outputs, relative to each tensor's largest entry."""
    worst = 0.0
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if isinstance(x, Tensor) and inexact(x) and x.numel():
            gap = (x - y).abs().nan_to_num(0, 0, 0).max()
            size = x.abs().nan_to_num(0, 0, 0).max()
            worst = max(worst, float(gap / size) if size > 0 else 0.0)
    return worst


def cycle(order: Tensor, blocks: Sequence[int] = ()) -> Tensor:
    """The permutation that sends every entry of `order` to the next one (of its block)."""
    result = torch.empty_like(order)
    for part in order.split(list(blocks) or len(order)):
        result[part] = part.roll(-1)
    return result


def _reordered(value: Any, node: str, spaces: Sequence[Space], orders: Mapping[str, Tensor]) -> Any:
    for space in spaces:
        for place in space.places:
            found = place.node == node and place.inner is None
            for dims, index in ((place.dims, place.index), *place.also) if found else ():
                source = torch.arange(math.prod(value.shape[d] for d in dims))
                source[index.flatten()] = index[orders[space.name]].flatten()
                value = select(value, list(dims), source.to(value.device))
    return value


def _close(a: Any, b: Any, tolerance: float) -> bool:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if not isinstance(x, Tensor):
            continue
        if x.shape != y.shape:
            return False
        if not inexact(x):
            if not torch.equal(x, y):
                return False
            continue
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return False
        u, v = x[finite], y[finite]
        if u.numel() and bool((u - v).abs().max() > tolerance * u.abs().max()):
            return False
    return True
