"""Likeness: weights whose first uses are alike, such as a gate and a value, or a query and a key.

How the first use looks does not tell which of them corresponds to which; what becomes of the
results does, and so may their names.  A model is numbered again, with other ranks for such weights,
until as much as possible of what the first model computes is computed in it as well.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from zipfx.trace.align.numbering import Numbers, Ranks, Use, number

_MOST = 4  # weights of one kind whose orders are tried, all of them
_RUNS = 60  # of a graph


def likened(
    first: fx.GraphModule,
    ours: Numbers,
    other: fx.GraphModule,
    inputs: Sequence[Any],
    last: int,
) -> Numbers:
    """The numbers of a model, with the ranks that make it most alike to the first one up to node
    `last` of that; where several do, weights of equal names correspond."""
    plain = number(other, inputs)
    if not _several(ours) and not _several(plain):
        return plain
    work = _Search(first, ours, other, inputs, last)
    best = plain
    named = _by_name(ours, {use.name for use in plain.uses})
    if _disagrees(plain, named):
        by_name = number(other, inputs, ranks=named)
        best = max(by_name, plain, key=work.score)  # the former if both are as good
    return work.improved(best, named if best is not plain else {})


def ambiguous(module: fx.GraphModule, numbers: Numbers) -> set[int]:
    """The nodes that depend on weights of like first use: which is which can only be told from what
    is computed."""
    kinds = _several(numbers)
    found = {use.node for use in numbers.uses if use.kind in kinds}
    at: dict[fx.Node, int] = {}
    for i, node in enumerate(module.graph.nodes):
        at[node] = i
        if any(at[source] in found for source in node.all_input_nodes):
            found.add(i)
    return found


def _several(numbers: Numbers) -> set[int]:
    """The kinds of first use that more than one weight has."""
    counts = Counter(use.kind for use in numbers.uses)
    return {kind for kind, count in counts.items() if count > 1}


def _by_name(ours: Numbers, names: set[str]) -> Ranks:
    """The ranks of the first model, for weights that the other one has under the same name."""
    kinds = _several(ours)
    ranks: dict[int, dict[Any, int]] = {}
    for use in ours.uses:
        if use.kind in kinds and use.name in names:
            ranks.setdefault(use.kind, {})[use.part] = use.rank
    return ranks


def _disagrees(numbers: Numbers, ranks: Ranks) -> bool:
    return any(ranks.get(use.kind, {}).get(use.part, use.rank) != use.rank for use in numbers.uses)


class _Search:
    """Looks for better ranks, one kind after the other."""

    def __init__(
        self,
        first: fx.GraphModule,
        ours: Numbers,
        other: fx.GraphModule,
        inputs: Sequence[Any],
        last: int,
    ) -> None:
        self.other, self.inputs = other, inputs
        self.doubtful = {i for i in ambiguous(first, ours) if i <= last}
        self.values = ours.gives[: last + 1]
        self.left = _RUNS

    def score(self, found: Numbers) -> int:
        """How many values of the first model's trunk a model has."""
        known = set(found.gives)
        return sum(value in known for value in self.values)

    def improved(self, best: Numbers, ranks: Ranks) -> Numbers:
        done: set[int] = set()
        moved: dict[int, tuple[int, ...]] = {}  # by size of a kind, the order that was right last
        while (members := self._next(best, done)) is not None:
            done.add(members[0].kind)
            known = self.score(best)
            for order in self._orders(members, moved):
                self.left -= 1
                chosen = {m.part: members[i].rank for m, i in zip(members, order, strict=True)}
                tried: Mapping[int, Any] = {**ranks, members[0].kind: chosen}
                found = number(self.other, self.inputs, ranks=tried)
                if (score := self.score(found)) > known:
                    best, ranks, known = found, tried, score
                    if moved.get(len(members)) == order:
                        break
                    moved[len(members)] = order
        return best

    def _next(self, best: Numbers, done: set[int]) -> list[Use] | None:
        """The weights of the next kind, if something of the trunk is still unknown."""
        known = set(best.gives)
        if self.left <= 0 or all(self.values[i] in known for i in self.doubtful):
            return None
        kinds = _several(best) - done
        uses = [use for use in best.uses if use.kind in kinds]
        if not uses:
            return None
        return [use for use in uses if use.kind == uses[0].kind]

    def _orders(
        self, members: Sequence[Use], moved: Mapping[int, tuple[int, ...]]
    ) -> Iterator[tuple[int, ...]]:
        count = len(members)
        if count > _MOST:
            return
        orders = list(itertools.permutations(range(count)))[1:]
        yield from sorted(orders, key=lambda order: order != moved.get(count))
