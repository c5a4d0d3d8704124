"""Observe: run the K trunks side by side and accumulate one covariance per space.

The joint graph is interleaved node by node: a place is observed as soon as all K models have
computed it, so that an activation dies as early as in its own model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from zipfx.analysis.interpret import describe
from zipfx.analysis.labels.inside import Tap
from zipfx.analysis.spaces.space_map import Place, Space
from zipfx.errors import ZipError, first_line
from zipfx.model.copies import alias
from zipfx.model.graph_module import NAMED, GraphModule
from zipfx.model.running import State
from zipfx.model.tensors import clone_tensors
from zipfx.modes import as_caller
from zipfx.observe.data import Calibration
from zipfx.observe.moments import Moments
from zipfx.observe.statistics import Similarity, Statistics
from zipfx.precision import inexact

Choose = Callable[[Space], Sequence[Place]]


class Observer(nn.Module):
    """Accumulates the moments of the features of K models at one place."""

    index: Tensor

    def __init__(self, place: Place, models: int) -> None:
        super().__init__()
        index = place.index
        self.node, self.inner = place.node, place.inner
        self.dims, self.blurred, self.mixed = place.dims, place.blurred, place.mixed
        self.read, self.sizes = place.read, place.sizes
        self.models, self.size = models, len(index)
        self.moments = Moments()
        self.resolution = torch.finfo(torch.float32).eps
        plain = bool((index.flatten() == torch.arange(index.numel())).all())
        self.register_buffer("index", index.flatten(), persistent=False)
        self.whole = index.numel() if plain else -1

    def _samples(self, x: Tensor) -> Tensor:
        """(..., n, ...) -> (S, n), samples being batch, positions and occurrences; of complex
        numbers the real and the imaginary parts."""
        if self.blurred:
            x = x.mean(self.blurred, keepdim=True)
        x = x.movedim(self.dims, tuple(range(-len(self.dims), 0)))
        index = self._index(tuple(x.shape[-len(self.dims) :]))
        x = x.flatten(-len(self.dims))
        if x.shape[-1] != self.whole or index is not self.index:
            x = x.index_select(-1, index.to(x.device))
        x = x.reshape(-1, self.size, len(index) // self.size)
        x = x.mean(2) if self.mixed else x.transpose(1, 2).reshape(-1, self.size)
        if x.is_complex():
            x = torch.cat([x.real, x.imag])
        return x if x.dtype in (torch.float32, torch.float64) else x.float()

    def _index(self, sizes: tuple[int, ...]) -> Tensor:
        """The index into a value of these sizes: where they are not those of the example inputs, it
        is what has the same coordinates, as far as all features have it."""
        if not self.sizes or sizes == self.sizes:
            return self.index
        at = torch.stack(torch.unravel_index(self.index, self.sizes))
        of = torch.tensor(sizes, device=at.device)[:, None]
        steps = of.flip(0).cumprod(0).flip(0) // of
        there = (at < of).all(0).reshape(self.size, -1).all(0)
        found: Tensor = (at * steps).sum(0).reshape(self.size, -1)[:, there].flatten()
        return found

    def forward(self, *features: Any) -> None:
        """Read the K models' activations at this place (of a place inside a node: what a `Tap`
        has heard in each model)."""
        several = [[f] if self.inner is None else f[self.inner] for f in features]
        if inexact(several[0][0]):
            self.resolution = torch.finfo(several[0][0].dtype).eps
        x = torch.cat([torch.cat([self._samples(t) for t in f]) for f in several], 1)
        self.moments.add(x)

    def statistics(self) -> Statistics:
        """Count, mean (N,) and covariance (N, N) of all samples so far."""
        seen, sizes = self.moments, (self.size,) * self.models
        return Statistics(
            seen.count, seen.mean, seen.covariance(), sizes, self.resolution, trusted=True
        )

    def first_broken(self) -> int | None:
        """The first model whose activations were NaN or Inf; None if all were finite."""
        finite = self.moments.finite()
        return None if bool(finite.all()) else int((~finite).nonzero()[0]) // self.size


def last_read(space: Space) -> Sequence[Place]:
    """The last place where a weight reads the space (its last place, if none does).

    Places where features of other spaces lie along other dimensions are a second choice: those
    must be averaged over, since they are not in the same order in all models.
    """
    sharp = _sharp(space)
    return ([p for p in sharp if p.read] or sharp)[-1:]


def _sharp(space: Space) -> Sequence[Place]:
    for wanted in (
        [p for p in space.places if p.own and not p.blurred and not p.mixed],
        [p for p in space.places if not p.blurred and not p.mixed],
        [p for p in space.places if not p.mixed],
    ):
        if wanted:
            return wanted
    return space.places


def all_reads(space: Space) -> Sequence[Place]:
    """Every place where a weight reads the space."""
    sharp = _sharp(space)
    return [p for p in sharp if p.read] or sharp[-1:]


def reads_and_source(space: Space) -> Sequence[Place]:
    """Every read, and the place where the values of the last read were made.

    That is before the activation, where a ReLU has not yet made features dead or all but dead:
    there the correlation of a feature with its copy is 1 and that of any other two is not. Where
    that is not known (other features lie there, too) it is the first place: later a softmax over
    the others, say, may have made their mean the same for all inputs.
    """
    reads, sharp = all_reads(space), _sharp(space)
    made = [p for p in sharp if p.source] or sharp[:1]
    sources = (p for p in made if not any(p is r for r in reads))
    return [*sources, *reads]


def everywhere(space: Space) -> Sequence[Place]:
    """Every place."""
    return _sharp(space)


PLACES: dict[str, Choose] = {
    "last": last_read,
    "reads": all_reads,
    "source": reads_and_source,
    "all": everywhere,
}


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
    root.taps = nn.ModuleDict()
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
                root.taps[f"{i}_{k}"] = Tap(own[k], node_k.op, node_k.target, addresses, where)
                copy.op, copy.target = "call_module", f"taps.{i}_{k}"
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
) -> tuple[dict[str, list[Observer]], int]:
    """The observers of every space, filled (those that a sample came to; a space in which nothing
    ever varies has no entry), and how many batches were read.

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
        for args, kwargs in tqdm(data, desc="zipfx: observe", disable=not progress, leave=False):
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
    return reached, batches


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


def combine(
    observers: Sequence[Observer], similarity: Similarity = "correlation", moment: bool = False
) -> Statistics:
    """Statistics of one space at several places as one: the mean of the similarities.

    A feature counts where it varies; it is constant only if it is constant everywhere.

    Args:
        similarity: what is averaged, as its place in the network scales it: correlations, cosines,
            or covariances relative to the mean variance.
        moment: keep the second moments where weights read the features, each place relative to its
            mean power.
    """
    statistics = [observer.statistics() for observer in observers]
    first, read = statistics[0], None
    if moment:
        reads = [s for s, o in zip(statistics, observers, strict=True) if o.read] or statistics[-1:]
        read = sum((_scaled(s.second_moment()) for s in reads), torch.zeros_like(first.covariance))
    if len(statistics) == 1:
        return replace(first, moment=read)
    mean = torch.stack([s.mean for s in statistics]).mean(0)
    covariance = torch.zeros_like(first.covariance)
    for s in statistics:
        covariance += _scaled(s.covariance) if similarity == "covariance" else _alike(s, similarity)
    if similarity == "cosine":
        mean.zero_()  # they are in the cosines
    return Statistics(first.count, mean, covariance, first.sizes, 0.0, trusted=True, moment=read)


def _alike(statistics: Statistics, similarity: Similarity) -> Tensor:
    """Correlations or cosines, 0 for features that have none, also on the diagonal."""
    if similarity == "cosine":
        power = statistics.covariance.diagonal() + statistics.mean.square()
        found, known = statistics.cosine(), (power > 0).double()
    else:
        found, known = statistics.correlation(), (~statistics.constant).double()
    return found.mul_(torch.outer(known, known))


def _scaled(moments: Tensor) -> Tensor:
    """Second moments in units of their mean diagonal entry."""
    return moments / moments.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
