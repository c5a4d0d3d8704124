"""The numbers of elements lie beside their storages: views share them, writes are seen by all."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from zipfx.trace.align.elements import Elements

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.T,
    "every other": lambda x: x[:, ::2],
    "last rows": lambda x: x[1:],
    "reshape": lambda x: x.view(-1),
    "expand": lambda x: x[:1].expand(5, -1),
    "none of it": lambda x: x[:0],
}


def numbered(number: int = 3) -> tuple[Elements, Tensor]:
    elements, x = Elements(), torch.zeros(3, 4)
    elements.fill(x, number)
    return elements, x


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_has_the_same_view_of_the_numbers(view: Callable[[Tensor], Tensor]) -> None:
    elements, x = numbered()
    whole, part = elements.window(x), elements.window(view(x))
    assert whole is not None
    assert part is not None
    at = view(torch.arange(x.numel()).view(x.shape)).numpy()
    assert (part == whole.reshape(-1)[at]).all()


def test_every_element_has_a_number_and_another_fill_gives_others() -> None:
    elements, x = numbered()
    first = np.array(elements.window(x))
    assert len(np.unique(first)) == x.numel()
    elements.fill(x, 4)
    second = np.array(elements.window(x))
    assert not np.isin(second, first).any()
    elements.fill(x, 3)
    assert (np.array(elements.window(x)) == first).all()


def test_what_is_written_through_a_view_is_seen_in_the_tensor() -> None:
    elements, x = numbered()
    before = elements.digest(x)
    elements.fill(x[:, 1], 9)
    assert elements.digest(x) != before
    assert (elements.window(x)[:, 1] == elements.window(x[:, 1])).all()  # type: ignore[index]


def test_a_digest_goes_by_numbers_and_their_order() -> None:
    elements, x = numbered()
    y = torch.zeros(3, 4)
    elements.fill(y, 3)
    assert elements.digest(y) == elements.digest(x)
    assert elements.digest(x.T) == elements.digest(y.T) != elements.digest(x)
    assert elements.digest(x[:0]) == 0


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0]).double(), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int8), True),
        (torch.tensor([1, 2]), torch.tensor([2, 1]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([True, False]), torch.tensor([1, 0]), True),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).to(torch.complex128), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [2.0]]), True),
        (torch.tensor([0.5]).to(torch.bfloat16), torch.tensor([0.5]), True),
    ],
)
def test_constants_are_known_by_their_values(a: Tensor, b: Tensor, same: bool) -> None:
    elements = Elements()
    assert (elements.digest(a) == elements.digest(b)) == same
    assert elements.is_constant(a)


def test_a_value_is_its_tensors_and_the_text_of_the_rest() -> None:
    elements, x = numbered()
    assert elements.value((x, 3)) == ((elements.digest(x), (3, 4)), "3")
    assert elements.value(x.view(2, 6)) != elements.value(x)


def test_a_storage_seen_through_another_dtype_has_no_numbers() -> None:
    elements, x = numbered()
    assert elements.window(x.view(torch.int16)) is None
    assert elements.window(torch.zeros(3)) is None
    elements.add(x)
    assert elements.window(x) is not None


def test_storages_that_are_gone_are_forgotten() -> None:
    elements, kept = numbered()
    for _ in range(1000):
        elements.digest(torch.zeros(1) + 1)
    gc.collect()
    assert len(elements.storages) < 200
    assert elements.window(kept) is not None
