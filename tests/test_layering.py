"""Stages import downwards only, and every file can be read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zipfx

PACKAGE = Path(zipfx.__file__).parent
ORDER = """
    errors checks modes values naming programs precision plain disk container table statistics
    moments ridge matrices match.protocol match.identity match.permute match.greedy
    match.zip match.optimal match.kmeans match.svd match.weights match
    tap draw spaces labels ledger memory shadow untouched tensors hidden graphs copies parametrized
    computed singular calls
    tracers
    example tidy flat trace standins layers
    rules.call rules.diagonal rules.pointwise rules.movement rules.together rules.contraction
    rules.algebra rules.spatial rules.spectral rules.vision rules.recurrent rules.register rules
    rows starts interpret
    twofold nesting occurrences known group places mapping verify analyze calibrate
    replay
    correspond observe fuse pairing weigh heads tree rewrite stored recipe rebuild made spelling
    numbering
    likeness adopt alike assemble opaque unfold bake targets
    refit repair report notes zip retrace files
""".split()
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 420


def name_of(file: Path) -> str:
    """`match/zip.py` is match.zip; `match/__init__.py` is match; the package itself is ''."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def imports(file: Path) -> set[str]:
    """Names of the modules of the package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names}
            known = {f"zipfx.{name}" for name in ORDER}
            found |= (inner & known) if module in ("zipfx", *known) and inner & known else {module}
    return {name.removeprefix("zipfx.") for name in found if name.startswith("zipfx.")}


def test_every_file_has_its_place_in_the_order() -> None:
    assert sorted(name for name in map(name_of, FILES) if name) == sorted(ORDER)


@pytest.mark.parametrize("file", [f for f in FILES if name_of(f)], ids=name_of)
def test_imports_go_downwards(file: Path) -> None:
    below = ORDER[: ORDER.index(name_of(file))]
    assert imports(file) <= set(below)


@pytest.mark.parametrize("file", FILES, ids=lambda f: name_of(f) or "zipfx")
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("stage", ["observe", "repair", "refit", "match", "fuse"])
def test_stages_do_not_import_each_other(stage: str) -> None:
    others = {
        "analyze", "observe", "match", "fuse", "heads", "rewrite", "assemble", "refit", "repair"
    }  # fmt: skip
    file = next(f for f in FILES if name_of(f) == stage)
    assert not imports(file) & (others - {stage, *(n for n in ORDER if n.startswith(stage))})


@pytest.mark.parametrize("stage", ["pairing", "repair", "report", "assemble"])
def test_only_zip_and_the_package_see_the_stages(stage: str) -> None:
    seen_by = {name_of(f) for f in FILES if stage in imports(f)}
    assert "zip" in seen_by
    # weigh is a second way to pair, notes tell of both, targets look at what was assembled,
    # files hold the report
    assert seen_by <= {"", "zip", "weigh", "notes", "targets", "files"}


def test_the_package_lists_its_public_names_only() -> None:
    assert sorted(zipfx.__all__) == list(zipfx.__all__)
    assert all(hasattr(zipfx, name) for name in zipfx.__all__)
