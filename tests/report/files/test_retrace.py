"""Models are traced again on inputs like those that are not stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.saved import attentions, edited, peak, refuse, reloaded, same
from zipfx.report.files import retrace


# ------------------------------------------------------------------ what is traced with
@pytest.mark.sweep
@pytest.mark.parametrize("shape", [[2, 2**20], [2, 2**24], [2**24, 2], [2, 2**40], [0, 2**62]])
def test_shapes_that_were_never_traced_with_cost_nothing(
    shape: list[int], looping: Path, tmp_path: Path
) -> None:
    def change(tensors: Any, header: Any) -> None:
        header["traced"]["inputs"]["tuple"][0]["shape"] = shape

    path = edited(looping, tmp_path, change)
    before, start = peak(), time.perf_counter()
    refuse(path, "not of the architecture|pass example_inputs|can not be drawn", attentions())
    assert time.perf_counter() - start < 20
    assert peak() - before < 100
    if shape != [0, 2**62]:
        given = (torch.full((2, 4), 5), None, 1.0)
        found = zipfx.load(path, attentions(), example_inputs=given)
        assert found.meta["zipfx"].partial == "a"


class Flagged(nn.Module):
    """Asks a buffer, which shapes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y.relu() if self.flag else y)


def test_values_are_drawn_only_for_models_that_need_them(
    looping: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn, devices = retrace.drawn, []

    def seen(description: Any, device: torch.device) -> Any:
        devices.append(device.type)
        return drawn(description, device)

    monkeypatch.setattr(retrace, "drawn", seen)
    zipfx.load(looping, attentions())
    assert devices == ["meta"] * 2
    devices.clear()
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    merged = zipfx.zip([Flagged(), Flagged()], [x], progress=False)
    found = reloaded(merged, [Flagged(), Flagged()], tmp_path)
    assert same(found(x), merged(x))
    assert devices == ["meta", "cpu"]


class Placed(nn.Module):
    """Makes tensors where its parameters are, for as many rows as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        place = next(self.parameters()).device
        y = self.a(x) + torch.arange(8, device=place) / 8 + torch.ones(8)
        for i in range(x.shape[1]):
            y = y + x[:, i : i + 1]
        return self.b(y.relu())


@pytest.mark.parametrize("meta", [False, True])
def test_no_node_stays_where_shapes_were_traced(meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    merged = zipfx.zip([Placed(), Placed()], [x], partial="a", progress=False)
    with torch.device("meta" if meta else "cpu"):
        fresh = Placed()
    found = reloaded(merged, [fresh, fresh], tmp_path)
    assert "meta" not in found.code
    assert same(found(x), merged(x))


def test_inputs_that_are_not_stored_matter_only_where_they_are_needed(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self, loops: bool) -> None:
            super().__init__()
            self.a, self.b, self.loops = nn.Linear(4, 8), nn.Linear(8, 2), loops

        def forward(self, x: Tensor, options: Any = None) -> Tensor:
            y = self.a(x)
            for _ in range(x.shape[1] if self.loops else 1):
                y = y.relu()
            return self.b(y)

    torch.manual_seed(0)
    x = torch.randn(2, 4)
    for loops in (False, True):
        merged = zipfx.zip(
            [Takes(loops), Takes(loops)], [x], example_inputs=(x, object()), progress=False
        )
        zipfx.save(merged, tmp_path / "merged")
        if loops:
            refuse(
                tmp_path / "merged", "hold a builtins.object, .* pass example", [Takes(True)] * 2
            )
            found = zipfx.load(tmp_path / "merged", [Takes(True)] * 2, example_inputs=(x, object()))
        else:
            found = zipfx.load(tmp_path / "merged", [Takes(False)] * 2)
        assert same(found(x), merged(x))
