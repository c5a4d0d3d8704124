"""Zip: the stages in order. The only file that sees them all."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from zipfx import match
from zipfx.analyze import Analysis, as_inputs, checked, run_analysis
from zipfx.calibrate import (
    BatchToArgs,
    Calibration,
    batch_size,
    calibration,
    first_samples,
    fixed_randomness,
)
from zipfx.correspond import (
    check_devices,
    check_integers,
    correspond,
    last_node,
    same_graph,
    tensors_at,
)
from zipfx.errors import ZipError
from zipfx.fuse import AxisMap, fuse, fuse_variance, plan
from zipfx.heads import HeadPlan, plan_head
from zipfx.matrices import Matching, Pairs, joined_pairs
from zipfx.observe import PLACES, Observer, combine, observe
from zipfx.repair import repair_batch_norm
from zipfx.report import Report, SpaceReport, Stages
from zipfx.rewrite import (
    HEADS,
    MergedModule,
    Tree,
    build,
    copy_head,
    copy_trunk,
    plant,
    plant_unused,
)
from zipfx.spaces import Axis, Space
from zipfx.trace import structural_copy, trace

REPAIRS = ("none", "bn")


def zip(  # noqa: A001
    models: Sequence[nn.Module],
    calib_loader: Iterable[Any] | None,
    *,
    partial: str | None = None,
    matcher: str | match.Matcher = "zip",
    repair: str = "bn",
    example_inputs: Any = None,
    max_samples: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int = 0,
    batch_to_args: BatchToArgs | None = None,
    tracer: fx.Tracer | None = None,
    verify: bool = True,
    places: str = "last",
) -> fx.GraphModule:
    """Merge K models of one architecture into one multi-task model, without training.

    The models are left unchanged.

    Args:
        models: K >= 2 modules that `torch.fx` can trace; they must correspond node by node up to
            the cut. Any initialisation, any tasks; one device, one dtype each.
        calib_loader: an iterable of batches, or a sequence of K of them (one per model, taken in
            turns; every model sees all of it). A batch is a tensor, a tuple or list whose first
            item is the input, or a dict of keyword arguments; anything else with `batch_to_args`.
            Labels are never read. None only with matcher="identity" and repair="none".
        partial: qualified name of the last module to be zipped; what runs later becomes one head
            per model. None: everything is zipped, and the models' outputs are averaged.
        matcher: "zip", "permute", "identity" (weight averaging), or an instance: `Zip(alpha=0.1)`.
        repair: "bn" re-estimates BatchNorm statistics on the calibration data; "none" does not.
        example_inputs: input (or tuple of arguments) to analyse with; default: two samples of the
            first batch.
        max_samples: calibrate on at most this many samples.
        device: where to calibrate and match; default: where the models are.
        progress: show progress bars.
        seed: of everything random; the caller's generators are restored afterwards.
        batch_to_args: a function from a batch to the input, a tuple of arguments, or a dict.
        tracer: an `fx.Tracer` of your own.
        verify: check the analysis numerically (see `analyze`).
        places: where a space is observed: "last" (the last weight that reads it), "reads" (all of
            them), "source" (the last one, and the values before their activation), "all". Several
            are averaged as correlations.

    Returns:
        A GraphModule on the device, in the dtype and in the mode of models[0]. Full zip: its output
        is structured as one model's. Partial zip: a tuple with one entry per model. What was done
        is in `.meta["zipfx"]`, a `Report`.

    Raises:
        ZipError: models that do not correspond, data that can not be used, NaN in activations, ...;
            the message says what to do. The models are unharmed.

    Source: ZipIt! (Stoica et al., ICLR 2024): merge and unmerge matrices (section 4), partial zip
    (section 4.2); BatchNorm statistics as in REPAIR (Jordan et al., 2023).

    >>> import torch, zipfx
    >>> from torch import nn
    >>> net = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> data = [torch.randn(32, 4) for _ in range(3)]
    >>> merged = zipfx.zip([net(), net()], data, partial="1", progress=False)
    >>> [tuple(y.shape) for y in merged(data[0])]
    [(32, 3), (32, 3)]
    >>> merged.meta["zipfx"].layers
    (1, 2)
    """
    merging = match.resolve(matcher)
    if repair not in REPAIRS:
        raise ZipError(f"repair={repair!r} is unknown; choose one of {list(REPAIRS)}")
    if places not in PLACES:
        raise ZipError(f"places={places!r} is unknown; choose one of {list(PLACES)}")
    check_models(models)
    blind = calib_loader is None
    if blind and not (isinstance(merging, match.Identity) and repair == "none"):
        raise ZipError(
            'calib_loader=None works only with matcher="identity" and repair="none"; pass an '
            "iterable of batches"
        )
    if blind and example_inputs is None:
        raise ZipError("without calibration data pass example_inputs=..., to analyse the model")
    home = _device(models[0])
    away = home if device is None else torch.device(device)
    data = None if blind else calibration(
        calib_loader, len(models), batch_to_args, max_samples, away)  # fmt: skip
    stages = Stages(away)
    with fixed_randomness(seed), torch.no_grad():
        with stages.stage("trace"):
            twins = [structural_copy(m, share_parameters=away == home).to(away) for m in models] \
                if away != home else list(models)  # fmt: skip
            modules = [trace(m, tracer) for m in twins]
            inputs = _inputs(modules[0], data, example_inputs, away)
            last = last_node(modules[0], partial)
            if partial is None:
                _check_outputs(modules, inputs)
            correspond(modules, last)
            check_integers(modules, last)
        with stages.stage("analyze"):
            analysis = _analyse(modules[0], inputs, last, verify, seed)
        with stages.stage("observe"):
            observers, batches = ({}, 0) if data is None else observe(
                modules, analysis.spaces, data, progress=progress, choose=PLACES[places],
                clone_inputs=_writes_inputs(analysis))  # fmt: skip
        with stages.stage("match"):
            matched = {
                s.name: _match(merging, s, observers.pop(s.name, None), len(models))
                for s in analysis.spaces
            }
        with stages.stage("fuse"):
            unseen = [s.name for s in analysis.spaces if data is not None and not s.places]
            job = _Job(modules, analysis, matched, inputs)
            merged, plans, notes = job.full() if partial is None else job.partial()
            _set_modes(merged, models)
        counts = {"observe": batches}
        with stages.stage("repair"):
            if repair == "bn" and data is not None:
                counts["repair"] = repair_batch_norm(merged, data, progress=progress)
        flops = [_flops(m, inputs) for m in (merged, *modules)]
        merged.to(home)
    merged.meta["zipfx"] = Report(
        models=len(models),
        partial=partial,
        matcher=str(merging),
        repair=repair,
        spaces=tuple(
            SpaceReport(s.name, s.size, m.within, m.across, pairs.mean)
            for s in analysis.spaces for m, pairs in [matched[s.name]]
        ),
        layers=_layers(analysis),
        parameters=sum(p.numel() for p in merged.parameters()),
        model_parameters=tuple(sum(p.numel() for p in m.parameters()) for m in models),
        flops=flops[0],
        model_flops=tuple(flops[1:]),
        seconds=dict(stages.seconds),
        bytes=dict(stages.bytes),
        pinned=analysis.spaces.pinned,
        unmerges=tuple(f"head {k} at {list(modules[k].graph.nodes)[j].name}"
                       for k, p in enumerate(plans) for j, u in p.restored.items() if u),
        batches=counts,
        notes=(*analysis.spaces.notes, *notes, *(
            f"space {name!r} lies inside one node and can not be observed: matched by position"
            for name in unseen)),
    )  # fmt: skip
    return merged


def check_models(models: Any) -> None:
    """At least two modules, with everything on one device and in corresponding dtypes."""
    if not isinstance(models, Sequence) or len(models) < 2:
        count = len(models) if isinstance(models, Sequence) else f"a {type(models).__name__}"
        raise ZipError(f"pass a list of at least two models; got {count}")
    for k, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ZipError(f"model {k} is a {type(model).__name__}, not a torch.nn.Module")
    check_devices(models)


def _device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _inputs(
    module: fx.GraphModule, data: Calibration | None, example: Any, device: torch.device
) -> tuple[Any, ...]:
    if example is not None:
        args, kwargs = as_inputs(example), {}
        args = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, args)
    else:
        assert data is not None
        batch = next(iter(data), None)
        if batch is None:
            raise ZipError("the calibration data is empty: calib_loader gave no batch")
        args, kwargs = first_samples(batch, 2)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ZipError(
            f"a batch does not fit the model's forward: {error}. Pass batch_to_args=..., a function "
            "from a batch to the input, a tuple of arguments, or a dict of them"
        ) from error
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def _check_outputs(modules: Sequence[fx.GraphModule], inputs: tuple[Any, ...]) -> None:
    shapes = []
    for k, module in enumerate(modules):
        try:
            result = module(*tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs))
        except Exception as error:
            raise ZipError(f"model {k} fails on the example inputs: {error}") from error
        shapes.append([tuple(t.shape) for t in tree_leaves(result) if isinstance(t, Tensor)])
        if shapes[k] != shapes[0]:
            raise ZipError(
                f"a full zip averages outputs, but model 0 gives shapes {shapes[0]} and model {k} "
                f"{shapes[k]}; keep a head for each model with partial=<the last shared module>"
            )


def _analyse(
    module: fx.GraphModule, inputs: tuple[Any, ...], last: int, verify: bool, seed: int
) -> Analysis:
    if last == len(module.graph.nodes) - 1:
        return run_analysis(module, inputs, verify=verify, seed=seed)
    found = run_analysis(module, inputs, verify=False).cut(last)
    return checked(found, inputs, seed=seed) if verify else found


def _writes_inputs(analysis: Analysis) -> bool:
    nodes = list(analysis.module.graph.nodes)
    inputs = {i for i, n in enumerate(nodes) if n.op == "placeholder"}
    return any(inputs & fact.writes for fact in analysis.facts.nodes)


def _match(
    matcher: match.Matcher, space: Space, observers: Sequence[Observer] | None, models: int
) -> tuple[Matching, Pairs]:
    if observers is None:
        sizes = (space.size,) * models
        found = Matching(torch.arange(space.size).repeat(models), sizes, space.size)
        return found, joined_pairs(found, None)
    statistics = combine(observers)
    try:
        found = matcher(statistics, space.size, across_only=space.tied)
    except ZipError as error:
        raise ZipError(f"space {space.name!r} ({space.size} features): {error}") from error
    if found.merged != space.size or found.sizes != statistics.sizes:
        raise ZipError(
            f"the matcher gave {found.merged} merged features from {found.sizes} for space "
            f"{space.name!r}, which needs {space.size} from {statistics.sizes}"
        )
    return found, joined_pairs(found, statistics)


@dataclass(frozen=True)
class _Job:
    """Everything that fusing and rewriting need."""

    modules: Sequence[fx.GraphModule]
    analysis: Analysis
    matched: Mapping[str, tuple[Matching, Pairs]]
    inputs: tuple[Any, ...]

    def full(self) -> tuple[MergedModule, list[HeadPlan], list[str]]:
        """Everything merged, structured as model 0."""
        source = self.modules[0]
        nodes = list(source.graph.nodes)
        tree = Tree(source, self._trunk_value())
        plant(tree, nodes)
        unused = plant_unused(tree, source, self._used(0, range(len(nodes))))
        graph = fx.Graph()
        seen = copy_trunk(graph, nodes[:-1])
        graph.output(fx.node.map_arg(nodes[-1].args[0], seen.__getitem__))
        notes = [f"kept though the traced graph does not use it: {', '.join(unused)}"] * bool(unused)
        return build(tree.root, graph, type(source).__name__), [], notes

    def partial(self) -> tuple[MergedModule, list[HeadPlan], list[str]]:
        """Trunk up to the cut, one head per model after it."""
        last = self.analysis.grouping.last
        source = self.modules[0]
        trunk = list(source.graph.nodes)[: last + 1]
        plans = self._head_plans()
        tree = Tree(source, self._trunk_value())
        plant(tree, trunk)
        heads = nn.ModuleList([nn.Module() for _ in self.modules])
        tree.root.add_module(HEADS, heads)
        graph = fx.Graph()
        seen = copy_trunk(graph, trunk)
        copies = [seen[n] for n in trunk]
        outputs, notes = [], []
        for k, (module, plan_k) in enumerate(_pairs(self.modules, plans)):
            nodes = list(module.graph.nodes)
            twig = Tree(module, _head_value(module, plan_k), heads[k])
            mine = [nodes[i] for i in plan_k.nodes]
            plant(twig, mine)
            used = self._used(k, range(len(nodes)))
            unused = plant_unused(twig, module, used)
            notes += [f"head {k} keeps what its graph does not use: {', '.join(unused)}"] * bool(unused)
            outputs.append(copy_head(graph, tree.root, nodes, copies, plan_k, k))
        graph.output(tuple(outputs))
        return build(tree.root, graph, type(source).__name__), plans, notes

    def _used(self, k: int, indices: Iterable[int]) -> set[int]:
        nodes = list(self.modules[k].graph.nodes)
        return {id(t) for i in indices for t in tensors_at(self.modules[k], nodes[i])}

    def _trunk_value(self) -> Callable[[str, Tensor], Tensor]:
        analysis, modules = self.analysis, self.modules
        counterparts = self._counterparts()
        named = {id(t): n for m in modules[:1] for n, t in (*m.named_parameters(), *m.named_buffers())}
        shapes = {n: t.shape for n, t in (*modules[0].named_parameters(), *modules[0].named_buffers())}
        matchings = {name: matching for name, (matching, _) in self.matched.items()}
        maps = plan(list(analysis.spaces), matchings, shapes, len(modules))
        blank: list[list[AxisMap]] = [[] for _ in modules]

        def value(path: str, t: Tensor) -> Tensor:
            tensors = counterparts.get(id(t), [t])
            if not t.is_floating_point() or len(tensors) == 1:
                return t.detach().clone()
            name = named.get(id(t), path)
            if name in analysis.spaces.variances:
                return fuse_variance(tensors, self._parts(name))
            return fuse(tensors, maps.get(name, blank))

        return value

    def _parts(self, name: str) -> list[tuple[Axis, Matching, Pairs]]:
        return [(axis, *self.matched[s.name])
                for s in self.analysis.spaces for axis in s.axes if axis.parameter == name]  # fmt: skip

    def _counterparts(self) -> dict[int, list[Tensor]]:
        """id of each of model 0's tensors -> the corresponding tensors of all models."""
        found: dict[int, list[Tensor]] = {}
        graphs = [list(m.graph.nodes)[: self.analysis.grouping.last + 1] for m in self.modules]
        for nodes in _pairs(*graphs):
            groups = [tensors_at(m, n) for m, n in _pairs(self.modules, nodes)]
            for tensors in _pairs(*groups):
                found.setdefault(id(tensors[0]), list(tensors))
        if self.analysis.grouping.last == len(self.modules[0].graph.nodes) - 1:
            states = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in self.modules]
            for name, t in states[0].items():  # parameters that the graph does not use
                others = [s[name] for s in states if name in s and s[name].shape == t.shape]
                if len(others) == len(states):
                    found.setdefault(id(t), others)
        return found

    def _head_plans(self) -> list[HeadPlan]:
        first = self.analysis
        plans = []
        for k, module in enumerate(self.modules):
            by_index = {i: self.matched[s.name][0] for i, s in enumerate(first.spaces)}
            if k == 0 or same_graph(self.modules[0], module):
                found, facts = first.grouping, first.facts
            else:  # a head of its own: its labels have their own numbers
                mine = run_analysis(module, self.inputs, verify=False).cut(first.grouping.last)
                facts = mine.facts
                by_index = self._translate(mine)
                found = mine.grouping
            plans.append(plan_head(module, facts, found, by_index, k))
        return plans

    def _translate(self, other: Analysis) -> dict[int, Matching]:
        """Matchings by the space indices of another model's analysis of the same trunk."""
        last = self.analysis.grouping.last
        names: dict[str, str] = {}
        graphs = [list(a.module.graph.nodes)[: last + 1] for a in (self.analysis, other)]
        for x, y in _pairs(*graphs):
            names[str(x.target)] = str(y.target)
        found = {}
        for space in self.analysis.spaces:
            axis = space.axes[0]
            base = next(t for t in sorted(names, key=len, reverse=True)
                        if axis.parameter == t or axis.parameter.startswith(t + "."))  # fmt: skip
            name = names[base] + axis.parameter[len(base):]
            for i, theirs in enumerate(other.spaces):
                if any(a.parameter == name and a.dim == axis.dim and torch.equal(a.index, axis.index)
                       for a in theirs.axes):  # fmt: skip
                    found[i] = self.matched[space.name][0]
        return found


def _pairs(*groups: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The builtin zip, strict; its name is taken here."""
    return list(builtins.zip(*groups, strict=True))


def _head_value(module: nn.Module, plan_k: HeadPlan) -> Callable[[str, Tensor], Tensor]:
    named = {id(t): n for n, t in module.named_parameters()}

    def value(path: str, t: Tensor) -> Tensor:
        maps = plan_k.fused.get(named.get(id(t), path)) if t.is_floating_point() else None
        return fuse([t], [maps]) if maps else t.detach().clone()

    return value


def _set_modes(merged: nn.Module, models: Sequence[nn.Module]) -> None:
    """Train or eval mode of every module as in the models."""
    modes = {name: m.training for name, m in models[0].named_modules()}
    for name, module in merged.named_modules():
        module.training = modes.get(name, models[0].training)
    for k, model in enumerate(models):
        own = {f"{HEADS}.{k}.{name}": m.training for name, m in model.named_modules()}
        for name, module in merged.named_modules():
            module.training = own.get(name, module.training)


def _flops(module: nn.Module, inputs: tuple[Any, ...]) -> int:
    """FLOPs for one sample, by torch's counter."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        counter = FlopCounterMode(display=False)
        with counter:
            module(*tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs))
    finally:
        for m, mode in modes:
            m.training = mode
    return int(counter.get_total_flops()) // max(1, batch_size(inputs) or 1)


def _layers(analysis: Analysis) -> tuple[int, int]:
    """Nodes that read features or inputs with a weight: in the trunk, and in all."""
    nodes = {c.node for c in analysis.facts.ledger.contractions if c.node >= 0}
    nodes |= {i for i, n in enumerate(analysis.module.graph.nodes) if n.op == "call_module"
              and any(p.ndim > 1 for p in analysis.module.get_submodule(str(n.target)).parameters())}  # fmt: skip
    return sum(i <= analysis.grouping.last for i in nodes), len(nodes)
