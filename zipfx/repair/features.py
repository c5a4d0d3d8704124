"""Features: which merged features a layer makes, and how the models' features become them.

made: [(index, merge)] of the spaces whose features lie in the outputs of a layer; index
(size, occurrences) int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from zipfx.analysis import Analysis, Role, overlapping
from zipfx.match import LinearMerge, Merge, made_matrix
from zipfx.repair.layers.layer import Layer

Made = list[tuple[Tensor, Merge]]
Wanted = tuple[list[Mapping[int, Tensor]], list[Tensor]]


def own_features(k: int, width: int, sources: int) -> Wanted:
    """In a head: those of its model, on its own data."""
    asked = [torch.tensor(sources == 1 or j == k) for j in range(sources)]
    return [{k: torch.ones(width)}] * sources, [a.expand(width) for a in asked]


def made_at(
    analysis: Analysis, merges: Mapping[str, Merge], node: int, layer: Layer
) -> Made | None:
    """The spaces whose features a layer makes, as they lie in the value of a node.

    None: they do not lie where the layer puts them. They may have other labels at other
    positions (as after a position code), but must be in the same places.
    """
    value = analysis.facts.nodes[node].values[0]
    names = [space.name for space in analysis.spaces]
    channel = layer.channel % len(value.shape)
    made: Made = []
    for dims, slots in overlapping(value.features):
        moved = {s for labels in slots for s in analysis.grouping.spaces(labels)}
        if not moved:
            continue
        if channel not in dims:
            return None
        sizes, at = [value.shape[d] for d in dims], dims.index(channel)
        rows = [np.moveaxis(s.reshape(sizes), at, -1).reshape(-1, sizes[at]) for s in slots]
        tables = [analysis.grouping.tables(*row) for row in zip(*rows, strict=True)]
        first, *others = [{s: index.tolist() for s, index in table} for table in tables]
        if moved != set(first) or any(other != first for other in others):
            return None
        made += [(index, merges[names[s]]) for s, index in tables[0]]
    return made


def made_by_rows(
    analysis: Analysis, merges: Mapping[str, Merge], parameter: str, start: int, stop: int
) -> Made | None:
    """The same of some rows of a parameter; None: spaces cross their ends."""
    made = []
    for space in analysis.spaces:
        for axis in space.axes:
            if (axis.parameter, axis.dim) != (parameter, 0) or axis.implied:
                continue
            inside = (axis.index >= start) & (axis.index < stop)
            mine = inside.all(0)
            if axis.role == Role.CONSUMES or axis.by >= 0 or bool(inside[:, ~mine].any()):
                return None
            if bool(mine.any()):
                made.append((axis.index[:, mine] - start, merges[space.name]))
    return made


def merged_features(
    made: Sequence[tuple[Tensor, Merge]], width: int, models: int, sources: int
) -> Wanted:
    """In the trunk: M times the models' features. With data of its own a model's features alone
    are asked for, renormalised, and only where it has a share of the merged feature."""
    if made:
        whole = {k: made_matrix(width, made, k) / models for k in range(models)}
    else:  # the outputs of the network, which may be many
        even = torch.full((width,), 1 / models, dtype=torch.float64)
        whole = dict.fromkeys(range(models), even)
    if sources == 1 or any(isinstance(merge, LinearMerge) for _, merge in made):
        return [whole] * sources, [torch.ones(width, dtype=torch.bool)] * sources
    shares = [whole[k].reshape(width, -1).sum(1) for k in range(models)]
    scales = [s.where(s > 0, 1) for s in shares]
    alone = [whole[k] / (s[:, None] if made else s) for k, s in enumerate(scales)]
    return [{k: m} for k, m in enumerate(alone)], [s > 0 for s in shares]
