"""Draw a directed graph of coloured boxes, top down: with graphviz if it is there, else matplotlib.

The layout for matplotlib is the layered one of Sugiyama, Tagawa and Toda (1981): ranks by longest
path, edges that span several ranks led through them, barycentre sweeps. Lengths are in inches.
"""

from __future__ import annotations

import colorsys
import html
import importlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zipfx.errors import ZipError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FORMATS = (".svg", ".png", ".pdf")
GREY = ("#ececec", "#a0a0a0")
PITCH, HEIGHT, GAP, LETTER, FONT = 0.44, 0.24, 0.22, 0.063, 7.5
PIXELS = 30_000  # most along one side of a picture


@dataclass(frozen=True)
class Box:
    """A node: its text, the names of the boxes it reads, and the numbers of its colours."""

    name: str
    label: str
    inputs: tuple[str, ...]
    colours: tuple[int, ...] = ()


def draw(path: str | Path, boxes: Sequence[Box], legend: Sequence[str]) -> None:
    """Write a picture of the boxes, in topological order; legend[i] is what colour i means."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ZipError(
            f"{path.name!r}: the format is told by the ending, which is one of {', '.join(FORMATS)}"
        )
    graphviz = _module("graphviz")
    if graphviz is not None and shutil.which("dot"):
        return _with_graphviz(graphviz, path, boxes, legend)
    if _module("matplotlib") is None:
        raise ZipError(
            "drawing needs matplotlib (pip install matplotlib), or both the Python package "
            "graphviz (pip install graphviz) and the program dot (apt install graphviz)"
        )
    return _with_matplotlib(path, boxes, legend)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def palette(n: int) -> list[tuple[str, str]]:
    """For each of n colours: one to fill boxes with, under black text, and one for lines.

    >>> palette(2)[0]
    ('#eb8c8c', '#a51212')
    """
    colours = []
    for i in range(n):
        hue, light = i * 0.618034 % 1, (0.735, 0.84, 0.65)[i % 3]
        pair = (colorsys.hls_to_rgb(hue, v, s) for v, s in ((light, 0.7), (0.36, 0.8)))
        colours.append(tuple("#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in pair))
    return [(fill, line) for fill, line in colours]


# ------------------------------------------------------------------ layout
@dataclass(frozen=True)
class Layout:
    """Where points lie: the boxes, then the bends of edges that pass through ranks.

    x, y: (points,) inches, y downwards; width: (boxes,); lines: (lines, 2) the points that each
    line joins; source: (lines,) the box whose value it carries; ends: lines that end at a box.
    """

    x: Floats
    y: Floats
    width: Floats
    lines: Ints
    source: Ints
    ends: npt.NDArray[np.bool_]


def ranks(inputs: Sequence[Sequence[int]]) -> Ints:
    """The longest path from any box without inputs; those lie just above their first reader."""
    rank = np.zeros(len(inputs), np.int64)
    first = np.full(len(inputs), len(inputs), np.int64)
    for i, read in enumerate(inputs):
        rank[i] = max((rank[j] + 1 for j in read), default=0)
        for j in read:
            first[j] = min(first[j], rank[i])
    for i, read in enumerate(inputs):
        if not read and first[i] < len(inputs):
            rank[i] = first[i] - 1
    return rank


def layout(boxes: Sequence[Box], sweeps: int = 24) -> Layout:
    """Place the boxes; all edges that leave one box share their bends."""
    at = {box.name: i for i, box in enumerate(boxes)}
    inputs = [sorted({at[name] for name in box.inputs}) for box in boxes]
    rank = ranks(inputs).tolist()
    width = np.array([LETTER * len(box.label) + 0.16 for box in boxes])
    bends: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], int] = {}
    for v, read in enumerate(inputs):
        for u in read:
            before = u
            for r in range(rank[u] + 1, rank[v]):
                bend = bends.setdefault((u, r), len(boxes) + len(bends))
                lines[before, bend] = u
                before = bend
            lines[before, v] = u
    level = np.array([*rank, *(r for _, r in bends)], np.int64)
    wide = np.concatenate([width, np.full(len(bends), 0.06)])
    joined = np.array(list(lines), np.int64).reshape(-1, 2)
    x = _sweep(level, wide, joined, sweeps)
    source = np.array(list(lines.values()), np.int64)
    return Layout(
        x, PITCH * level.astype(np.float64), width, joined, source, joined[:, 1] < len(boxes)
    )


def _sweep(level: Ints, width: Floats, lines: Ints, sweeps: int) -> Floats:
    """Down and up, each point goes to the mean of its neighbours; in the end to that of all."""
    n = int(level.max(initial=-1)) + 1
    points = [np.flatnonzero(level == r) for r in range(n)]
    upper, lower = lines[:, 0], lines[:, 1]
    x = np.zeros(len(level))
    for here in points:
        x[here] = _apart(np.zeros(len(here)), width[here])
    for sweep in range(2 * sweeps):
        final, down = sweep >= sweeps, sweep % 2 == 0
        for r in range(n) if down else reversed(range(n)):
            here = points[r]
            wanted, count = x[here] * 1e-3, np.full(len(here), 1e-3)
            for ours, theirs, used in ((lower, upper, down), (upper, lower, not down)):
                if used or final:
                    mine = np.flatnonzero(level[ours] == r)
                    local = np.searchsorted(here, ours[mine])
                    np.add.at(wanted, local, x[theirs[mine]])
                    np.add.at(count, local, 1.0)
            wanted /= count
            order = np.argsort(x[here] if final else wanted, kind="stable")
            x[here[order]] = _apart(wanted[order], width[here[order]])
    moved: Floats = x - x.min(initial=0.0)
    return moved


def _apart(wanted: Floats, width: Floats) -> Floats:
    """The nearest places in this order that do not overlap (mean of two monotone bounds)."""
    offset = np.cumsum(width + GAP) - width / 2
    slack = wanted - offset
    below = np.maximum.accumulate(slack)
    above = np.minimum.accumulate(slack[::-1])[::-1]
    placed: Floats = (below + above) / 2 + offset
    return placed


# ------------------------------------------------------------------ matplotlib
def _with_matplotlib(path: Path, boxes: Sequence[Box], legend: Sequence[str]) -> None:
    import matplotlib as mpl
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.patches import Patch

    placed, colours = layout(boxes), palette(len(legend))
    n = len(boxes)
    x, y, half = placed.x[:n], placed.y[:n], placed.width / 2
    left, right = float((x - half).min()) - 0.1, float(max((x + half).max(), placed.x.max())) + 0.1
    top, bottom = -HEIGHT, float(y.max()) + HEIGHT
    figure = Figure(figsize=(right - left, bottom - top))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.axis("off")
    own = [[colours[c] for c in box.colours] or [GREY] for box in boxes]
    line_colours = [own[i][0][1] for i in placed.source]
    axes.add_collection(LineCollection(list(_curves(placed)), colors=line_colours, linewidths=1.1))
    tips = placed.lines[placed.ends, 1]
    axes.add_collection(
        PolyCollection(
            list(_triangles(placed.x[tips], placed.y[tips] - HEIGHT / 2)),
            facecolors=[c for c, end in zip(line_colours, placed.ends, strict=True) if end],
        )
    )
    stripes = [(i, j, len(own[i]), fill) for i in range(n) for j, (fill, _) in enumerate(own[i])]
    rows, nth, many = (np.array(column) for column in list(zip(*stripes, strict=True))[:3])
    start, step = x[rows] - half[rows] + nth * placed.width[rows] / many, placed.width[rows] / many
    axes.add_collection(
        PolyCollection(
            list(_bars(start, step, y[rows])), facecolors=[s[3] for s in stripes], zorder=2
        )
    )
    outlines = list(_bars(x - half, placed.width, y))
    axes.add_collection(
        PolyCollection(outlines, facecolors="none", edgecolors="#404040", linewidths=0.6, zorder=3)
    )
    text: dict[str, Any] = {"family": "monospace", "size": FONT}
    for box, a, b in zip(boxes, x, y, strict=True):
        axes.text(a, b, box.label, ha="center", va="center", zorder=4, **text)
    patches = [Patch(facecolor=fill, edgecolor="#404040", linewidth=0.6) for fill, _ in colours]
    axes.legend(
        [*patches, Patch(facecolor=GREY[0], edgecolor="#404040", linewidth=0.6)],
        [*legend, NOTHING],
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.5, prop=text,
    )  # fmt: skip
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zipfx"}):  # text stays text
        figure.savefig(
            path,
            format=path.suffix[1:].lower(),
            dpi=min(110.0, PIXELS / max(figure.get_size_inches())),
            bbox_inches="tight",
            metadata={"Date": None} if path.suffix.lower() == ".svg" else None,
        )


NOTHING = "no space"


def _curves(placed: Layout, steps: int = 17) -> Floats:
    """(lines, steps, 2): from the bottom of one point to the top of the other, upright at both."""
    a, b = placed.lines.T
    box = np.where(np.arange(len(placed.x)) < len(placed.width), HEIGHT / 2, 0.0)
    t = np.linspace(0, 1, steps)
    ease = t * t * (3 - 2 * t)
    y0, y1 = placed.y[a] + box[a], placed.y[b] - box[b]
    x0, x1 = placed.x[a], placed.x[b]
    return np.stack([x0[:, None] + np.outer(x1 - x0, ease), y0[:, None] + np.outer(y1 - y0, t)], -1)


def _triangles(x: Floats, y: Floats, size: float = 0.07) -> Floats:
    dx, dy = np.array([0, -0.5, 0.5]) * size, np.array([0, -1, -1]) * size
    return np.stack([x[:, None] + dx, y[:, None] + dy], -1)


def _bars(left: Floats, width: Floats, y: Floats) -> Floats:
    dx, dy = np.array([0, 1, 1, 0]), np.array([-1, -1, 1, 1]) * HEIGHT / 2
    return np.stack([left[:, None] + np.outer(width, dx), y[:, None] + dy], -1)


# ------------------------------------------------------------------ graphviz
def _with_graphviz(graphviz: Any, path: Path, boxes: Sequence[Box], legend: Sequence[str]) -> None:
    colours = palette(len(legend))
    rows = [*zip([fill for fill, _ in colours], legend, strict=True), (GREY[0], NOTHING)]
    cells = "".join(
        f'<tr><td bgcolor="{fill}">   </td><td align="left">{html.escape(text)}</td></tr>'
        for fill, text in rows
    )
    table = {"label": f'<<table border="0">{cells}</table>>', "labelloc": "t", "labeljust": "l"}
    font = {"fontname": "monospace", "fontsize": "9"}
    dot = graphviz.Digraph(
        format=path.suffix[1:].lower(),
        graph_attr={"ranksep": "0.25", "nodesep": "0.2", **table, **font},
        node_attr={"shape": "box", "height": "0.25", "margin": "0.08,0.03", **font},
        edge_attr={"arrowsize": "0.5"},
    )
    lines = {}
    for box in boxes:
        own = [colours[c] for c in box.colours] or [GREY]
        lines[box.name] = own[0][1]
        style = "striped" if len(own) > 1 else "filled"
        fills = ":".join(fill for fill, _ in own)
        dot.node(box.name, graphviz.escape(box.label), style=style, fillcolor=fills)
        for name in dict.fromkeys(box.inputs):
            dot.edge(name, box.name, color=lines[name])
    path.write_bytes(dot.pipe())
