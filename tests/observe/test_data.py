"""Data in any form is read as forward's arguments, or refused by what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zipfx
from tests.helpers.laws import error, run
from tests.helpers.refused import batch, mlp, refuse


# ------------------------------------------------------------------ data
@pytest.mark.parametrize("data", [[], iter([])], ids=["list", "generator"])
def test_no_data(data: Any) -> None:
    refuse([mlp(), mlp()], data, r"the calibration data is empty: calib_loader gave no batch")


def test_no_data_with_example_inputs() -> None:
    refuse([mlp(), mlp()], [], r"the calibration data is empty", example_inputs=batch())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, r"calib_loader is a int; pass an iterable of batches"),
        (batch(), r"calib_loader is a Tensor; .*a single batch x: \[x\]"),
        ({"x": batch()}, r"calib_loader is a dict; pass an iterable"),
        (None, r'calib_loader=None works only with matcher="weights" or "identity"'),
        ([3.5], r"a calibration batch is a float; .*batch_to_args="),
        (["text"], r"a calibration batch is a str; .*batch_to_args="),
        ([()], r"a calibration batch is a tuple; .*batch_to_args="),
        ([{"y": batch()}], r"a batch does not fit the model's forward: .*batch_to_args="),
        ([[batch(), batch()], [batch(), batch()]], r"could be 2 batches or one loader per model"),
        (
            [[{"x": batch()}]] * 2,
            r"a list of 2 lists, which could be 2 batches .*\[\(x,\), \.\.\.\]",
        ),
        ([[torch.zeros(4, 6).long()] * 3] * 2, r"a list of 2 lists, which could be 2 batches"),
        ([[batch(), batch(n=3)], [batch()] * 2], r"a list of 2 lists, which could be 2 batches"),
        ([[(batch(), 0)]] * 3, r"a list of 3 lists of batches, for 2 models: pass one list of bat"),
        ([[(batch(), 0)], []], r"the loader of model 1, calib_loader\[1\], gave no batch"),
        ([DataLoader(batch())] * 3, r"a list of 3, with loaders in it, for 2 models: pass one"),
        ([DataLoader(batch())], r"a list of 1, with loaders in it, for 2 models"),
        ([DataLoader(batch()), batch()], r"calib_loader\[1\] is a Tensor, beside loaders"),
    ],
    ids=[
        "number",
        "tensor",
        "dict",
        "none",
        "float",
        "text",
        "empty tuple",
        "wrong key",
        "twofold",
        "twofold dicts",
        "twofold tokens",
        "twofold lengths",
        "three lists",
        "an empty list",
        "three loaders",
        "one loader",
        "a loader and a tensor",
    ],
)
def test_bad_data(data: Any, says: str) -> None:
    refuse([mlp(), mlp()], data, says)


def test_a_later_batch_of_another_shape() -> None:
    says = r"the models fail on a calibration batch with inputs \[\(16, 4\)\]"
    refuse([mlp(), mlp()], [batch(), batch()[:, :4]], says)


def test_data_of_another_shape_is_named_as_such() -> None:
    models, wide = [mlp(), mlp(seed=1)], torch.zeros(4, 7).double()
    refuse(models, [(wide,)], r"fails on the first samples of calib_loader: mat1 and mat2")
    refuse(models, [(batch(),)], r"fails on example_inputs: mat1 and mat2", example_inputs=wide)


# ------------------------------------------------------------------ every form of data that is fine
class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        return self.h(torch.relu(self.a(first)) + torch.tanh(self.b(first)))


def generator(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def three() -> list[Tensor]:
    return [batch(s) for s in range(3)]


SAME_DATA: dict[str, Callable[[], Any]] = {
    "generator": lambda: generator(three()),
    "tuple": lambda: tuple(three()),
    "labelled": lambda: [(x, torch.zeros(16)) for x in three()],
    "labelled lists": lambda: [[x, torch.zeros(16)] for x in three()],
    "dicts": lambda: [{"first": x} for x in three()],
    "loader": lambda: DataLoader(TensorDataset(torch.cat(three())), batch_size=16),
    "one loader each": lambda: [
        DataLoader(TensorDataset(torch.cat([batch(0), batch(2)])), batch_size=16),
        DataLoader(TensorDataset(batch(1)), batch_size=16),
    ],
    "one generator each": lambda: [generator([batch(0), batch(2)]), generator([batch(1)])],
}


@pytest.mark.sweep
@pytest.mark.parametrize("form", SAME_DATA)
def test_every_form_of_data_gives_the_same_merge(form: str) -> None:
    torch.manual_seed(0)
    models = [Keywords().double(), Keywords().double()]
    expected = zipfx.zip(models, three(), repair="none", progress=False)
    merged = zipfx.zip(models, SAME_DATA[form](), repair="none", progress=False)
    assert merged.meta["zipfx"].batches["observe"] == 3
    assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


def test_batch_to_args_reads_any_batch() -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    expected = zipfx.zip(models, three(), repair="none", progress=False)
    for wrap in (lambda x: x, lambda x: (x,)):
        data = [{"deep": ["no", x]} for x in three()]
        merged = zipfx.zip(
            models, data, repair="none", progress=False,
            batch_to_args=lambda b, w=wrap: w(b["deep"][1]),
        )  # fmt: skip
        assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


@pytest.mark.parametrize("samples", [1, 16, 20, 48, 1000])
def test_max_samples_cuts_the_data(samples: int) -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    rest = torch.cat(three())[:samples]
    expected = zipfx.zip(models, [rest], repair="none", progress=False)
    merged = zipfx.zip(models, three(), repair="none", progress=False, max_samples=samples)
    assert merged.meta["zipfx"].batches["observe"] == min(3, -(-samples // 16))
    assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


def test_a_loader_of_every_model_is_seen_by_all_models() -> None:
    models, twins = [mlp(seed=s) for s in (0, 1)], [mlp(seed=s) for s in (1, 0)]
    loaders = SAME_DATA["one loader each"]()
    one = zipfx.zip(models, loaders, repair="none", progress=False, matcher="permute")
    two = zipfx.zip(twins, copy.deepcopy(loaders), repair="none", progress=False, matcher="permute")
    assert error(run(one, (batch(9),)), run(two, (batch(9),))) < 1e-10


def test_data_without_values() -> None:
    refuse([mlp(), mlp(seed=1)], [batch().to("meta")], r"on the device .meta., where it holds no")
