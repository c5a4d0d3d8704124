"""Tables in text: names are summed up, and cells wrapped."""

from __future__ import annotations

import pytest

from zipfx.text import summary, table


@pytest.mark.parametrize(
    ("names", "width", "text"),
    [
        ([], 10, ""),
        (["a", "a"], 10, "a"),
        (["a.b", "c.d", "e.f"], 8, "a.b +2"),
        (["a.b", "c.d", "e.f"], 11, "a.b, c.d +1"),
        (["a.b", "c.d", "e.f"], 13, "a.b, c.d, e.f"),
        (["x" * 30], 10, "x" * 30),
        (["f.3.0.w", "f.3.1.w"], 20, "f.3.*.w"),
        (["layer_0.a", "layer_11.a"], 20, "layer_*.a"),
        (["0.w", "2.w", "4"], 20, "*.w, 4"),
        (["conv1", "conv2"], 20, "conv1, conv2"),
    ],
)
def test_summary(names: list[str], width: int, text: str) -> None:
    assert summary(names, width) == text


def test_cells_are_wrapped_at_spaces_then_at_dots() -> None:
    rows = [("one", "two"), ("a.bb.ccc", "d e f"), ("gggggg", "")]
    assert table(rows, [5, 3]) == [
        "one    two",
        "----------",
        "a.bb.  d e",
        "ccc    f",
        "ggggg",
        "g",
    ]
