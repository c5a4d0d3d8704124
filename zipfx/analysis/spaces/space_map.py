"""Values: axes, feature spaces, and the map of all spaces of a model."""

from __future__ import annotations

import copy
import difflib
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from zipfx.analysis.labels.inside import Address
from zipfx.checks import module, whole
from zipfx.errors import UnknownNameError, ZipError
from zipfx.modes import own_modes
from zipfx.text import summary, table
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


@dataclass(frozen=True, eq=False)
class SpaceMap(ByValue):
    """All feature spaces of a model, and what is pinned.

    A collection of spaces that is looked up by name: `spaces["layer1.0.conv1"]`, `"0" in spaces`.
    There is no `spaces[0]`, since names are often numbers: the first space is `spaces.spaces[0]`.
    Two maps are equal if all in them is, tensors by value; so are spaces, axes and places.

    >>> import torch, zipfx
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> spaces = zipfx.analyze(net, torch.randn(4, 3))
    >>> [(space.name, space.size) for space in spaces]
    [('0', 8)]
    >>> [(axis.parameter, axis.dim, axis.role.value) for axis in spaces["0"].axes]
    [('0.weight', 0, 'produces'), ('0.bias', 0, 'elementwise'), ('2.weight', 1, 'consumes')]
    """

    spaces: tuple[Space, ...]
    pinned: tuple[Pinned, ...]
    notes: tuple[str, ...] = ()
    variances: frozenset[str] = field(default=frozenset(), repr=False)
    nodes: tuple[NodeInfo, ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Space]:
        return iter(self.spaces)

    def __len__(self) -> int:
        return len(self.spaces)

    def __contains__(self, item: object) -> bool:
        """Whether there is a space of this name, or one equal to this space."""
        if isinstance(item, Space):
            return any(space == item for space in self.spaces)
        return isinstance(item, str) and any(space.name == item for space in self.spaces)

    def __getitem__(self, name: str) -> Space:
        """The space of this name.

        Raises:
            UnknownNameError: a `ZipError`, and a `KeyError`: there is none; the nearest are named.
        """
        for space in self.spaces:
            if space.name == name:
                return space
        known = [space.name for space in self.spaces]
        if not isinstance(name, str):
            raise UnknownNameError(
                f"spaces are looked up by their names, such as {known[:3]}, and {name!r} is a "
                f"{type(name).__name__}; by position: .spaces[i]"
            )
        alike = {n: difflib.SequenceMatcher(None, n, name).ratio() for n in known}
        near = sorted(known, key=lambda n: -alike[n])[:3]
        nearest = f"the nearest names are {near}" if near else "there are none at all"
        raise UnknownNameError(f"there is no space {name!r}; {nearest}")

    @own_modes()
    def random_permutations(self, seed: int = 0) -> dict[str, Tensor]:
        """One random permutation (size,) int64 for every space, from a generator of its own.

        Features of a space with blocks stay inside their block; the blocks themselves are another
        space.
        """
        generator = torch.Generator().manual_seed(whole("seed", seed) % 2**64)
        found = {}
        for s in self.spaces:
            parts = [torch.randperm(n, generator=generator) for n in s.blocks or (s.size,)]
            starts = [sum(s.blocks[:i]) for i in range(len(parts))]
            found[s.name] = torch.cat([p + at for p, at in zip(parts, starts, strict=True)])
        return found

    @own_modes()
    def permuted(self, model: nn.Module, permutations: Mapping[str, Tensor]) -> nn.Module:
        """A copy of `model` whose features are reordered; it computes the same function.

        Feature j of a space moves from position permutations[name][j] to position j. The model
        passed in is left unchanged.

        Raises:
            ZipError: there is no such space, an order is no permutation of its features (or leads
                out of their blocks), or the model is not like the one that was analysed.
        """
        if not isinstance(permutations, Mapping):
            raise ZipError(
                f"permutations are a {type(permutations).__name__}: give a dict of an order for "
                "each space, such as spaces.random_permutations(0)"
            )
        twin = copy.deepcopy(module("the model", model))
        tensors: dict[str, Tensor] = dict(twin.named_parameters(remove_duplicate=False))
        tensors.update(twin.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            moves = axis_moves([self[name] for name in permutations], permutations)
            for name, mine in moves.items():
                if name not in tensors:
                    raise ZipError(
                        f"the model has no parameter {name!r}: give the one that was analysed, or "
                        "one of its architecture"
                    )
                tensors[name].copy_(moved(tensors[name], mine))
        return twin

    @own_modes()
    def draw(self, path: str | Path) -> None:
        """Write a picture of the traced graph, coloured by feature space: .svg, .png or .pdf.

        A box has the colours of the spaces that its result carries, grey where it carries none
        (pinned, or no features); an arrow has the colour of what it hands on. Nodes that look at
        shapes only, or compute weights, are left out. Drawn by graphviz where its Python package
        and its program `dot` are installed, else by matplotlib.

        Raises:
            ZipError: another ending, neither is installed, or the map has no nodes.
        """
        from zipfx.analysis.spaces.picture import Box, draw  # needed by nothing else

        if not self.nodes:
            raise ZipError("this map knows no graph: draw a map that zipfx.analyze has made")
        carried: dict[str, list[int]] = {}
        for i, space in enumerate(self.spaces):
            for place in space.places:
                carried.setdefault(place.node, []).append(i)
        boxes = [Box(n.name, n.label, n.inputs, tuple(carried.get(n.name, ()))) for n in self.nodes]
        wide = max((len(s.name) for s in self.spaces), default=0)
        legend = [f"{s.name:{wide}} {s.size:5} {block_text(s.blocks)}" for s in self.spaces]
        draw(path, boxes, [text.rstrip() for text in legend])

    def __str__(self) -> str:
        lines = [*_space_lines(self.spaces), ""] if self.spaces else []
        if self.pinned:
            lines += [*pinned_lines(self.pinned), ""]
        lines.append(self._totals())
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def _totals(self) -> str:
        free = {(a.parameter, a.dim) for s in self.spaces for a in s.axes}
        still = {(p.parameter, p.dim) for p in self.pinned}
        fixed, part, axes = len(still - free), len(still & free), len(still | free)
        share = f"{fixed / max(1, axes):.0%}"
        return (
            f"{len(self.spaces)} spaces, {sum(s.size for s in self.spaces):,} features; "
            f"{fixed} of {axes} parameter axes ({share}) pinned as a whole, {part} in part"
        )


#: the axes of one parameter that are permuted together, each with the new order of its features
Moves = list[list[tuple[Axis, Tensor]]]


def axis_moves(spaces: Sequence[Space], orders: Mapping[str, Tensor]) -> dict[str, Moves]:
    """What moves on each parameter when feature orders[name][j] of each space goes to position j;
    rows before what lies in their parts."""
    for space in spaces:
        _check_order(space, orders[space.name])
    found: dict[str, dict[tuple[int, int], list[tuple[Axis, Tensor]]]] = {}
    for space in spaces:
        for axis in space.axes:
            if not axis.implied:
                mine = found.setdefault(axis.parameter, {}).setdefault((axis.parts, axis.dim), [])
                mine.append((axis, orders[space.name]))
    return {name: [mine[key] for key in sorted(mine)] for name, mine in found.items()}


def moved(t: Tensor, moves: Moves) -> Tensor:
    """A parameter with its features in their new order."""
    for together in moves:
        dim, by, parts = together[0][0].dim, together[0][0].by, together[0][0].parts
        source = torch.arange(t.shape[dim] * parts)
        for axis, order in together:
            step = torch.arange(len(source))
            step[axis.index.flatten()] = axis.index[order].flatten()
            source = source[step]
        if by < 0:
            t = t.index_select(dim, source.to(t.device))
        else:
            t = t.gather(dim, by_rows(source % t.shape[dim], dim, by, parts, t.shape).to(t.device))
    return t


def _check_order(space: Space, order: object) -> None:
    if not isinstance(order, Tensor) or order.ndim != 1 or order.dtype != torch.int64:
        raise ZipError(
            f"the order of space {space.name!r} is a {type(order).__name__}: it must be a tensor "
            f"({space.size},) of int64"
        )
    if sorted(order.tolist()) != list(range(space.size)):
        raise ZipError(
            f"space {space.name!r} has {space.size} features; the permutation given for it is no "
            f"permutation of 0..{space.size - 1} (shape {tuple(order.shape)})"
        )
    if space.blocks:
        block = torch.arange(len(space.blocks)).repeat_interleave(torch.tensor(space.blocks))
        if not torch.equal(block[order], block):
            raise ZipError(
                f"space {space.name!r} has blocks of {space.blocks} features; the permutation "
                "given for it moves features from one block to another (whole blocks are a space "
                f"of their own: {[b.space for b in space.within]})"
            )


def by_rows(values: Tensor, dim: int, by: int, parts: int, shape: Sequence[int]) -> Tensor:
    """One value (parts * length,) for every index of `dim` in every part of the rows (dimension
    `by`), expanded to the shape of the parameter."""
    found = values.reshape(parts, shape[dim]).repeat_interleave(shape[by] // parts, 0)
    found = found if by < dim else found.T
    return found.reshape([n if d in (by, dim) else 1 for d, n in enumerate(shape)]).expand(
        tuple(shape)
    )


# these are part of merges, so they are written in what of Python torch.jit.script knows
def select(x: Tensor, dims: list[int], index: Tensor) -> Tensor:
    """`index_select` along several dimensions taken as one, flattened in this order."""
    last = list(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    found = moved.flatten(-len(dims)).index_select(-1, index)
    return found.reshape(moved.shape).movedim(last, dims)


def mix(x: Tensor, dims: list[int], matrix: Tensor) -> Tensor:
    """Multiply by a matrix (n, d) along several dimensions taken as one, flattened in this order.

    >>> mix(torch.tensor([[1.0, 2.0]]), [1], torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    tensor([[2., 3.]])
    """
    last = list(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    found = moved.flatten(-len(dims)) @ matrix.to(x.dtype).T
    return found.reshape(moved.shape).movedim(last, dims)


# ------------------------------------------------------------------ as text
WIDTH = 110


def block_text(blocks: tuple[int, ...]) -> str:
    """Sizes of blocks, in short.

    >>> block_text((32, 32, 32)), block_text((8, 16)), block_text(())
    ('3 x 32', '8 + 16', '')
    """
    if len(set(blocks)) > 1:
        many = f"{len(blocks)} of {min(blocks)} to {max(blocks)}"
        return " + ".join(map(str, blocks)) if len(blocks) < 4 else many
    return f"{len(blocks)} x {blocks[0]}" if blocks else ""


def _space_lines(spaces: tuple[Space, ...]) -> list[str]:
    """One row per space; parameters are named by their modules."""
    last = 3 if any(s.blocks for s in spaces) else 2
    named = ((s.name, str(s.size), block_text(s.blocks))[:last] for s in spaces)
    start: list[tuple[str, ...]] = [("space", "size", "blocks")[:last], *named]
    widths = [min(34, max(len(r[i]) for r in start)) for i in range(len(start[0]))]
    each = (WIDTH - sum(widths) - 2 * (len(widths) + 2)) // 3
    rows: list[tuple[str, ...]] = [(*start[0], "produced by", "consumed by", "elementwise")]
    for row, s in zip(start[1:], spaces, strict=True):
        by = ([_owner(a.parameter) for a in s.axes if a.role == r] for r in Role)
        rows.append((*row, *(summary(names, each) for names in by)))
    return table(rows, [*widths, each, each, each])


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def pinned_lines(pinned: tuple[Pinned, ...]) -> list[str]:
    """What is pinned as a table, one row per reason."""
    reasons: dict[str, list[Pinned]] = {}
    for p in pinned:
        reasons.setdefault(p.reason, []).append(p)
    rows = [("pinned", "axes", "indices", "why")]
    for reason, axes in reasons.items():
        names = summary((f"{p.parameter} dim {p.dim}" for p in axes), 70, " (+{} more)")
        rows.append((names, str(len(axes)), str(sum(p.count for p in axes)), reason))
    return table(rows, [40, 6, 8, WIDTH - 40 - 6 - 8 - 6])
