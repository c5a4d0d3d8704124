"""Values: axes, feature spaces, and the map of all spaces of a model."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zipfx.errors import ZipError


class Role(str, enum.Enum):
    """How a parameter axis belongs to a space: it makes, reads, or accompanies the features."""

    PRODUCES = "produces"
    CONSUMES = "consumes"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True)
class Axis:
    """Where the features of a space lie on one dimension of one parameter.

    index: (size, occurrences) int64; row j lists the indices that carry feature j, in an order
    that is the same for all features (a flatten of C x H x W gives H * W occurrences).
    """

    parameter: str
    dim: int
    role: Role
    index: Tensor


@dataclass(frozen=True)
class Place:
    """A node of the traced graph whose result carries the features of a space.

    index: (size, occurrences) int64, as in `Axis`, along the dimensions `dims` of the result,
    flattened in this order; read: whether a weight (or a head) reads the features here; blurred:
    dimensions along which features of other spaces lie; source: whether the values of the last read
    were made here, before their activation; after: a later node that finishes the value in place.
    """

    node: str
    dims: tuple[int, ...]
    index: Tensor
    read: bool
    blurred: tuple[int, ...] = ()
    source: bool = False
    after: str | None = None


@dataclass(frozen=True)
class Space:
    """A feature space: `size` features that are exchangeable with one another.

    tied: a parameter both makes and reads these features (a tied embedding), so that only
    matchings with one feature of each model in each group keep it exact.
    """

    name: str
    size: int
    axes: tuple[Axis, ...]
    places: tuple[Place, ...] = ()
    tied: bool = False
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pinned:
    """Features that stay where they are: `count` indices of a parameter axis, and the reason."""

    parameter: str
    dim: int
    count: int
    reason: str


@dataclass(frozen=True)
class SpaceMap:
    """All feature spaces of a model, and what is pinned.

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

    def __iter__(self) -> Iterator[Space]:
        return iter(self.spaces)

    def __len__(self) -> int:
        return len(self.spaces)

    def __getitem__(self, name: str) -> Space:
        for space in self.spaces:
            if space.name == name:
                return space
        raise KeyError(name)

    def random_permutations(self, seed: int = 0) -> dict[str, Tensor]:
        """One random permutation (size,) int64 for every space, from a generator of its own."""
        generator = torch.Generator().manual_seed(seed)
        return {s.name: torch.randperm(s.size, generator=generator) for s in self.spaces}

    def permuted(self, model: nn.Module, permutations: Mapping[str, Tensor]) -> nn.Module:
        """A copy of `model` whose features are reordered; it computes the same function.

        Feature j of a space moves from position permutations[name][j] to position j. The model
        passed in is left unchanged.
        """
        twin = copy.deepcopy(model)
        tensors: dict[str, Tensor] = dict(twin.named_parameters(remove_duplicate=False))
        tensors.update(twin.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, order in permutations.items():
                permute_axes(tensors, self[name], order)
        return twin

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("space", "size", "produced by", "consumed by", "elementwise")
        ]
        for s in self.spaces:
            by = {r: [a.parameter for a in s.axes if a.role == r] for r in Role}
            rows.append((s.name, str(s.size), *(_short(by[r]) for r in Role)))
        lines = table(rows)
        if self.pinned:
            lines += [
                "",
                *table(
                    [
                        ("pinned", "dim", "features", "why"),
                        *((p.parameter, str(p.dim), str(p.count), p.reason) for p in self.pinned),
                    ]
                ),
            ]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


def permute_axes(tensors: Mapping[str, Tensor], space: Space, order: Tensor) -> None:
    """Move feature order[j] of a space to position j on all its axes, in place."""
    if sorted(order.tolist()) != list(range(space.size)):
        raise ZipError(
            f"space {space.name!r} has {space.size} features; the permutation given for it is no "
            f"permutation of 0..{space.size - 1} (shape {tuple(order.shape)})"
        )
    for axis in space.axes:
        t = tensors[axis.parameter]
        source = torch.arange(t.shape[axis.dim])
        source[axis.index.flatten()] = axis.index[order].flatten()
        t.copy_(t.index_select(axis.dim, source.to(t.device)))


def select(x: Tensor, dims: tuple[int, ...], index: Tensor) -> Tensor:
    """`index_select` along several dimensions taken as one, flattened in this order."""
    last = tuple(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    picked = moved.flatten(-len(dims)).index_select(-1, index)
    return picked.reshape(moved.shape).movedim(last, dims)


def _short(names: list[str], most: int = 3) -> str:
    more = f" +{len(names) - most}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of text as aligned lines, the first one a header."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
