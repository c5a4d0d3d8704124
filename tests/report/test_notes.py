"""What a report says beside its numbers: each note where there is cause, and none where not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.analysed import analysed
from tests.helpers.blocks import data
from tests.helpers.pairs import data as batches
from tests.helpers.pairs import merge, pair
from zipfx.report.notes import few, hooks, not_loadable, unlike_extras, unobserved, unrepaired


def spaces() -> list[zipfx.Space]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return list(zipfx.analyze(model, torch.randn(2, 3)))


def test_too_few_samples_are_said_with_the_worst_space() -> None:
    assert few(spaces(), {"0": 4, "2": 6}) == []
    assert few(spaces(), {}) == []
    (note,) = few(spaces(), {"0": 3, "2": 2})
    assert "fewer than features in 2 of 2 spaces (2 for the 6 features of '2')" in note
    (note,) = few(spaces(), {"0": 9, "2": 5})
    assert "in 1 of 2 spaces (5 for the 6 features of '2')" in note


def test_spaces_that_were_not_seen_say_why() -> None:
    own = spaces()
    assert unobserved(own, []) == []
    (note,) = unobserved(own, ["2"])
    assert note == ("matched by weights, since nothing varies there on the calibration data: 2")
    chosen = replace(own[0], places=tuple(replace(p, chosen=True) for p in own[0].places))
    rows, rest = unobserved([chosen, own[1]], ["0", "2"])
    assert rows.startswith("matched by weights, since rows are sent there by what each model")
    assert rows.endswith(": 0")
    assert rest.endswith(": 2")


def test_hooks_are_left_behind_and_said() -> None:
    models = pair()
    assert hooks(models) == []
    models[1][0].register_forward_hook(print)  # type: ignore[index]
    models[1].register_forward_pre_hook(print)
    assert hooks(models) == [
        "hooks of model 1 are not part of the result: those of the model itself, '0'"
    ]


class OwnNorm(nn.Module):
    """A BatchNorm by hand, which no repair finds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        args: Any = (self.running_mean, self.running_var)
        z: Tensor = self.h(nn.functional.batch_norm(self.a(x), *args).relu())
        return z


def test_statistics_that_a_repair_does_not_find_are_named() -> None:
    model = OwnNorm().double().eval()
    found = analysed(model, data(3))
    assert unrepaired(found, model, "bn") == [
        "running statistics not re-estimated (no BatchNorm module): running_var"
    ]
    assert unrepaired(found, model, "refit") == []
    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    assert unrepaired(analysed(normed, data(3)), normed, "bn") == []


class Extra(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_states_that_differ_are_said() -> None:
    assert unlike_extras([Extra(1), Extra(1)]) == {}
    assert list(unlike_extras([Extra(1), Extra(2)])) == [""]
    found = unlike_extras(
        [nn.Sequential(Extra(1)), nn.Sequential(Extra(1)), nn.Sequential(Extra(3))]
    )
    assert list(found) == ["0"]
    assert "of module '0' differs between the models: that of model 0 is kept" in found["0"]


def test_whether_the_result_loads_into_the_class() -> None:
    model, *_ = pair()
    assert not_loadable(pair()[0], model) == []
    (note,) = not_loadable(nn.Sequential(nn.Linear(4, 8, bias=False)), model)
    assert note.startswith("its state_dict does not load strictly into a Sequential: it lacks ")
    assert "lacks *.bias, 2.weight" in note
    (note,) = not_loadable(nn.Sequential(*model, nn.Linear(3, 3)), model)
    assert "it has 3.bias, 3.weight" in note


@pytest.mark.parametrize("partial", [None, "0"])
def test_notes_are_in_the_report_of_a_merge(partial: str | None) -> None:
    models = pair()
    models[0][1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    found = merge(models, [batches()[0][:3]], partial=partial).meta["zipfx"].notes
    assert "hooks of model 0 are not part of the result: '1'" in found
    assert any(note.startswith("few calibration samples") for note in found)
