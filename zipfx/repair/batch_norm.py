"""Batch norm: the statistics of BatchNorms, measured again in the merge.

Averaging features shrinks their variance, so running statistics of the originals no longer fit
(Jordan et al., REPAIR, 2023); "bn" measures them again on the calibration data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zipfx.errors import ZipError
from zipfx.model.graph_module import attribute
from zipfx.model.running import State, evaluating
from zipfx.model.tensors import clone_tensors, is_batch_norm
from zipfx.modes import as_caller
from zipfx.observe import Calibration, Moments
from zipfx.repair.batches import Batch, Line, Room, gathered
from zipfx.text import weighed

_MEMORY = 2 * 2**30  # bytes of values that may wait; batches beyond run again from their inputs


@dataclass(frozen=True)
class _Norm:
    """A BatchNorm at one node: its statistics, and the module where it is none of the graph but
    lies inside the node."""

    mean: Tensor
    variance: Tensor
    inner: nn.Module | None = None


def repair_batch_norm(
    module: fx.GraphModule, data: Calibration, state: State | None = None, *, progress: bool = False
) -> tuple[int, list[str]]:
    """Re-estimate the statistics of every BatchNorm in a merged module, in place.

    One after the other, in the order of the graph: mean and unbiased variance of what a norm reads,
    over all samples, when all norms before it have their new statistics. So neither the size nor
    the order of batches makes a difference. One that is called several times gets those of all
    that it reads, where later calls read what earlier ones give with the statistics known by then.

    Args:
        state: what forward writes to: every batch begins with that.

    Returns:
        The number of batches used, 0 if there is no BatchNorm; and the names of the nodes whose
        norms were left as they are, since fewer than two values came to them.

    Raises:
        ZipError: no data, or not enough to measure a variance.
    """
    line, room = Line(module, state), Room(_MEMORY)
    norms = [(node, norm) for node in line.nodes for norm in _norms(module, node)]
    if not norms:
        return 0, []
    left: list[str] = []
    seen: dict[int, Moments] = {}
    calls = Counter(id(norm.mean) for _, norm in norms)
    with evaluating(module), torch.no_grad():
        batches = gathered(module.forward, data)
        costs = [1] * len(norms)
        for node, norm in weighed(norms, costs, "zipfx: repair", shown=progress):
            moments = seen.setdefault(id(norm.mean), Moments(first=0))
            for batch in batches:
                for x in _read(line, batch, node, norm):
                    moments.add(x.movedim(1, -1).reshape(-1, x.shape[1]))
                room.settle(batch)
            if moments.count < 2:
                left.append(node.name)
                continue
            norm.mean.copy_(moments.mean)
            norm.variance.copy_(moments.variance() * (moments.count / (moments.count - 1)))
            if calls[id(norm.mean)] > 1:  # what follows its first call must be computed anew
                for batch in batches:
                    batch.run = None
        line.state.reset()
    if len(left) == len(norms):
        raise ZipError(
            f"BatchNorm statistics can not be measured: node {left[0]!r} reads fewer than two "
            "values of each channel on all of the calibration data, and a variance takes 2; give "
            'more samples, or repair="none"'
        )
    return len(batches), left


def _norms(module: fx.GraphModule, node: fx.Node) -> Iterator[_Norm]:
    """The BatchNorms that a node calls: itself, those inside a module, a call of F.batch_norm."""
    if node.op == "call_module":
        leaf = module.get_submodule(str(node.target))
        norms: list[Any] = [m for m in leaf.modules() if is_batch_norm(m)]
        for inner in norms:
            yield _Norm(inner.running_mean, inner.running_var, None if inner is leaf else inner)
    elif node.target is F.batch_norm:
        given = {**dict(zip(("input", "running_mean", "running_var"), node.args)), **node.kwargs}
        found = [given.get(name) for name in ("running_mean", "running_var")]
        kept = [str(n.target) for n in found if isinstance(n, fx.Node) and n.op == "get_attr"]
        if len(kept) == 2:
            yield _Norm(attribute(module, kept[0]), attribute(module, kept[1]))


def _read(line: Line, batch: Batch, node: fx.Node, norm: _Norm) -> Iterable[Tensor]:
    """What a norm reads of a batch; where it lies inside its node, that is run for it."""
    run = batch.start(line, {})
    run.advance(node, inclusive=False)
    args, kwargs = run.arguments(node)
    if norm.inner is None:
        return [kwargs["input"] if "input" in kwargs else args[0]]
    read: list[Tensor] = []

    def note(_: nn.Module, given: Sequence[Any]) -> None:
        read.append(given[0].clone())

    hook = norm.inner.register_forward_pre_hook(note)
    try:
        with as_caller():
            line.engine.fetch_attr(str(node.target))(*clone_tensors(args), **clone_tensors(kwargs))
    finally:
        hook.remove()
    return read
