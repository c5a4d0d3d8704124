"""The house: rooms in order, what each hands out, and files that can be read in one sitting."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

import zipfx

PACKAGE = Path(zipfx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
#: a file imports from its own room, and from those before it
ROOMS = """
    version errors hashing checks values text modes
    model trace analysis observe match merge repair
    arguments report pipeline
""".split()
#: rooms whose files are imported by their names, as they are no stages
HELPERS = ("zipfx.model", "zipfx.trace.nodes", "zipfx.analysis.rules")
LONGEST_FILE, LONGEST_CLASS, MOST_FILES, MOST_ROOMS = 400, 150, 9, 8


def name_of(file: Path) -> str:
    """`match/spaces.py` is zipfx.match.spaces; `match/__init__.py` is zipfx.match."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


NAMES = {name_of(file): file for file in FILES}
FOLDERS = sorted({file.parent for file in FILES})


def room_of(name: str) -> str:
    """`zipfx.match.spaces` lies in match; the package itself lies nowhere."""
    return name.split(".")[1] if "." in name else ""


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports from the package, anywhere in it."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            for alias in node.names if node.module in NAMES else ():
                yield str(node.module), alias.name


def modules(file: Path) -> set[str]:
    """The modules of the package that a file imports."""
    return {f"{m}.{n}" if f"{m}.{n}" in NAMES else m for m, n in imported(file)}


def is_helper(name: str) -> bool:
    return any(name == helper or name.startswith(f"{helper}.") for helper in HELPERS)


def test_every_room_has_its_place() -> None:
    assert {room_of(name) for name in NAMES} - {""} == set(ROOMS)
    assert len([folder for folder in FOLDERS if folder.parent == PACKAGE]) <= MOST_ROOMS


@pytest.mark.sweep
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_come_from_earlier_rooms(file: Path) -> None:
    own = room_of(name_of(file))
    for module, name in imported(file):
        if not own or room_of(module) == own:
            continue
        assert ROOMS.index(room_of(module)) < ROOMS.index(own)
        handed_out = module == f"zipfx.{room_of(module)}" and not is_helper(module)
        assert handed_out or is_helper(module), f"{module} is no room: import from its room"
        if handed_out and NAMES[module].name == "__init__.py":
            assert name in importlib.import_module(module).__all__


def test_imports_do_not_go_in_circles() -> None:
    graph = networkx.DiGraph((name_of(file), other) for file in FILES for other in modules(file))
    assert list(networkx.simple_cycles(graph)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_rooms_hand_out_what_others_use(folder: Path) -> None:
    name = name_of(folder / "__init__.py")
    body = parsed(folder / "__init__.py").body
    kinds = (ast.Expr, ast.ImportFrom, ast.Assign)
    assert ast.get_docstring(parsed(folder / "__init__.py"))
    assert all(isinstance(node, kinds) for node in body), "an __init__ holds no code"
    exported = list(getattr(importlib.import_module(name), "__all__", []))
    files = {file.stem for file in folder.glob("*.py")} | {f.name for f in folder.iterdir()}
    assert not files & set(exported), "a file would be hidden by what the room hands out"
    if name != "zipfx" and "." not in name.removeprefix("zipfx."):
        outside = {n for f in FILES if room_of(name_of(f)) != room_of(name) for m, n in imported(f)
                   if m == name}  # fmt: skip
        assert set(exported) == outside


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folders_can_be_overseen(folder: Path) -> None:
    assert len([f for f in folder.glob("*.py") if f.name != "__init__.py"]) <= MOST_FILES


@pytest.mark.sweep
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_classes_can_be_read_in_one_sitting(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno < LONGEST_CLASS, f"{node.name} is too long"


def test_zip_fits_on_a_screen() -> None:
    (function,) = (
        node
        for node in parsed(PACKAGE / "pipeline.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "zip"
    )
    docstring, *body = function.body
    assert isinstance(docstring, ast.Expr)
    assert (body[-1].end_lineno or 0) - body[0].lineno < 40


def test_the_package_lists_its_public_names_only() -> None:
    assert sorted(zipfx.__all__) == list(zipfx.__all__)
    assert all(hasattr(zipfx, name) for name in zipfx.__all__)


TESTS = Path(__file__).parent


def found_beside(file: Path) -> list[Path]:
    """The tests in the folder that mirrors that of a source file."""
    return sorted((TESTS / file.relative_to(PACKAGE).parent).glob("test_*.py"))


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__init__.py"], ids=name_of)
def test_every_file_has_a_test_at_its_place(file: Path) -> None:
    """One of its name, or one beside it that imports from it: small files of one idea share one."""
    beside = found_beside(file)
    own = any(test.name == f"test_{file.name}" for test in beside)
    assert own or any(name_of(file) in modules(test) for test in beside)
