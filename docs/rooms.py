"""Rooms: what each takes and gives, drawn from the imports into docs/architecture.md.

python docs/rooms.py    writes the drawn parts of architecture.md anew; a test compares them
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zipfx"
PAGE = ROOT / "docs" / "architecture.md"
#: between these lines a page is drawn, by the part's name
DRAWN = re.compile(r"(<!-- drawn by docs/rooms.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def room_of(file: Path) -> str:
    """A folder of zipfx, or a file beside the folders; "" for zipfx itself.

    >>> room_of(PACKAGE / "match" / "matchers" / "zip.py"), room_of(PACKAGE / "text.py")
    ('match', 'text')
    """
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """(room, name) of what a file imports from other rooms; no name where it is from a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zipfx."):
            _, room, *within = str(node.module).split(".")
            if room != room_of(file):
                yield from ((room, "" if within else alias.name) for alias in node.names)


def imports() -> networkx.DiGraph:
    """An edge from every room to those that import from it, with the names that they import."""
    graph = networkx.DiGraph()
    for file in sorted(PACKAGE.rglob("*.py")):
        for room, name in imported(file) if room_of(file) else ():
            graph.add_edge(room, room_of(file))
            names = graph.edges[room, room_of(file)].setdefault("names", set())
            names.update([name] * bool(name))
    return graph


def picture() -> str:
    """The rooms as a mermaid diagram; imports that a longer path implies are left out."""
    graph = imports()
    edges = networkx.transitive_reduction(graph).edges
    order = list(networkx.lexicographical_topological_sort(graph))
    boxes = [f"    {r}[{r}]" if is_folder(r) else f"    {r}([{r}.py])" for r in order]
    arrows = [f"    {a} --> {b}" for a in order for b in order if (a, b) in edges]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])


def is_folder(room: str) -> bool:
    """Whether a room is a folder, and not a single file."""
    return (PACKAGE / room).is_dir()


def rooms() -> str:
    """What each folder is, as its `__init__` says, and which names it gives to whom."""
    graph = imports()
    order = list(networkx.lexicographical_topological_sort(graph))
    return "\n\n".join(section(room, graph, order) for room in order if is_folder(room))


def section(room: str, graph: networkx.DiGraph, order: list[str]) -> str:
    """One folder."""
    about = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8")))
    given = [
        f"- to `{taker}`: {listed(graph.edges[room, taker]['names'])}"
        for taker in order
        if graph.has_edge(room, taker) and graph.edges[room, taker]["names"]
    ]
    folders = sorted(f.parent for f in (PACKAGE / room).rglob("__init__.py"))
    files = [f"- in `{f.relative_to(PACKAGE)}/`: {listed(files_of(f))}" for f in folders]
    return "\n".join([f"### {room}", "", str(about), "", *given, *files])


def listed(names: Iterable[str]) -> str:
    """Names in one line, as code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def files_of(folder: Path) -> list[str]:
    """The Python files of a folder."""
    return [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]


def drawn(page: str) -> str:
    """The page with its drawn parts as they are now."""
    parts = {"picture": picture, "rooms": rooms}
    return DRAWN.sub(lambda found: f"{found[1]}{parts[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
