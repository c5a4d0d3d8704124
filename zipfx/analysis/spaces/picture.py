"""Picture: a directed graph of coloured boxes, top down; by graphviz if there is one, else
matplotlib.

The layout for matplotlib is the layered one of Sugiyama, Tagawa and Toda (1981): ranks by longest
path, edges that span several ranks led through them, barycentre sweeps. Lengths are in inches.
"""

from __future__ import annotations

import colorsys
import html
import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zipfx.analysis.spaces.layout import HEIGHT, Box, Layout, layout
from zipfx.errors import ZipError
from zipfx.hashing import Floats

FONT = 7.5
FORMATS = (".svg", ".png", ".pdf")
GREY = ("#ececec", "#a0a0a0")
PIXELS = 30_000  # most along one side of a picture


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
