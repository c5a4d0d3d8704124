"""What a model is analysed with: what the caller gives, else some data, else a guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zipfx import ZipError
from zipfx.observe.data import calibration
from zipfx.observe.examples import example_batch, example_of, first_call, guessed_input

CPU = torch.device("cpu")


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return x * scale if mask is None else x * mask * scale


class Closed(nn.Module):
    """Takes no input, though it has a weight to guess from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


@pytest.mark.parametrize(
    ("example", "args", "kwargs"),
    [
        (1, (1,), {}),
        ((1, 2), (1, 2), {}),
        ([1, 2], ([1, 2],), {}),
        ({"x": 1}, (), {"x": 1}),
    ],
)
def test_an_input_a_tuple_of_them_or_a_dict(example: Any, args: Any, kwargs: Any) -> None:
    assert example_batch(example, CPU) == (args, kwargs)


def test_of_data_the_first_samples_are_taken() -> None:
    data = calibration([{"x": torch.arange(10.0), "labels": torch.ones(10)}], 1, None, None, CPU)
    inputs, by_name, kept, notes = first_call(Masked(), data, None, CPU)
    assert by_name == ("scale",)
    assert inputs[0].tolist() == [0, 1]
    assert inputs[1:] == (None, 1.0)
    assert kept is not None
    assert (kept.dropped, kept.given) == ({"labels"}, {"x"})
    assert len(notes) == 1
    assert "labels" in notes[0]


def test_what_batches_hold_the_examples_must_hold() -> None:
    data = calibration([{"x": torch.ones(3), "mask": torch.ones(3)}], 1, None, None, CPU)
    with pytest.raises(ZipError, match="batches hold 'mask' and example_inputs do not"):
        first_call(Masked(), data, torch.ones(3), CPU)
    inputs, *_ = first_call(Masked(), data, {"x": torch.ones(3), "mask": torch.zeros(3)}, CPU)
    assert inputs[1].tolist() == [0, 0, 0]


def test_more_samples_can_be_asked_for_where_they_are_data() -> None:
    data = calibration([torch.arange(300.0), torch.arange(5.0)], 1, None, None, CPU)
    found = example_of(Masked(), data, None, CPU)
    assert found.given == "the first samples of calib_loader"
    assert found.more is not None
    assert len(found.inputs[0]) == 2
    assert len(found.more()[0]) == 256
    assert example_of(Masked(), data, torch.ones(3), CPU).more is None


def test_without_either_it_is_guessed_and_said() -> None:
    found = example_of(nn.Linear(3, 2), None, None, CPU)
    assert found.inputs[0].shape == (2, 3)
    assert found.data is None
    assert found.guessed == (
        "analysed with random inputs of shape (2, 3), guessed from the first weight: pass "
        "example_inputs=... to choose",
    )


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (nn.Linear(3, 2).double(), (2, 3), torch.float64),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (2, 3, 32, 32), torch.float32),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 62 * 62, 2)),
         (2, 3, 64, 64), torch.float32),
        (nn.Conv1d(3, 4, 3), (2, 3, 32), torch.float32),
        (nn.Embedding(7, 3), (2, 16), torch.int64),
        (nn.GRU(3, 4), (2, 16, 3), torch.float32),
    ],
    ids=["linear", "image", "larger image", "series", "tokens", "recurrent"],
)  # fmt: skip
def test_the_first_weight_says_what_a_model_takes(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = guessed_input(model)
    assert (tuple(found.shape), found.dtype) == (shape, dtype)


def test_a_guess_leaves_the_model_and_its_statistics_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    guessed_input(model)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "tried"), [(Closed(), r"\(2, 3\), \(2, 16, 3\)"), (Masked(), "")]
)
def test_where_no_guess_works_inputs_are_asked_for(model: nn.Module, tried: str) -> None:
    with pytest.raises(ZipError, match=rf"takes none of the shapes \[{tried}\]; pass example_in"):
        guessed_input(model)


def test_empty_data_and_batches_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ZipError, match="calib_loader gave no batch"):
        first_call(Masked(), calibration([], 1, None, None, CPU), None, CPU)
    unfit = calibration([(torch.ones(2), torch.ones(2), torch.ones(2))], 1, tuple, None, CPU)
    with pytest.raises(ZipError, match=r"does not fit .* \(it takes x, mask, scale\)"):
        first_call(Masked(), unfit, None, CPU)
