"""Records: what the constraint store writes down, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from zipfx.hashing import Hashes, Ints


@dataclass(frozen=True)
class Edge:
    """Labels a[i] and b[i] are one feature (node: where it was seen)."""

    a: Ints
    b: Ints
    node: int
    weights_only: bool


@dataclass(frozen=True)
class Colour:
    """Feature a[i] was seen with the coordinate value[i]; reason: only where an op pins it."""

    a: Ints
    value: Hashes
    node: int
    reason: str


@dataclass(frozen=True)
class Member:
    """Feature a[i] belongs to block b[i], in a way of its own (role[i]).

    A block is whatever can only be exchanged as a whole: the features of an attention head, of a
    convolution group, of a norm group. It is a label like any other.
    """

    a: Ints
    b: Ints
    role: Hashes
    node: int


@dataclass(frozen=True)
class Contraction:
    """A weight read features: label w[i] met the data labels x[i] (0: none) and was summed.

    x: one row per slot of the data; where there are several, they tell a feature only together.
    """

    w: Ints
    x: tuple[Ints, ...]
    node: int


@dataclass(frozen=True)
class AxisLabels:
    """Labels start, start + 1, ... are the indices of one dimension of one parameter.

    by: where every part of the rows (one of `parts` equal parts of dimension `by`) has features of
    its own along `dim`, as a grouped convolution has: then there are parts x size labels. base: the
    first label of the same dimension as a whole.
    """

    name: str
    dim: int
    start: int
    size: int
    by: int = -1
    parts: int = 1
    base: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.parts * self.size
