"""View: the graph of a merge around a layer, as a refit asks about it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from operator import add, iadd
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zipfx.model.memory import span
from zipfx.model.running import shapes
from zipfx.model.tensors import first_samples, is_batch_norm
from zipfx.repair.layers.kinds import layer_of
from zipfx.trace.nodes import is_in_place, name_of, only_looked_at, tensors_at

aten = torch.ops.aten
_ADDS = (add, iadd, torch.add, aten.add.Tensor, aten.add_.Tensor, "add", "add_")
#: what hands its input on as it is, in eval mode
_PASSING = (nn.Identity, nn.modules.dropout._DropoutNd)
_PASSING_CALLS = (
    "dropout", "dropout_", "feature_dropout", "dropout1d", "dropout2d", "dropout3d",
    "stochastic_depth", "clone", "contiguous",
)  # fmt: skip
#: activations that are flat below and above
_FLAT: dict[object, tuple[float, float]] = {
    nn.ReLU: (0, math.inf),
    F.relu: (0, math.inf),
    F.relu_: (0, math.inf),
    torch.relu: (0, math.inf),
    torch.relu_: (0, math.inf),
    "relu": (0, math.inf),
    "relu_": (0, math.inf),
    aten.relu.default: (0, math.inf),
    aten.relu_.default: (0, math.inf),
    nn.ReLU6: (0, 6),
    F.relu6: (0, 6),
}


class GraphView:
    """A merged graph, with where its nodes lie, what they compute, and what they use.

    nodes: in order; at: their numbers; weighted: those that bring parameters in; shapes: of what
    they compute on the example inputs.
    """

    def __init__(
        self, merged: fx.GraphModule, inputs: Sequence[Any], written: Sequence[Tensor]
    ) -> None:
        self.merged = merged
        self.nodes = list(merged.graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        uses = [t for node in self.nodes for t in self.parameters(node)]
        self._uses = np.array([span(t) for t in (*uses, *written)], np.int64).reshape(-1, 2)
        self.weighted = [node for node in self.nodes if self.parameters(node)]
        self._calls = Counter(id(self.module(node)) for node in self.nodes)
        self.shapes = shapes(merged, inputs)
        self._alone: dict[fx.Node, torch.Size] = {}  # of one image
        with suppress(Exception):  # not all models take one
            self._alone = shapes(merged, first_samples(inputs, 1))

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        return self.merged.get_submodule(str(node.target)) if node.op == "call_module" else None

    def parameters(self, node: fx.Node) -> list[nn.Parameter]:
        """The parameters that a node itself brings in, and whose values are read."""
        if only_looked_at(node):
            return []
        return [t for t in tensors_at(self.merged, node) if isinstance(t, nn.Parameter)]

    def shared(self, t: Tensor, uses: int = 1) -> bool:
        """Whether anything else lies on the memory of a parameter, or uses it as well; uses: how
        often it is used by those that are meant."""
        start, stop = span(t)
        return int(((self._uses[:, 0] < stop) & (self._uses[:, 1] > start)).sum()) > uses

    def repeats(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that call the module of a node, in order; the node alone, if one of them reads
        what comes of another: there errors feed on themselves."""
        module = self.module(node)
        if module is None or self._calls[id(module)] == 1:
            return [node]
        found = [n for n in self.weighted if self.module(n) is module]
        reached = set(found)
        for n in self.nodes[self.at[found[0]] :]:
            if not reached.isdisjoint(n.all_input_nodes):
                if n in reached:
                    return [node]
                reached.add(n)
        return found

    def between(self, node: fx.Node, end: fx.Node) -> bool:
        """Whether another layer comes between: its target may be gone once `end` has run."""
        between = range(self.at[node] + 1, self.at[end])
        return any(self.at[n] in between for n in self.weighted)

    def images(self, node: fx.Node) -> int:
        """The dimension of a node's output along which images lie: that in which one differs from
        several. In (T, B, C) it is not the first."""
        few, many = self._alone.get(node, ()), self.shapes[node]
        found = [d for d, (a, b) in enumerate(zip(few, many)) if a != b]
        return found[0] if len(found) == 1 else 0

    def norm_after(self, node: fx.Node) -> fx.Node | None:
        """The BatchNorm that is all that reads a node, that reads nothing else, and that is of the
        features which the node computes."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        module, own = (None if n is None else self.module(n) for n in (user, node))
        if user is None or module is None or not is_batch_norm(module):
            return None
        layer = None if own is None else layer_of(own)
        ours = layer is not None and layer.channel % len(self.shapes[node]) == 1
        return (
            user if ours and self._calls[id(module)] == 1 and not self.between(node, user) else None
        )

    def sum_after(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Where what a node computes is added to something older: (the sum, the older part)."""
        end = node
        while len(end.users) == 1:
            user = next(iter(end.users))
            if isinstance(self.module(user), _PASSING) or (
                user.op == "call_function" and name_of(user.target) in _PASSING_CALLS
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
            module = self.module(node)
            if module is not None:
                return bool(getattr(module, "inplace", False))
            return is_in_place(node.target) or bool(node.kwargs.get("inplace"))

        between = (n for n in value.users if self.at[layer] < self.at[n] < self.at[end])
        return any(map(writes, between))

    def flat_after(self, node: fx.Node) -> tuple[float, float] | None:
        """Where the activation is flat that is all that reads a node."""
        kinds = {
            type(module) if (module := self.module(user)) is not None else user.target
            for user in node.users
        }
        bounds = {_FLAT.get(kind) for kind in kinds}
        return bounds.pop() if len(bounds) == 1 else None

    def is_given(self, node: fx.Node) -> bool:
        """Whether what a node computes is an output of the network, as it is or in a container,
        and nothing else."""

        def gives(user: fx.Node) -> bool:
            return user.op == "output" or (isinstance(user.target, type) and self.is_given(user))

        return bool(node.users) and all(map(gives, node.users))
