"""Space map: all feature spaces of a model, as tables and in a picture."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from zipfx.analysis.spaces.reorder import axis_moves, moved
from zipfx.analysis.spaces.values import NodeInfo, Pinned, Role, Space
from zipfx.checks import module, whole
from zipfx.errors import UnknownNameError, ZipError
from zipfx.model.running import renewed
from zipfx.modes import own_modes
from zipfx.text import summary, table
from zipfx.values import ByValue


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
            return renewed(twin)

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
        from zipfx.analysis.spaces.layout import Box
        from zipfx.analysis.spaces.picture import draw

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
