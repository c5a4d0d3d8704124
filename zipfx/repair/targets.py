"""Targets: which layers of a merged model can be refitted, and what each should compute.

A layer's target is what its outputs mean to those that read them: the merged features of the
models, after the BatchNorm that follows it. Where the outputs are added to something older (a
residual stream) the sum should be the models' merged sum, so the target is that less the older part
as the merged network computes it: errors do not pile up on the stream. Where an activation follows
that is flat on one side, anything on that side is as good.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from zipfx.merge import Assembly, HeadPlan, Limit, origin_of
from zipfx.model.memory import span
from zipfx.model.tensors import alike
from zipfx.repair.exposed.splice import title
from zipfx.repair.features import Wanted, made_at, made_by_rows, merged_features, own_features
from zipfx.repair.layers.kinds import layer_of
from zipfx.repair.layers.layer import Layer
from zipfx.repair.order import in_order
from zipfx.repair.view import GraphView


@dataclass(frozen=True, eq=False)
class RefitStep:
    """One layer to be refitted; letters as in `layers.layer`, J sources of data.

    node: of the merged graph; images: the dimension of its output along which images lie;
    positions: of each image of the example inputs; target: name of the node of the models that has
    what should be computed; skip: of the merged graph, what the outputs are added to first; flat:
    below and above which outputs are as good as these bounds; given: whether they are what the
    network gives; matrices: (J,) by model, (G o, G o), or (G o,) if diagonal, how its features
    become targets; asked: (J,) of (G, o) bool, whether the source has a target for an output;
    others: the same where the layer is applied again, to what does not depend on this; apart:
    whether layers lie in the way that are fitted later (see `order`).
    """

    node: fx.Node
    layer: Layer
    images: int
    positions: int
    target: str
    skip: fx.Node | None
    flat: tuple[float, float] | None
    given: bool
    matrices: tuple[Mapping[int, Tensor], ...]
    asked: tuple[Tensor, ...]
    others: tuple[RefitStep, ...] = ()
    apart: bool = False

    @property
    def inputs(self) -> int:
        """n, known without a look at the weight, which would be made float64."""
        found: int = self.layer.module.weight.numel() // self.asked[0].numel()
        return found


def plan_targets(
    merged: fx.GraphModule,
    job: Assembly,
    heads: Sequence[HeadPlan],
    sources: int,
    modules: Sequence[fx.GraphModule] | None = None,
    written: Sequence[Tensor] = (),
    limits: Sequence[tuple[Tensor, Limit]] = (),
) -> tuple[list[RefitStep], list[str]]:
    """The layers to refit, in the order of the graph, and what else has weights.

    Args:
        merged: the merged model; job, heads: what it was made from, and its heads.
        sources: of data: 1, which all models see, or K, each the model's own.
        modules: the models as they will be run (default: those of the job).
        written: what forward of the merged model writes to, which is no weight to be solved for.
        limits: tensors that can not have every value, and what tells the nearest to one.
    """
    models = modules or job.modules
    return _RefitPlanner(merged, job, heads, sources, models, written, limits).plan()


class _RefitPlanner:
    def __init__(
        self,
        merged: fx.GraphModule,
        job: Assembly,
        heads: Sequence[HeadPlan],
        sources: int,
        modules: Sequence[fx.GraphModule],
        written: Sequence[Tensor],
        limits: Sequence[tuple[Tensor, Limit]],
    ) -> None:
        self.view = GraphView(merged, job.inputs, written)
        self.limits = {id(t): near for t, near in limits}
        self.limited = [span(t) for t, _ in limits]
        self.analysis, self.sources = job.analysis, sources
        self.merges = {s.name: job.matched[s.name][0] for s in job.analysis.spaces}
        self.models = range(len(job.modules))
        self.names = [{node.name for node in module.graph.nodes} for module in modules]
        graphs = [list(module.graph.nodes) for module in job.modules]
        self.number = {n.name: i for i, n in enumerate(graphs[0])}
        #: nodes of each head that still make merged features
        self.idle = [{g[i].name for i in p.merged} for g, p in zip(graphs, heads)]
        #: nodes with other rows in every model, of the trunk and of each head
        facts = zip(graphs[0], job.analysis.facts.nodes, strict=True)
        self.chosen: dict[int | None, Collection[str]] = {
            None: {node.name for node, fact in facts if fact.chosen}
        }
        self.chosen.update({k: plan.chosen for k, plan in enumerate(heads)})

    def plan(self) -> tuple[list[RefitStep], list[str]]:
        steps: list[RefitStep] = []
        left: dict[str, None] = {}
        folded: set[fx.Node] = set()
        for node in self.view.weighted:
            if node in folded:
                continue
            repeats = self.view.repeats(node)
            norm = self.view.norm_after(node) if len(repeats) == 1 else None
            step = self._step(node, norm) if len(repeats) == 1 else self._repeated(repeats)
            if step is None:
                left[title(node)] = None
            else:
                steps.append(step)
                folded |= {*repeats} if norm is None else {norm}
        groups = [[step.node, *(other.node for other in step.others)] for step in steps]
        ordered = in_order(groups, self.view.at)
        return [replace(steps[i], apart=apart) for i, apart in ordered], list(left)

    def _repeated(self, nodes: Sequence[fx.Node]) -> RefitStep | None:
        """A layer that several nodes apply, all of which ask for the same features."""
        found = [step for n in nodes if (step := self._step(n, None, len(nodes))) is not None]
        if len(found) < len(nodes) or not all(_same_features(found[0], step) for step in found):
            return None
        first, *others = found
        flat = first.flat if all(step.flat == first.flat for step in others) else None
        given = all(step.given for step in found)
        return replace(first, flat=flat, given=given, others=tuple(others))

    def _step(self, node: fx.Node, norm: fx.Node | None, uses: int = 1) -> RefitStep | None:
        view, head = self.view, origin_of(node).head
        layer = self._layer(node, norm, uses)
        if (
            layer is None
            or not layer.weight().numel()
            or not layer.takes(view.shapes[node])
            or (head is not None and _source(node) in self.idle[head])
            or _source(node) in self.chosen[head]
        ):
            return None
        end = norm or node
        target, skip = view.sum_after(end)
        if uses > 1 or view.between(end, target):  # the older part may come of the layer itself
            target, skip = end, None
        name = origin_of(target).source
        assert name is not None
        if any(name not in self.names[k] for k in (self.models if head is None else (head,))):
            return None  # it is a part of a node that can not be unfolded in a model
        shape = layer.weight().shape[:2]
        wanted = self._wanted(target, name, layer, head, shape.numel())
        if wanted is None:
            return None
        asked = tuple(a.reshape(shape) for a in wanted[1])
        images = view.images(node) if layer.channel == -1 else 0
        behind = view.flat_after(target), view.is_given(target)
        sizes = [n for d, n in enumerate(view.shapes[node]) if d != images]
        positions = max(1, math.prod(sizes) // shape.numel())
        return RefitStep(
            node, layer, images, positions, name, skip, *behind, tuple(wanted[0]), asked
        )

    def _layer(self, node: fx.Node, norm: fx.Node | None, uses: int) -> Layer | None:
        """The layer that a node applies, with the norm that follows it, if it may be changed."""
        view, module = self.view, self.view.module(node)
        own = [t for n in (node, norm) if n is not None for t in view.parameters(n)]
        if module is None or any(view.shared(t, uses) for t in own) or len(node.args) != 1:
            return None
        limit = self.limits.get(id(getattr(module, "weight", None)))
        bound = [t for t in own if any(a < span(t)[1] and span(t)[0] < b for a, b in self.limited)]
        if len(bound) > (limit is not None):
            return None  # a part of such a tensor, or two of them
        return layer_of(module, None if norm is None else view.module(norm), limit)

    def _wanted(
        self, target: fx.Node, name: str, layer: Layer, head: int | None, width: int
    ) -> Wanted | None:
        """What the outputs of a layer should be; None: nothing that is known."""
        if head is not None:
            return own_features(head, width, self.sources)
        part = origin_of(target).part
        if part is not None:
            made = made_by_rows(self.analysis, self.merges, *part[1:])
        else:
            made = made_at(self.analysis, self.merges, self.number[name], layer)
        if made is None:
            return None
        return merged_features(made, width, len(self.models), self.sources)


def _same_features(a: RefitStep, b: RefitStep) -> bool:
    ours, theirs = ([list(of_source) for of_source in step.matrices] for step in (a, b))
    return ours == theirs and alike((a.asked, a.matrices), (b.asked, b.matrices))


def _source(node: fx.Node) -> str:
    """Name of the node of the model's graph that a node comes from, or is a part of."""
    origin = origin_of(node)
    found = origin.source if origin.part is None else origin.part[0]
    assert found is not None
    return found
