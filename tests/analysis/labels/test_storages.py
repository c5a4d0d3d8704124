"""Labels belong to storages: views see them, and writing changes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error
from zipfx.analysis.labels.labels import Kind, Labels
from zipfx.analysis.labels.storages import StorageLabels


def test_labels_that_were_handed_out_do_not_change_with_their_storage() -> None:
    """A recurrent layer writes into the window of a larger tensor that it has read before."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.r = nn.Linear(5, 6), nn.LSTM(6, 7, 1, batch_first=True)
            self.h = nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.h(self.r(self.e(x))[0][:, -1])
            return y

    torch.manual_seed(0)
    model = Recurrent().double()
    x = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(4)).double()
    spaces = zipfx.analyze(model, x, verify=False)
    assert sorted(s.size for s in spaces) == [6, 7]
    assert error(model(x), spaces.permuted(model, spaces.random_permutations(1))(x)) < EXACT


# ------------------------------------------------------------------ views and writes
def labelled(*shape: int) -> tuple[StorageLabels, Tensor]:
    """A tensor of which every element has a label of its own: 1 and on, in rows."""
    t, count = torch.zeros(shape), torch.zeros(shape).numel()
    storages = StorageLabels()
    slot = torch.arange(1, 1 + count).reshape(shape)
    storages.put(t, Labels(shape, (slot,), kind=Kind.DATA), 0)
    return storages, t


def seen(storages: StorageLabels, t: Tensor) -> list[Tensor]:
    found = storages.get(t)
    assert found is not None
    assert found.shape == tuple(t.shape)
    return [slot.expand(t.shape) for slot in found.features]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "transposed": lambda t: t.mT,
    "a row": lambda t: t[1],
    "a column": lambda t: t[:, 2],
    "a window": lambda t: t[1:, 1:3],
    "every other": lambda t: t[:, ::2],
    "flat": lambda t: t.view(-1),
    "split": lambda t: t.view(3, 2, 2),
    "expanded": lambda t: t[:, :1].expand(3, 5),
    "a diagonal": lambda t: t.diagonal(),
    "overlapping": lambda t: t.as_strided((4, 3), (2, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_labels_of_its_elements(name: str) -> None:
    """As the same view of a tensor of labels has them."""
    storages, t = labelled(3, 4)
    (slot,) = seen(storages, VIEWS[name](t))
    assert torch.equal(slot, VIEWS[name](torch.arange(1, 13).reshape(3, 4)))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["a row", "a column", "a window", "every other", "transposed"])
def test_what_is_written_through_a_view_is_seen_by_all_others(name: str, view: str) -> None:
    storages, t = labelled(3, 4)
    seen(storages, VIEWS[view](t))  # handed out before
    target = VIEWS[name](t)
    new = torch.arange(100, 100 + target.numel()).reshape(target.shape)
    storages.write(target, Labels(tuple(target.shape), (new,), kind=Kind.DATA), 1)
    expected = torch.arange(1, 13).reshape(3, 4)
    VIEWS[name](expected).copy_(new)
    (slot,) = seen(storages, VIEWS[view](t))
    assert torch.equal(slot, VIEWS[view](expected))
    assert storages.owner(t) == 0  # of the node that made it


def test_parts_of_complex_numbers_have_their_labels() -> None:
    t = torch.zeros(3, dtype=torch.complex64)
    storages = StorageLabels()
    storages.put(t, Labels((3,), (torch.tensor([4, 5, 6]),), kind=Kind.DATA), 0)
    parts = storages.get(torch.view_as_real(t))
    assert parts is not None
    assert parts.features[0].expand(3, 2).tolist() == [[4, 4], [5, 5], [6, 6]]
    (at,) = parts.fixed  # tells the real part from the imaginary one
    assert len({*at.expand(3, 2)[0].tolist()}) == 2


def test_other_bits_have_no_labels() -> None:
    storages, t = labelled(4)
    assert storages.get(t.view(torch.int16)) is None


def test_storages_that_are_gone_are_forgotten() -> None:
    storages, t = labelled(2)
    assert storages.knows(t)
    for _ in range(200):
        storages.put(torch.zeros(3), Labels((3,)), 1)
    assert storages.knows(t)
    assert not storages.knows(torch.zeros(2))
