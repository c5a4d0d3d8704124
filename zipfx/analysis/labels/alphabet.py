"""Alphabet: the labels that there are, in the order they are handed out.

Labels of a parameter's axis are consecutive numbers, so that they lead back to it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zipfx.analysis.labels.labels import Kind, Labels, place
from zipfx.analysis.labels.records import AxisLabels


@dataclass
class Alphabet:
    """Labels 1 to size - 1; those of parameters by their axes, the others are blocks.

    >>> alphabet = Alphabet()
    >>> alphabet.parameter("weight", torch.zeros(2, 3)).features
    (tensor([[1],
            [2]]), tensor([[3, 4, 5]]))
    >>> alphabet.axis(torch.tensor([4, 0])).dim
    1
    """

    axes: list[AxisLabels] = field(default_factory=list)
    size: int = 1  # label 0 is "none"
    _parted: dict[int, AxisLabels] = field(default_factory=dict)

    def fresh(self, n: int) -> Tensor:
        """The next n labels."""
        self.size += n
        return torch.arange(self.size - n, self.size)

    def parameter(self, name: str, t: Tensor) -> Labels:
        """Allocate labels for every axis of a parameter or float buffer."""
        slots = []
        for d, n in enumerate(t.shape):
            if n > 1:
                self.axes.append(AxisLabels(name, d, self.size, n))
                slots.append(place(self.fresh(n), {0: d}, t.ndim))
        return Labels(tuple(t.shape), tuple(slots), kind=Kind.WEIGHT)

    def axis(self, slot: Tensor) -> AxisLabels | None:
        """The axis that all labels of a slot come from."""
        ids = slot[slot > 0]
        if not len(ids):
            return None
        low, high = int(ids.min()), int(ids.max())
        at = bisect.bisect_right(self.axes, low, key=lambda axis: axis.start) - 1
        axis = self.axes[at] if at >= 0 else None
        return axis if axis is not None and high < axis.stop and axis.by < 0 else None

    def in_parts(self, axis: AxisLabels, by: int, parts: int) -> AxisLabels:
        """The labels that an axis has for each part of the rows alone; an axis that was divided
        before stays as it was."""
        if axis.start not in self._parted:
            own = replace(axis, start=self.size, by=by, parts=parts, base=axis.start)
            self.axes.append(own)
            self.fresh(parts * axis.size)
            self._parted[axis.start] = own
        return self._parted[axis.start]
