"""The README's guide runs, top to bottom, as it is printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.slow
def test_python_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # over 10 s: it zips a pair of ResNet-18 several times
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    monkeypatch.chdir(tmp_path)  # it draws a picture
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    assert tuple(names["dogs"].shape) == (16, 120)
    assert tuple(names["birds"].shape) == (16, 200)
    assert [tuple(y.shape) for y in names["merged"](names["images"][0])] == [(16, 120), (16, 200)]
    assert "zip of 2 models, up to 'layer3'" in printed.getvalue()
    assert (tmp_path / "spaces.svg").stat().st_size > 10_000
    assert "layer1.0.conv1" in printed.getvalue()


def test_the_matcher_of_the_docs_runs() -> None:
    text = (README.parent / "docs" / "matchers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["merged"].meta["zipfx"].spaces[0].across == 8
