"""Records: what the constraint store writes down, as frozen values in lists that only grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from zipfx.hashing import Hashes, Ints, hash64


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


@dataclass
class Records:
    """Everything learned so far; every record names the graph node (by index) that taught it.

    node, where: the node that is being run, and what messages call it; produced, bilinear, alive:
    labels that a weight makes, that two activations are multiplied along, that reach data; blocks:
    labels that keep their order in a block, and why; variances: names of parameters that norms read
    as variances; traits: of each node, see `trait`.
    """

    node: int = 0
    where: str = ""
    edges: list[Edge] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    produced: list[tuple[Ints, int]] = field(default_factory=list)
    bilinear: list[tuple[Ints, int]] = field(default_factory=list)
    blocks: list[tuple[Ints, int, str]] = field(default_factory=list)
    variances: set[tuple[str, int]] = field(default_factory=set)
    alive: list[tuple[Ints, int]] = field(default_factory=list)
    traits: dict[int, set[str]] = field(default_factory=dict)

    def make(self, slots: Iterable[Tensor]) -> None:
        """The current node makes these features with weights."""
        self.produced.extend((slot.reshape(-1).numpy(), self.node) for slot in slots)

    def trait(self, name: str) -> None:
        """Say of the current node: 'elementwise' (a weight met features one to one), 'mixes'."""
        self.traits.setdefault(self.node, set()).add(name)

    def same(self, a: Ints, b: Ints, *, weights_only: bool = False) -> None:
        """Labels a[i] and b[i] are one feature."""
        self.edges.append(Edge(a, b, self.node, weights_only))

    def belongs(self, a: Ints, b: Ints, way: Hashes) -> None:
        """Features a[i] belong to the blocks b[i]; no other record has these ways."""
        salt = hash64(len(self.members) + 3)
        self.members.append(Member(a, b, hash64((way ^ salt).view(np.int64)), self.node))

    def colour(self, features: Tensor, values: Hashes | Tensor, reason: str = "") -> None:
        """Give feature labels (0: skip) the coordinate `values` (0: none), of the same shape."""
        a = features.reshape(-1).numpy()
        v = values.reshape(-1).numpy() if isinstance(values, Tensor) else values.reshape(-1)
        keep = (a > 0) & (v != 0)
        if keep.any():
            # hashed twice: salts must not be hashes of small numbers, as coordinates are
            salt = hash64(hash64(len(self.colours)).view(np.int64)).view(np.int64)
            hashed = hash64(hash64(v[keep]).view(np.int64) ^ salt)
            self.colours.append(Colour(a[keep], hashed, self.node, reason))
