"""Files import in one direction only, and every file can be read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx
import pytest

import zipfx

PACKAGE = Path(zipfx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 420


def name_of(file: Path) -> str:
    """`match/zip.py` is zipfx.match.matchers.zip; `match/__init__.py` is zipfx.match."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


NAMES = {name_of(file): file for file in FILES}


def imports(file: Path) -> set[str]:
    """Names of the modules of the package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & NAMES.keys()) or {str(node.module)}
    return found & NAMES.keys()


def test_imports_do_not_go_in_circles() -> None:
    graph = networkx.DiGraph((name_of(file), other) for file in FILES for other in imports(file))
    assert list(networkx.simple_cycles(graph)) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_the_package_lists_its_public_names_only() -> None:
    assert sorted(zipfx.__all__) == list(zipfx.__all__)
    assert all(hasattr(zipfx, name) for name in zipfx.__all__)
