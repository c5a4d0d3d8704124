"""Pictures of a space map: what is in them, where it lies, and what is said when it can not be."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from zipfx import ZipError
from zipfx.analysis.spaces import picture as drawing
from zipfx.analysis.spaces.layout import Box
from zipfx.analysis.spaces.picture import palette


class Small(nn.Module):
    """Two spaces; a shortcut; a weight that is computed; a shape that is read; a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))
        self.side, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) + self.side(x) * self.scale.exp()
        h = h.view(x.size(0), 6)
        return F.linear(h, self.out.weight.softmax(0), self.out.bias)


@pytest.fixture(scope="module")
def spaces() -> zipfx.SpaceMap:
    return zipfx.analyze(Small(), torch.randn(4, 5), verify=False)


@pytest.fixture
def _no_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


# ------------------------------------------------------------------ nodes
def test_nodes_are_what_data_runs_through(spaces: zipfx.SpaceMap) -> None:
    assert [(n.name, n.label, n.module, n.inputs) for n in spaces.nodes] == [
        ("x", "input x", "", ()),
        ("body_0", "Linear body.0", "body.0", ("x",)),
        ("body_1", "ReLU body.1", "body.1", ("body_0",)),
        ("body_2", "Linear body.2", "body.2", ("body_1",)),
        ("side", "Linear side", "side", ("x",)),
        ("mul", "mul", "", ("side",)),
        ("add", "add", "", ("body_2", "mul")),
        ("view", "view", "", ("add",)),
        ("linear", "linear", "", ("view",)),
        ("output", "output", "", ("linear",)),
    ]


# ------------------------------------------------------------------ matplotlib
@pytest.mark.usefixtures("_no_graphviz")
@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")],
)
def test_the_ending_tells_the_format(
    spaces: zipfx.SpaceMap, tmp_path: Path, name: str, start: bytes
) -> None:
    spaces.draw(str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.usefixtures("_no_graphviz")
def test_every_node_and_space_is_in_the_picture(spaces: zipfx.SpaceMap, tmp_path: Path) -> None:
    spaces.draw(tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    written = [" ".join(text.split()) for text in re.findall(r">([^<>]+)</text>", picture)]
    labels = [n.label for n in spaces.nodes]
    assert sorted(written) == sorted([*labels, "body.0 8", "body.2 6", "no space"])
    assert [s.name for s in spaces] == ["body.2", "body.0"]
    for (fill, line), count, lines in zip(palette(2), (5, 2), (6, 2), strict=True):
        assert picture.count(f"fill: {fill}") == count + 1  # its boxes, and in the legend
        assert picture.count(f"stroke: {line}") == lines  # one reader each; mul to add bends
    spaces.draw(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == picture


@pytest.mark.usefixtures("_no_graphviz")
def test_no_display_and_no_global_state(
    spaces: zipfx.SpaceMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    monkeypatch.delenv("DISPLAY", raising=False)
    before = mpl.rcParams.copy()
    spaces.draw(tmp_path / "a.svg")
    spaces.draw(tmp_path / "a.png")
    assert mpl.rcParams.copy() == before


@pytest.mark.usefixtures("_no_graphviz")
def test_a_picture_grows_with_the_graph_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    def height(n: int) -> int:
        names = [f"n{i}" for i in range(n)]
        boxes = [Box(b, b, (a,) if a else ()) for a, b in zip(["", *names], names, strict=False)]
        drawing.draw(tmp_path / "a.png", boxes, [])
        with Image.open(tmp_path / "a.png") as picture:
            return int(picture.size[1])

    assert height(40) > 1.8 * height(20)
    monkeypatch.setattr(drawing, "PIXELS", 400)
    assert 300 < height(40) <= 440


def test_colours_differ() -> None:
    fills, lines = zip(*palette(40), strict=True)
    assert len(set(fills)) == len(set(lines)) == 40


# ------------------------------------------------------------------ graphviz
class Digraph:
    """Writes down what it is told."""

    made: list[Digraph]

    def __init__(self, **options: Any) -> None:
        self.options, self.nodes, self.edges = options, {}, []  # type: ignore[var-annotated]
        Digraph.made = [self]

    def node(self, name: str, label: str, **attributes: str) -> None:
        self.nodes[name] = (label, attributes)

    def edge(self, a: str, b: str, **attributes: str) -> None:
        self.edges.append((a, b, attributes["color"]))

    def pipe(self) -> bytes:
        return b"a picture"


def test_graphviz_is_used_where_it_is(
    spaces: zipfx.SpaceMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "graphviz", SimpleNamespace(Digraph=Digraph, escape=lambda s: s)
    )
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/dot" if name == "dot" else None)
    spaces.draw(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == b"a picture"
    (dot,) = Digraph.made
    assert dot.options["format"] == "svg"
    second, first = palette(2)
    assert dot.nodes["body_1"] == ("ReLU body.1", {"style": "filled", "fillcolor": first[0]})
    assert dot.nodes["x"][1]["fillcolor"] == drawing.GREY[0]
    assert ("body_1", "body_2", first[1]) in dot.edges
    assert ("body_2", "add", second[1]) in dot.edges
    assert "body.0 8" in " ".join(dot.options["graph_attr"]["label"].split())
    drawing.draw(tmp_path / "b.pdf", [Box("a", "a", (), (0, 1))], ["one", "two & more"])
    (dot,) = Digraph.made
    striped = {"style": "striped", "fillcolor": f"{second[0]}:{first[0]}"}
    assert dot.nodes["a"] == ("a", striped)
    assert "two &amp; more" in dot.options["graph_attr"]["label"]


@pytest.mark.skipif(not shutil.which("dot"), reason="the program dot is not installed")
@pytest.mark.parametrize("name", ["a.svg", "a.png", "a.pdf"])
def test_graphviz_itself(spaces: zipfx.SpaceMap, tmp_path: Path, name: str) -> None:
    pytest.importorskip("graphviz")
    boxes = [
        Box("a", "<lambda>", (), (0, 1)),
        Box("b", r"a\n", ("a",)),
        Box("c", "c", ("b",), (1,)),
    ]
    drawing.draw(tmp_path / name, boxes, ["one", "two & more"])
    picture = (tmp_path / name).read_bytes()
    if name == "a.svg":
        assert all(t in picture.decode() for t in ("&lt;lambda&gt;", r"a\n", "two &amp; more"))
    else:
        assert len(picture) > 1000


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize("name", ["a.jpg", "a", "svg"])
def test_other_endings_are_refused(spaces: zipfx.SpaceMap, tmp_path: Path, name: str) -> None:
    with pytest.raises(ZipError, match=rf"'{name}': the format is .* of \.svg, \.png, \.pdf"):
        spaces.draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_tools_it_says_what_to_install(
    spaces: zipfx.SpaceMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ZipError, match=r"pip install matplotlib.*pip install graphviz.*apt"):
        spaces.draw(tmp_path / "a.svg")


@pytest.mark.usefixtures("_no_graphviz")
def test_the_python_package_alone_does_not_make_graphviz(
    spaces: zipfx.SpaceMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", SimpleNamespace())
    spaces.draw(tmp_path / "a.svg")
    assert b"matplotlib" in (tmp_path / "a.svg").read_bytes().lower()


def test_a_map_without_a_graph(tmp_path: Path) -> None:
    with pytest.raises(ZipError, match=r"knows no graph: draw a map that zipfx\.analyze has made"):
        zipfx.SpaceMap((), ()).draw(tmp_path / "a.svg")
