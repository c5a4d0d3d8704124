"""The documents: their examples run, and the pictures of the rooms are those of the code."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zipfx

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
PACKAGE = ROOT / "zipfx"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#([\w-]+))?\)")
#: a Python file in backquotes, such as `match/spaces.py`
FILE = re.compile(r"`([\w/]+\.py)`")
#: rooms whose files begin with their names
NAMING = ("match", "merge", "repair", "report")
NAMED = [
    *PACKAGE.glob("*.py"),
    *(file for room in NAMING for file in sorted(PACKAGE.glob(f"{room}/**/*.py"))),
]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rooms_are_drawn_as_they_are() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    assert page.count("<!-- drawn by docs/rooms.py: ") == 2
    assert rooms().drawn(page) == page, "run: python docs/rooms.py"


@pytest.mark.slow
def test_the_path_of_two_models_is_what_happens() -> None:
    page = ROOT / "docs" / "architecture.md"
    shown = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(shown, {}, page.name, str(page), 0)
    assert len(test.examples) >= 30
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_the_examples_for_contributors_run() -> None:
    names: dict[str, Any] = {"__name__": "contributing"}
    examples = blocks(ROOT / "CONTRIBUTING.md", "python")
    assert len(examples) >= 3
    for block in examples:
        exec(block, names)


def test_the_page_of_fine_tunes_runs() -> None:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "fine-tunes.md", "python"):
        exec(block, names)
    average, merged = (names["missed"](names[model]) for model in ("average", "merged"))
    assert all(ours < theirs / 2 for ours, theirs in zip(merged, average, strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for target, anchor in LINK.findall(prose):
        found = page.parent / target
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or f"## {anchor.replace('-', ' ')}" in text_of(found).lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """By their path in zipfx or in the repository; a test by its name, wherever it lies."""
    for name in FILE.findall(text_of(page)):
        here = [ROOT / name, PACKAGE / name, *ROOT.glob(f"tests/**/{Path(name).name}")]
        assert any(file.exists() for file in here) or name in drawn_names(page), (
            f"{page.name} names {name}"
        )


def drawn_names(page: Path) -> set[str]:
    """Files in the drawn parts of a page, which another test compares."""
    drawn = rooms().DRAWN.finditer(text_of(page))
    return {name for part in drawn for name in FILE.findall(part[0])}


@pytest.mark.sweep
@pytest.mark.parametrize("file", NAMED, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_begin_with_their_names(file: Path) -> None:
    name = (file.parent if file.name == "__init__.py" else file).stem
    docstring = ast.get_docstring(ast.parse(text_of(file))) or ""
    first = re.match(r"[\w -]+", docstring)
    assert first
    assert re.sub(r"[ -]", "", first[0]).lower().startswith(name.replace("_", ""))


def test_the_version_is_one_number() -> None:
    project = text_of(ROOT / "pyproject.toml")
    assert 'version = { attr = "zipfx.version.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", zipfx.__version__)
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert zipfx.__version__ == released[0]
