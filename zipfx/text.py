"""Text: tables with aligned columns and wrapped cells, many names in few, and progress bars."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
_NUMBER = re.compile(r"(?:^|(?<=[._]))(\d+)(?=\.|$)")


def table(rows: Sequence[tuple[str, ...]], widths: Sequence[int] | None = None) -> list[str]:
    """Rows of text as aligned lines, the first one a header; cells wrapped at `widths`.

    >>> table([("name", "size"), ("conv1", "64")])
    ['name   size', '-----------', 'conv1  64']
    """
    most = widths or [10**6] * len(rows[0])
    cells = [[_wrapped(c, n) for c, n in zip(row, most, strict=True)] for row in rows]
    wide = [max(len(line) for row in cells for line in row[i]) for i in range(len(most))]
    lines = []
    for row in cells:
        for i in range(max(map(len, row))):
            parts = (c[i] if i < len(c) else "" for c in row)
            lines.append("  ".join(p.ljust(w) for p, w in zip(parts, wide, strict=True)).rstrip())
    header = max(map(len, cells[0]))
    return [*lines[:header], "-" * max(map(len, lines[:header])), *lines[header:]]


def _wrapped(cell: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at spaces, else after a dot of a name."""
    lines: list[str] = []
    for line in textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]:
        while len(line) > width:
            cut = line.rfind(".", 0, width) + 1 or width
            lines.append(line[:cut])
            line = line[cut:]
        lines.append(line)
    return lines


def summary(names: Iterable[str], width: int, more: str = " +{}") -> str:
    """Names that differ in numbers only as one, as many as fit into `width`, and how many more.

    >>> summary(["conv1", "layer1.0.conv2", "layer1.1.conv2", "fc"], 24)
    'conv1, layer1.*.conv2 +1'
    """
    patterns = _patterns(names)
    left = sum(count for _, count in patterns)
    shown = text = ""
    for pattern, count in patterns:
        longer = f"{shown}, {pattern}" if shown else pattern
        found = longer + (more.format(left - count) if left > count else "")
        if shown and len(found) > width:
            break
        shown, text, left = longer, found, left - count
    return text


def _patterns(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that are alike but for numbers, with a star where the numbers differ, and how many."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        families.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [(_starred(family), len(family)) for family in families.values()]


def _starred(family: list[str]) -> str:
    columns = zip(*(_NUMBER.findall(name) for name in family), strict=True)
    numbers = iter([column[0] if len(set(column)) == 1 else "*" for column in columns])
    return _NUMBER.sub(lambda _: next(numbers), family[0])


def weighed(
    items: Sequence[T], costs: Sequence[float], desc: str, *, shown: bool = True
) -> Iterator[T]:
    """The items, with a bar that goes on by the cost of each.

    The time left is that which the work so far took, times the work left by the work done: as
    right as the costs are proportional to the time. (A bar of layers of a network, all counted
    alike, says "half" when the wide ones are still to come.)

    Args:
        costs: one for each item, in any unit, not negative.
        shown: whether there is a bar at all.

    >>> list(weighed(["small", "large"], [1, 9], "zipfx: work", shown=False))
    ['small', 'large']
    """
    with tqdm(
        total=sum(costs), desc=desc, disable=not shown, leave=False, smoothing=0, bar_format=_BAR
    ) as bar:
        for item, cost in zip(items, costs, strict=True):
            yield item
            bar.update(cost)
