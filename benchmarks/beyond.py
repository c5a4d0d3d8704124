"""With a refit in place, is there a better choice of M than matching the models' correlations?

    python -m benchmarks.beyond --sets ce_w1 text_w2 --seeds 2 --out benchmarks/results/x.md

All of these zip everything, refit, and have one loader for each task where tasks differ:

- weighted: features count by what the next layers read of them, their correlation times the root of
  the powers |w|^2 var that they bring into the layers that read them;
- matched again: the merged network runs beside the models, each of their features joins the merged
  feature with which it correlates most (one step of k-means, with centres that the merged network
  computes), and everything is fused and refitted once more; twice: another time;
- svd: the best linear M of each space, as if there were no activations in between;
- followed, by zip or permute: features are alike that a refitted layer can follow with one output.
  It reads what the merged network computes, and misses least of what the models' features are on
  their own tasks (for two features of one model, of their mean, which misses their difference);
- norms, weights by gradients: what the layer by layer fits leave for training on the same images:
  Adam on the models' outputs, through the whole network, on the affines of its norms or on all.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zipfx
from benchmarks import data, harness, tables
from benchmarks.document import Document
from benchmarks.harness import Bench, Result
from zipfx.analysis.spaces.values import Role
from zipfx.observe import Statistics

POSITIONS, RIDGE = 24, 1e-3  # of each image; relative to the mean power of a layer's inputs
EPOCHS, BATCH = 15, 50


class Recorder:
    """A matcher that matches by position and keeps what it was told."""

    def __init__(self) -> None:
        self.found: list[zipfx.Statistics] = []

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching:
        self.found.append(statistics)
        return zipfx.Identity()(statistics, merged)


class Given:
    """A matcher that has been told everything, space by space."""

    def __init__(self, assignments: Sequence[Tensor]) -> None:
        self.next = iter(assignments)

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching:
        return zipfx.Matching(next(self.next), statistics.sizes, merged)


class Alike:
    """A matcher of features that are told how alike they are, space by space."""

    def __init__(self, matcher: zipfx.Matcher, similarities: Sequence[Tensor]) -> None:
        self.matcher, self.next = matcher, iter(similarities)

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching | zipfx.LinearMerge:
        told = Statistics.trusted(**{**vars(statistics), "covariance": next(self.next)})
        return self.matcher(told, merged, across_only=across_only)


class Weighted:
    """Zip on covariances of features that are scaled, space by space."""

    def __init__(self, scales: Sequence[Tensor]) -> None:
        self.next = iter(scales)

    def __call__(
        self, statistics: zipfx.Statistics, merged: int, *, across_only: bool = False
    ) -> zipfx.Matching | zipfx.LinearMerge:
        deviation = statistics.covariance.diagonal().clamp(min=0).sqrt()
        scale = next(self.next) * deviation
        power = statistics.correlation() * scale.outer(scale)
        zipping = Alike(zipfx.Zip(similarity="covariance"), [power])
        return zipping(statistics, merged, across_only=across_only)


def read_weights(models: Sequence[nn.Module], example: Tensor) -> list[Tensor]:
    """For every space: the norm of the weights that read each feature, of all models in turn."""
    found = []
    for space in zipfx.analyze(models[0], example):
        reads = [a for a in space.axes if a.role == Role.CONSUMES and a.by < 0]
        norms = []
        for model in models:
            power = torch.zeros(space.size, dtype=torch.float64)
            for axis in reads:
                weight = model.get_parameter(axis.parameter).detach().double()
                of_column = weight.movedim(axis.dim, 0).flatten(1).square().sum(1)
                power += of_column[axis.index].sum(1)
            norms.append((power / power.mean()).sqrt())
        found.append(torch.cat(norms))
    return found


def joined_again(statistics: zipfx.Statistics) -> Tensor:
    """(N,) the merged feature that each feature of the models joins; the last model is merged."""
    merged = statistics.sizes[-1]
    alike = statistics.correlation()[:-merged, -merged:].cpu().numpy()
    joined = alike.argmax(1)
    while len(lonely := np.setdiff1d(np.arange(merged), joined)):
        spare = np.flatnonzero(np.bincount(joined, minlength=merged)[joined] > 1)
        loss = alike[spare, joined[spare]][:, None] - alike[spare][:, lonely]
        row, column = np.unravel_index(loss.argmin(), loss.shape)
        joined[spare[row]] = lonely[column]
    return torch.from_numpy(joined)


def seen_by_layers(
    merged: nn.Module, model: nn.Module, batches: data.Batches, names: Sequence[str]
) -> dict[str, Tensor]:
    """For every convolution, mean products of [1, what it reads in the merged network, what the
    norm after it gives in a model], float64, over some positions of each image."""
    modules = [name for name, _ in model.named_modules()]
    found: dict[str, Tensor] = {}
    reads: dict[str, Tensor] = {}
    gives: dict[str, Tensor] = {}
    hooks = []
    for name in names:
        norm = modules[modules.index(name) + 1]  # in a ResNet
        reader, writer = merged.get_submodule(name), model.get_submodule(norm)
        hooks += [
            reader.register_forward_pre_hook(lambda _, x, n=name: reads.update({n: x[0]})),
            writer.register_forward_hook(lambda _, x, y, n=name: gives.update({n: y})),
        ]
    images = 0
    for batch in batches:
        merged(batch), model(batch)
        images += len(batch)
        for name in names:
            conv: Any = merged.get_submodule(name)
            x = F.unfold(reads[name], conv.kernel_size, padding=conv.padding, stride=conv.stride)
            taken = torch.randperm(x.shape[-1])[:POSITIONS]
            both = torch.cat([torch.ones_like(x[:, :1]), x, gives[name].flatten(2)], 1)
            rows = both[..., taken].mT.flatten(0, 1)
            found[name] = found.get(name, 0) + (rows.mT @ rows).double() / len(taken)
    for hook in hooks:
        hook.remove()
    return {name: total / images for name, total in found.items()}


def missed(products: Sequence[Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    """What one refitted output misses of each pair of features, (K n, K n), and the features'
    variances, (K n,). products: of each task; index: (n,) which outputs of the layer are meant."""
    n = len(index)
    inputs = len(products[0]) - n
    total = torch.stack(list(products)).sum(0)

    def solved(power: Tensor, y: Tensor) -> Tensor:
        least = RIDGE * power.diagonal()[1:].mean() * torch.eye(inputs)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(power + least), y, upper=False)

    def of(p: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
        return p[inputs:, inputs:][index][:, index], solved(power, p[:inputs, inputs:][:, index])

    pooled = total[:inputs, :inputs]
    powers, known = zip(*(of(p, pooled) for p in products), strict=True)
    left = torch.cat([p.diagonal() - y.square().sum(0) for p, y in zip(powers, known)])
    every = torch.cat(known, 1)
    found = left + left[:, None] - 2 * every.mT @ every
    for k, (p, power) in enumerate(zip(products, powers)):
        own = of(p, p[:inputs, :inputs])[1]
        rest = power - own.mT @ own
        follow = (rest.diagonal() + rest.diagonal()[:, None] + 2 * rest) / 2
        apart = (power.diagonal() + power.diagonal()[:, None] - 2 * power) / 2
        found[k * n : (k + 1) * n, k * n : (k + 1) * n] = follow + apart
    level = torch.cat([p[0, inputs:][index] for p in products])
    return found, torch.cat([p.diagonal() for p in powers]) - level.square()


@torch.no_grad()
def followed(
    models: Sequence[nn.Module], merged: nn.Module, loaders: Sequence[data.Batches]
) -> list[Tensor]:
    """For every space, 1 less twice what is missed of two features over their variance: as the
    correlation is for two features and their mean."""
    torch.manual_seed(0)
    spaces = zipfx.analyze(models[0], next(iter(loaders[0]))[:2])
    writes = [
        [
            (a.parameter.removesuffix(".weight"), a.index[:, 0])
            for a in space.axes
            if a.role == Role.PRODUCES and models[0].get_parameter(a.parameter).ndim == 4
        ]
        for space in spaces
    ]
    names = [name for layers in writes for name, _ in layers]
    products = [seen_by_layers(merged, m, d, names) for m, d in zip(models, loaders, strict=True)]
    found = []
    for layers in writes:
        parts = [missed([p[name] for p in products], index) for name, index in layers]
        loss, variance = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        alike = 1 - 2 * loss / (variance + variance[:, None])
        found.append(alike.fill_diagonal_(1))
    return found


def trained(
    merged: fx.GraphModule,
    models: Sequence[nn.Module],
    loaders: Sequence[data.Batches],
    norms: bool,
) -> fx.GraphModule:
    """A copy, trained to give on each task what its model gives, in eval mode as all else here."""
    new = copy.deepcopy(merged).eval()
    images, targets = [], []
    with torch.no_grad():
        for model, batches in zip(models, loaders, strict=True):
            for batch in batches:
                images.append(batch)
                targets.append(model(batch))
    x, y = torch.cat(images), torch.cat(targets)
    affine = [p for m in new.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    free, rate = (affine, 1e-3) if norms else (list(new.parameters()), 3e-4)
    steps = EPOCHS * -(-len(x) // BATCH)
    optimiser = torch.optim.Adam(free, rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            loss = (new(x[index]) - y[index]).square().mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return new


def variants(bench: Bench, seed: int, images: int) -> Iterator[tuple[str, fx.GraphModule]]:
    """Every way to choose M, refitted."""
    models, own = bench.models, not bench.shares_tasks
    draw = bench.own_calibration if own else bench.calibration
    both = bench.calibration(images, seed)

    def merge(matcher: Any, repair: Any = "refit") -> fx.GraphModule:
        return zipfx.zip(models, draw(images, seed), matcher=matcher, repair=repair, progress=False)

    merged = first = merge("zip")
    yield "zip", merged
    yield "weighted", merge(Weighted(read_weights(models, next(iter(both))[:2])))
    yield "svd", merge("svd")
    for name in ("matched again", "matched again, twice"):
        recorder = Recorder()
        zipfx.zip([*models, merged], both, matcher=recorder, repair="none", progress=False)
        merged = merge(Given([joined_again(s) for s in recorder.found]))
        yield name, merged
    loaders = draw(images, seed) if own else [both] * len(models)
    assert isinstance(loaders, list)
    alike = followed(models, first, loaders)
    yield "followed, zip", merge(Alike(zipfx.Zip(similarity="covariance"), alike))
    yield "followed, permute", merge(Alike(zipfx.Permute(similarity="covariance"), alike))
    yield "norms by gradients", trained(first, models, loaders, norms=True)
    yield "weights by gradients", trained(first, models, loaders, norms=False)


def table(bench: Bench, seeds: int, images: int) -> list[Result]:
    """One row for each, over all seeds."""
    rows: dict[str, Result] = {}
    for seed in range(seeds):
        for name, merged in variants(bench, seed, images):
            row = rows.setdefault(name, bench.row(name, [merged]))
            row.stages.append(dict(merged.meta["zipfx"].seconds))
            bench.measure(row, [merged])
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_arguments(parser)
    parser.set_defaults(default_sets=["ce_w1", "text_w2"])
    options = harness.parse(parser, arguments)
    text = (__doc__ or "").partition("x.md\n\n")[2]
    document = Document("benchmarks.beyond", "Other choices of M, refitted", text, options.out)
    for bench in harness.benches(options):
        document.add(f"## {bench.name}")
        rows = [harness.originals(bench)[-1], *table(bench, options.seeds, options.images)]
        document.add(tables.accuracy_table(bench.name, rows))


if __name__ == "__main__":
    main()
