"""Targets: which layers of a merged model can be refitted, and what each should compute.

A layer's target is what its outputs mean to those that read them: the merged features of the
models, after the BatchNorm that follows it. Where the outputs are added to something older (a
residual stream) the sum should be the models' merged sum, so the target is that less the older part
as the merged network computes it: errors do not pile up on the stream. Where an activation follows
that is flat on one side, anything on that side is as good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import add, iadd

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zipfx.analysis import Role, overlapping
from zipfx.match import LinearMerge, Merge, made_matrix
from zipfx.merge import HEAD_KEY, SOURCE_KEY, Assembly, HeadPlan, Limit
from zipfx.model.memory import span
from zipfx.model.running import shapes
from zipfx.model.tensors import first_samples, is_batch_norm
from zipfx.repair.exposed.unfold import PART_KEY, title
from zipfx.repair.layers import Layer, layer_of
from zipfx.trace.nodes import is_in_place, only_looked_at, tensors_at

_ADDS = (add, iadd, torch.add, torch.ops.aten.add.Tensor, "add", "add_")
#: what hands its input on as it is, in eval mode
_PASSING = (nn.Identity, nn.modules.dropout._DropoutNd)
_PASSING_CALLS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "stochastic_depth")
#: activations that are flat below and above
_FLAT: dict[object, tuple[float, float]] = {
    nn.ReLU: (0, math.inf),
    F.relu: (0, math.inf),
    F.relu_: (0, math.inf),
    torch.relu: (0, math.inf),
    torch.relu_: (0, math.inf),
    "relu": (0, math.inf),
    "relu_": (0, math.inf),
    torch.ops.aten.relu.default: (0, math.inf),
    nn.ReLU6: (0, 6),
    F.relu6: (0, 6),
}


@dataclass(frozen=True, eq=False)
class RefitStep:
    """One layer to be refitted; letters as in `layers`, J sources of data.

    node: of the merged graph; images: the dimension of its output along which images lie; target:
    name of the node of the models that has what should be computed; skip: of the merged graph, what
    the outputs are added to first; flat: below and above which outputs are as good as these bounds;
    matrices: (J,) by model, (G o, G o), or (G o,) if diagonal, how its features become targets;
    asked: (J,) of (G, o) bool, whether the source has a target for an output.
    """

    node: fx.Node
    layer: Layer
    images: int
    target: str
    skip: fx.Node | None
    flat: tuple[float, float] | None
    matrices: tuple[Mapping[int, Tensor], ...]
    asked: tuple[Tensor, ...]


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
        self.limits = {id(t): near for t, near in limits}
        self.limited = [span(t) for t, _ in limits]
        self.merged, self.analysis, self.sources = merged, job.analysis, sources
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
        self.merges = [job.matched[s.name][0] for s in job.analysis.spaces]
        self.nodes = list(merged.graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        uses = [t for node in self.nodes for t in self._parameters(node)]
        self.uses = np.array([span(t) for t in (*uses, *written)], np.int64).reshape(-1, 2)
        self.weighted = [node for node in self.nodes if self._parameters(node)]
        self.calls = Counter(id(self._module(node)) for node in self.nodes)
        self.shapes = shapes(merged, job.inputs)
        self.alone: dict[fx.Node, torch.Size] = {}  # of one image
        with suppress(Exception):  # not all models take one
            self.alone = shapes(merged, first_samples(job.inputs, 1))

    def plan(self) -> tuple[list[RefitStep], list[str]]:
        steps: list[RefitStep] = []
        left: dict[str, None] = {}
        folded: set[fx.Node] = set()
        for node in self.weighted:
            if node in folded:
                continue
            norm = self._norm_after(node)
            step = self._step(node, norm)
            if step is None:
                left[title(node)] = None
            else:
                steps.append(step)
                folded |= {norm} if norm is not None else set()
        return steps, list(left)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.merged.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _parameters(self, node: fx.Node) -> list[nn.Parameter]:
        """The parameters that a node itself brings in, and whose values are read."""
        if only_looked_at(node):
            return []
        return [t for t in tensors_at(self.merged, node) if isinstance(t, nn.Parameter)]

    def _shared(self, t: Tensor) -> bool:
        """Whether anything else lies on the memory of a parameter, or uses it as well."""
        start, stop = span(t)
        return int(((self.uses[:, 0] < stop) & (self.uses[:, 1] > start)).sum()) > 1

    def _step(self, node: fx.Node, norm: fx.Node | None) -> RefitStep | None:
        module = self._module(node)
        own = [t for n in (node, norm) if n is not None for t in self._parameters(n)]
        if module is None or any(map(self._shared, own)) or len(node.args) != 1:
            return None
        limit = self.limits.get(id(getattr(module, "weight", None)))
        bound = [t for t in own if any(a < span(t)[1] and span(t)[0] < b for a, b in self.limited)]
        if len(bound) > (limit is not None):
            return None  # a part of such a tensor, or two of them
        layer = layer_of(module, None if norm is None else self._module(norm), limit)
        head = node.meta.get(HEAD_KEY)
        if (
            layer is None
            or not layer.weight().numel()
            or not layer.takes(self.shapes[node])
            or (head is not None and self._origin(node) in self.idle[head])
            or self._origin(node) in self.chosen[head]
        ):
            return None
        end = norm or node
        target, skip = self._sum_after(end)
        if self._between(end, target):
            target, skip = end, None
        name = target.meta[SOURCE_KEY]
        if any(name not in self.names[k] for k in (self.models if head is None else (head,))):
            return None  # it is a part of a node that can not be unfolded in a model
        shape = layer.weight().shape[:2]
        if head is not None:
            found = self._own_features(head, shape.numel())
        else:
            part = PART_KEY in target.meta
            made = self._made_by_rows(target) if part else self._made_at(name, layer)
            if made is None:
                return None
            found = self._merged_features(made, shape.numel())
        asked = tuple(a.reshape(shape) for a in found[1])
        images = self._images(node) if layer.channel == -1 else 0
        flat = self._flat_after(target)
        return RefitStep(node, layer, images, name, skip, flat, tuple(found[0]), asked)

    def _between(self, node: fx.Node, end: fx.Node) -> bool:
        """Whether another layer comes between: its target may be gone once `end` has run."""
        between = range(self.at[node] + 1, self.at[end])
        return any(self.at[n] in between for n in self.weighted)

    def _images(self, node: fx.Node) -> int:
        """The dimension of a node's output along which images lie: that in which one differs from
        several. In (T, B, C) it is not the first."""
        few, many = self.alone.get(node, ()), self.shapes[node]
        found = [d for d, (a, b) in enumerate(zip(few, many)) if a != b]
        return found[0] if len(found) == 1 else 0

    def _norm_after(self, node: fx.Node) -> fx.Node | None:
        """The BatchNorm that is all that reads a node, that reads nothing else, and that is of the
        features which the node computes."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        module, own = (None if n is None else self._module(n) for n in (user, node))
        if user is None or module is None or not is_batch_norm(module):
            return None
        layer = None if own is None else layer_of(own)
        ours = layer is not None and layer.channel % len(self.shapes[node]) == 1
        return (
            user if ours and self.calls[id(module)] == 1 and not self._between(node, user) else None
        )

    def _sum_after(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Where what a node computes is added to something older: (the sum, the older part)."""
        end = node
        while len(end.users) == 1:
            user = next(iter(end.users))
            if isinstance(self._module(user), _PASSING) or (
                user.op == "call_function" and user.target.__name__ in _PASSING_CALLS  # type: ignore[union-attr]
            ):
                end = user
                continue
            parts = [a for a in user.args if isinstance(a, fx.Node) and a is not end]
            sums = user.target in _ADDS and not user.kwargs and len(user.args) == 2
            same = (
                parts[-1:]
                and parts[0] in self.shapes
                and self.shapes.get(user) == self.shapes[node]
            )
            older = sums and same and self.at[parts[0]] < self.at[node]
            if older and not self._overwritten(parts[0], node, user):
                return user, parts[0]
            break
        return node, None

    def _overwritten(self, value: fx.Node, layer: fx.Node, end: fx.Node) -> bool:
        """Whether a value is written in place once a layer has run, before `end` reads it."""

        def writes(node: fx.Node) -> bool:
            module = self._module(node)
            if module is not None:
                return bool(getattr(module, "inplace", False))
            return is_in_place(node.target) or bool(node.kwargs.get("inplace"))

        between = (n for n in value.users if self.at[layer] < self.at[n] < self.at[end])
        return any(map(writes, between))

    def _flat_after(self, node: fx.Node) -> tuple[float, float] | None:
        """Where the activation is flat that is all that reads a node."""
        kinds = {
            type(module) if (module := self._module(user)) is not None else user.target
            for user in node.users
        }
        bounds = {_FLAT.get(kind) for kind in kinds}
        return bounds.pop() if len(bounds) == 1 else None

    def _origin(self, node: fx.Node) -> str:
        """Name of the node of the model's graph that a node comes from, or is a part of."""
        found: str = node.meta[PART_KEY][0] if PART_KEY in node.meta else node.meta[SOURCE_KEY]
        return found

    def _own_features(self, k: int, width: int) -> tuple[list[dict[int, Tensor]], list[Tensor]]:
        """In a head: those of its model, on its own data."""
        asked = [torch.tensor(self.sources == 1 or j == k) for j in range(self.sources)]
        return [{k: torch.ones(width)}] * self.sources, [a.expand(width) for a in asked]

    def _made_at(self, name: str, layer: Layer) -> list[tuple[Tensor, Merge]] | None:
        """The spaces whose features a layer makes, as they lie in the value of a node.

        None: they do not lie where the layer puts them. They may have other labels at other
        positions (as after a position code), but must be in the same places.
        """
        value = self.analysis.facts.nodes[self.number[name]].values[0]
        channel = layer.channel % len(value.shape)
        made: list[tuple[Tensor, Merge]] = []
        for dims, slots in overlapping(value.features):
            moved = {s for labels in slots for s in self.analysis.grouping.spaces(labels)}
            if not moved:
                continue
            if channel not in dims:
                return None
            sizes, at = [value.shape[d] for d in dims], dims.index(channel)
            rows = [np.moveaxis(s.reshape(sizes), at, -1).reshape(-1, sizes[at]) for s in slots]
            tables = [self.analysis.grouping.tables(*row) for row in zip(*rows, strict=True)]
            first, *others = [{s: index.tolist() for s, index in table} for table in tables]
            if moved != set(first) or any(other != first for other in others):
                return None
            made += [(index, self.merges[s]) for s, index in tables[0]]
        return made

    def _made_by_rows(self, node: fx.Node) -> list[tuple[Tensor, Merge]] | None:
        """The same of some rows of a parameter; None: spaces cross their ends."""
        _, parameter, start, stop = node.meta[PART_KEY]
        made = []
        for space, merge in zip(self.analysis.spaces, self.merges, strict=True):
            for axis in space.axes:
                if (axis.parameter, axis.dim) != (parameter, 0) or axis.implied:
                    continue
                inside = (axis.index >= start) & (axis.index < stop)
                mine = inside.all(0)
                if axis.role == Role.CONSUMES or axis.by >= 0 or bool(inside[:, ~mine].any()):
                    return None
                if bool(mine.any()):
                    made.append((axis.index[:, mine] - start, merge))
        return made

    def _merged_features(
        self, made: Sequence[tuple[Tensor, Merge]], width: int
    ) -> tuple[list[dict[int, Tensor]], list[Tensor]]:
        """In the trunk: M times the models' features. With data of its own a model's features alone
        are asked for, renormalised, and only where it has a share of the merged feature."""
        if made:
            whole = {k: made_matrix(width, made, k) / len(self.models) for k in self.models}
        else:  # the outputs of the network, which may be many
            even = torch.full((width,), 1 / len(self.models), dtype=torch.float64)
            whole = dict.fromkeys(self.models, even)
        if self.sources == 1 or any(isinstance(merge, LinearMerge) for _, merge in made):
            return [whole] * self.sources, [torch.ones(width, dtype=torch.bool)] * self.sources
        shares = [whole[k].reshape(width, -1).sum(1) for k in self.models]
        scales = [s.where(s > 0, 1) for s in shares]
        alone = [whole[k] / (s[:, None] if made else s) for k, s in enumerate(scales)]
        return [{k: m} for k, m in enumerate(alone)], [s > 0 for s in shares]
