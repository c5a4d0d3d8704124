"""Values: axes, places, blocks and feature spaces."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from zipfx.analysis.labels.inside import Address
from zipfx.values import ByValue


class Role(str, enum.Enum):
    """How a parameter axis belongs to a space: it makes, reads, or accompanies the features."""

    PRODUCES = "produces"
    CONSUMES = "consumes"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, eq=False)
class Axis(ByValue):
    """Where the features of a space lie on one dimension of one parameter.

    index: (size, occurrences) int64; row j lists the indices that carry feature j, in an order
    that is the same for all features (a flatten of C x H x W gives H * W occurrences).

    A grouped convolution reads other features with every part of its rows. There, with `by` the
    dimension of the rows and `parts` their number, the index part * (length of dim) + i stands for
    index i in that part of the rows. implied: nothing
    to do, as the features lie on `dim` as a whole too.
    """

    parameter: str
    dim: int
    role: Role
    index: Tensor
    by: int = -1
    parts: int = 1
    implied: bool = False


@dataclass(frozen=True, eq=False)
class Place(ByValue):
    """A node of the traced graph whose result carries the features of a space, or an address
    (`inner`) inside a node at which they are met.

    index: (size, occurrences) int64, as in `Axis`, along the dimensions `dims` of the result,
    flattened in this order; read: whether a weight (or a head) reads the features here; blurred:
    dimensions along which features of other spaces lie; source: whether the values of the last read
    were made here, before their activation; own: of a space of blocks: whether the
    values are those of the blocks themselves (attention scores), not those of the features inside;
    mixed: whether the occurrences are features of another space, in any order (what all heads scale
    alike), or only some of another lie here; sizes: of the result along `dims`, on the example
    inputs; inner: an address inside the node; after: a later node that finishes the value in place;
    also: (dims, index) of where else in the value they lie (the rows and the columns of a matrix);
    chosen: whether its rows are others in every model (sent there by what the model has computed),
    so that features can not be compared here.
    """

    node: str
    dims: tuple[int, ...]
    index: Tensor
    read: bool
    blurred: tuple[int, ...] = ()
    source: bool = False
    own: bool = True
    mixed: bool = False
    sizes: tuple[int, ...] = ()
    inner: Address | None = None
    after: str | None = None
    also: tuple[tuple[tuple[int, ...], Tensor], ...] = ()
    chosen: bool = False


@dataclass(frozen=True, eq=False)
class Block(ByValue):
    """The blocks of the space named `space`: row i of index (blocks, n) int64 lists the features
    that move with block i, in an order that is the same for all blocks."""

    space: str
    index: Tensor


@dataclass(frozen=True, eq=False)
class Space(ByValue):
    """A feature space: `size` features that are exchangeable with one another.

    blocks: sizes of the runs of features inside which they may be exchanged (the heads of an
    attention layer, the groups of a convolution); () for no limit. within: the spaces of those
    blocks, outermost first. of_blocks: the features are such blocks, matched one to one. tied: a
    parameter both makes and reads these features (a tied embedding), or they are multiplied with
    one another and summed (queries and keys), so that only matchings with one feature of each model
    in each group keep it exact.
    """

    name: str
    size: int
    axes: tuple[Axis, ...]
    places: tuple[Place, ...] = ()
    tied: bool = False
    blocks: tuple[int, ...] = ()
    within: tuple[Block, ...] = ()
    of_blocks: bool = False


@dataclass(frozen=True)
class Pinned:
    """Features that stay where they are: `count` indices of a parameter axis, and the reason."""

    parameter: str
    dim: int
    count: int
    reason: str


@dataclass(frozen=True)
class NodeInfo:
    """A node of the traced graph through which data runs.

    label: what it does, such as "Conv2d layer1.0.conv1" or "add"; module: qualified name of the
    innermost module it lies in ("": the model itself); inputs: names of the nodes it reads.
    """

    name: str
    label: str
    module: str
    inputs: tuple[str, ...]
