"""Bars go on by the work of their steps, and tell the time left by that."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zipfx
from tests.helpers.pairs import merge
from zipfx import text


class Bars(text.tqdm):  # type: ignore[type-arg]
    """Notes how far every bar came, in parts of its total."""

    seen: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "file": io.StringIO(), "mininterval": 0})
        self.name = kwargs["desc"]
        self.seen[self.name] = []

    def update(self, n: float | None = 1) -> bool | None:
        done = super().update(n)
        self.seen[self.name].append(self.n / self.total)
        return done


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    monkeypatch.setattr(text, "tqdm", Bars)
    monkeypatch.setattr(Bars, "seen", {})
    return Bars.seen


def test_a_step_counts_by_its_cost(bars: dict[str, list[float]]) -> None:
    assert list(text.weighed("abc", [1, 2, 7], "work")) == ["a", "b", "c"]
    assert bars == {"work": pytest.approx([0.1, 0.3, 1.0])}


def test_as_many_costs_as_items(bars: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(text.weighed("abc", [1, 2], "work"))


def test_nothing_to_do_is_no_error(bars: dict[str, list[float]]) -> None:
    assert list(text.weighed([], [], "work")) == []
    assert bars == {"work": []}


def test_a_wide_layer_is_most_of_a_refit(bars: dict[str, list[float]]) -> None:
    """Layers 8 -> 8, 8 -> 256 and 256 -> 256: the last one is nearly all of the work."""

    def net() -> nn.Module:
        widths = [8, 8, 256, 256]
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers)

    zipfx.zip([net(), net()], [torch.randn(64, 8)] * 4)
    first, second, last = bars["zipfx: refit"]
    assert first < second < 0.2
    assert last == pytest.approx(1)
    assert bars["zipfx: match"][-1] == pytest.approx(1)


def test_no_bar_unless_asked(bars: dict[str, list[float]], capsys: Any) -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    merge(nets, [torch.randn(8, 4)])
    assert not any(map(sum, bars.values()))
    assert not capsys.readouterr().err
