"""Verify: permute every space, run the model, compare; pin what changes the function.

Part of every analysis: an escape that the labels can not see (a value computed through numpy, say)
shows here, and only here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zipfx.spaces import Space, SpaceMap, permute_axes, select
from zipfx.trace import clone_tensors, leaves, map_tensors, named_tensors


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of some nodes, as the last node of the trunk left them."""

    def __init__(self, module: fx.GraphModule, keep: Sequence[str], last: str) -> None:
        super().__init__(module)
        self.keep, self.last = set(keep), last
        self.kept: dict[str, Any] = {}
        self.lowest = torch.float64

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for t in leaves(value):
            if isinstance(t, Tensor) and t.is_floating_point() and t.itemsize < 8:
                self.lowest = min(self.lowest, t.dtype, key=lambda d: -torch.finfo(d).eps)
        if n.name == self.last:
            seen = {m.name: v for m, v in (*self.env.items(), (n, value)) if m.name in self.keep}
            self.kept = clone_tensors(seen)
        return value


def _scrambled(module: fx.GraphModule, seed: int) -> fx.GraphModule:
    """A float64 copy whose constant parameters (fresh norms, zero biases) are made uneven."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = torch.nn.Parameter(_fresh(p.detach()), requires_grad=False)
    memo |= {id(b): _fresh(b) for b in module.buffers()}
    twin = copy.deepcopy(module, memo)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in [*twin.parameters(), *twin.buffers()]:
            if t.is_floating_point() and t.numel() > 1 and bool((t == t.flatten()[0]).all()):
                noise = torch.rand(t.shape, generator=generator, dtype=torch.float64)
                t.copy_(noise.to(t.device) + 0.5)
    return twin


def _run(
    module: fx.GraphModule, inputs: Sequence[Any], keep: Sequence[str], last: str
) -> tuple[dict[str, Any], float]:
    recorder = _Recorder(module, keep, last)
    with torch.no_grad():
        recorder.run(*map_tensors(_fresh, tuple(inputs)))
    return recorder.kept, torch.finfo(recorder.lowest).eps


def _fresh(t: Tensor) -> Tensor:
    return t.to(torch.float64, copy=True) if t.is_floating_point() else t.clone()


def failing_spaces(
    module: fx.GraphModule,
    spaces: SpaceMap,
    inputs: Sequence[Any],
    keep: Sequence[str] | None = None,
    last: str | None = None,
    seed: int = 0,
) -> set[str]:
    """Names of the spaces that can not be permuted without changing what `module` computes.

    keep: nodes whose values are compared once node `last` has run (default: the output); features
    at these nodes are expected in their new order, so that a trunk is checked without its heads.
    """
    twin = _scrambled(module, seed)
    output = next(iter(reversed(module.graph.nodes))).name
    keep, last = keep or [output], last or output
    before, eps = _run(twin, inputs, keep, last)
    tolerance = 1e-12 if eps < 1e-10 else (16 if eps < 1e-5 else 2) * eps
    # cycles, so that no feature stays where it is
    drawn = spaces.random_permutations(seed)
    orders = {space.name: cycle(drawn[space.name], space.blocks) for space in spaces}
    tensors = named_tensors(twin)

    bad: set[str] = set()
    noise: list[float] = []  # how much rounding alone changes the outputs, once it is asked for

    def near(expected: dict[str, Any], found: dict[str, Any]) -> bool:
        if all(_close(expected[name], found[name], tolerance) for name in keep):
            return True
        if not noise:
            shaken = map_tensors(lambda t: _shaken(t, eps), tuple(inputs))
            noise.append(_distance(found, _run(twin, shaken, keep, last)[0]))
        return all(_close(expected[name], found[name], 16 * noise[0]) for name in keep)

    def holds(names: Sequence[str], final: bool = False) -> bool:
        chosen = [spaces[name] for name in names]
        permute_axes(tensors, chosen, orders)
        after, _ = _run(twin, inputs, keep, last)
        expected = {name: _reordered(before[name], name, chosen, orders) for name in keep}
        fine = near(expected, after)
        if not (fine and final):  # else nothing follows: leave them
            for space in reversed(chosen):
                permute_axes(tensors, [space], {space.name: torch.argsort(orders[space.name])})
        return fine

    def search(names: Sequence[str]) -> set[str]:
        if holds(names, final=len(names) + len(bad) == len(spaces)):
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
    return t.double() * (1 + eps) if t.is_floating_point() else t


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of two outputs, relative to each tensor's largest entry."""
    worst = 0.0
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
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
            if place.node == node and place.inner is None:
                source = torch.arange(math.prod(value.shape[d] for d in place.dims))
                source[place.index.flatten()] = place.index[orders[space.name]].flatten()
                value = select(value, place.dims, source.to(value.device))
    return value


def _close(a: Any, b: Any, tolerance: float) -> bool:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if not isinstance(x, Tensor):
            continue
        if x.shape != y.shape:
            return False
        if not x.is_floating_point():
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
