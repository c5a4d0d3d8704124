"""Positions that only fill a batch up are no samples: neither of statistics, nor of a repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error
from zipfx.observe.padding import by_position, mask_of, spread

M = torch.tensor([[1, 1, 0], [1, 0, 0]])


# ------------------------------------------------------------------ masks
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": None},
        {"attention_mask": torch.ones(2, 3)},
        {"attention_mask": torch.full((2, 3), 0.5)},
        {"attention_mask": torch.zeros(2, 1, 3, 3)},
        {"attention_mask": M, "decoder_input_ids": torch.zeros(2, 3)},
    ],
)
def test_where_nothing_is_known_everything_counts(arguments: dict[str, Any]) -> None:
    assert mask_of(arguments) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_masks_of_every_dtype(dtype: torch.dtype) -> None:
    found = mask_of({"attention_mask": M.to(dtype), "decoder_input_ids": torch.zeros(2, 5)})
    assert found is not None
    assert torch.equal(found, M == 1)


@pytest.mark.parametrize(
    ("shape", "features", "where"),
    [
        ((2, 3, 8), (2,), (0, 1)),
        ((2, 8, 3), (1,), (0, 2)),
        ((2, 4, 3, 5), (1, 3), (0, 2)),
        ((2, 4, 3, 3), (1,), (0, 2)),  # scores of attention: by who asks
        ((3, 2, 8), (2,), (1, 0)),
        ((6, 8), (1,), None),
    ],
)
def test_it_lies_along_the_positions(shape: Any, features: Any, where: Any) -> None:
    mask = M == 1
    found = spread(mask, shape, features)
    assert found is not None
    assert found.ndim == len(shape)
    whole = found.expand(shape)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        row, position = divmod(index[0], 3) if where is None else (index[d] for d in where)
        assert whole[tuple(index)] == mask[row, position]


def test_as_many_samples_as_positions_say_nothing() -> None:
    assert spread(torch.tensor([[True, False], [True, True]]), (2, 2, 8), (2,)) is None


@pytest.mark.parametrize(("shape", "features"), [((2, 8), (1,)), ((4, 3, 8), (2,)), ((3,), (0,))])
def test_values_without_positions_are_whole(shape: Any, features: Any) -> None:
    assert spread(M == 1, shape, features) is None


# ------------------------------------------------------------------ merges
class Reader(nn.Module):
    """Every position by itself, then their mean; transposed: positions before samples."""

    def __init__(self, seed: int, transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.a, self.b = nn.Embedding(20, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.h, self.transposed = nn.Linear(8, 3), transposed
        self.double().eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.table(input_ids)
        if self.transposed:
            y = y.transpose(0, 1)
        y = y + self.b(self.a(y).relu())
        if self.transposed:
            y = y.transpose(0, 1)
        weight = attention_mask[..., None].double()
        z: Tensor = self.h((y * weight).sum(1) / weight.sum(1))
        return z


def batches(length: int) -> list[dict[str, Tensor]]:
    """The same sequences of at most 6 tokens, filled up to a length with others."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        tokens = torch.randint(1, 20, (16, 6), generator=generator)
        mask = (torch.arange(6) < torch.randint(2, 7, (16, 1), generator=generator)).long()
        filling = torch.zeros(16, length - 6).long()
        tokens = torch.where(mask == 1, tokens, 0)
        found.append({"input_ids": torch.cat([tokens, filling], 1),
                      "attention_mask": torch.cat([mask, filling], 1)})  # fmt: skip
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("repair", ["none", "affine", "refit"])
@pytest.mark.parametrize("matcher", ["zip", "permute"])
def test_a_merge_does_not_depend_on_how_far_sequences_are_filled_up(
    matcher: str, repair: str, transposed: bool
) -> None:
    models = [Reader(seed, transposed) for seed in (0, 1)]
    found = [
        zipfx.zip(models, batches(length), matcher=matcher, repair=repair, progress=False)
        for length in (6, 11)
    ]
    one, two = (m.state_dict() for m in found)
    assert max(error(one[key], two[key]) for key in one) < 1e-9
    counts = [dict(m.meta["zipfx"].batches) for m in found]
    assert counts[0] == counts[1]


class Attends(Reader):
    """With torch's attention, which has its rows by position inside."""

    def __init__(self, seed: int, transposed: bool = False) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self.e = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=not transposed)
        self.transposed = transposed
        self.double().eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.table(input_ids)
        y = y.transpose(0, 1) if self.transposed else y
        y = self.e(y, src_key_padding_mask=attention_mask == 0)
        y = y.transpose(0, 1) if self.transposed else y
        weight = attention_mask[..., None].double()
        z: Tensor = self.h((y * weight).sum(1) / weight.sum(1))
        return z


@pytest.mark.sweep
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("repair", ["none", "refit"])
@pytest.mark.parametrize("matcher", ["zip", "permute"])
def test_rows_inside_of_attention_are_told_apart(
    matcher: str, repair: str, transposed: bool
) -> None:
    models = [Attends(seed, transposed) for seed in (0, 1)]
    states = [
        zipfx.zip(models, batches(length), matcher=matcher, repair=repair, progress=False)
        for length in (6, 11)
    ]
    one, two = (list(m.state_dict().values()) for m in states)
    assert max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True)) < 1e-9


def test_rows_in_no_known_order_are_none() -> None:
    whole = torch.randn(6, 3)
    assert by_position(whole, whole[[0, 5]], 3, 1) is None
    assert by_position(whole, whole[:3], 3, 1) is None
    assert spread(M == 1, (6, 8), (1,), turned=None) is None
    turned = spread(M == 1, (6, 8), (1,), turned=True)
    assert turned is not None
    assert turned.flatten().tolist() == (M == 1).T.flatten().tolist()


class Blind(Reader):
    """Its mask has a name that tells nothing."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, lengths)


@pytest.mark.parametrize("repair", ["none", "refit"])
def test_a_function_tells_what_counts(repair: str) -> None:
    models = [Blind(seed) for seed in (0, 1)]
    states = []
    for length in (6, 11):
        data = [{"input_ids": b["input_ids"], "lengths": b["attention_mask"]}
                for b in batches(length)]  # fmt: skip
        merged = zipfx.zip(models, data, progress=False, repair=repair, max_samples=40,
                           mask=lambda batch: batch["lengths"] == 1)  # fmt: skip
        states.append(merged.state_dict())
    assert max(error(states[0][key], states[1][key]) for key in states[0]) < 1e-9


def test_a_function_stands_before_the_attention_mask() -> None:
    models = [Reader(seed) for seed in (0, 1)]
    found = [zipfx.zip(models, batches(11), progress=False, mask=mask).state_dict()
             for mask in (None, lambda batch: None)]  # fmt: skip
    assert max(error(found[0][key], found[1][key]) for key in found[0]) > 1e-3


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (7, "mask is a int: it must be a function of a batch"),
        (lambda batch: batch["nothing"], "mask fails on a batch, a dict: .*nothing"),
        (lambda batch: 3, r"mask gave int for a batch of 16 samples: .*\(samples, positions\)"),
        (lambda batch: torch.ones(3, 6), r"mask gave \(3, 6\) for a batch of 16 samples"),
        (lambda batch: torch.ones(16), r"mask gave \(16,\) for a batch of 16 samples"),
        (lambda batch: batch["input_ids"], "values other than 0 and 1"),
    ],
)
def test_what_is_no_mask_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(zipfx.ZipError, match=message):
        zipfx.zip([Reader(0), Reader(1)], batches(6), progress=False, mask=mask)


def test_it_would_without_the_mask() -> None:
    models = [Blind(seed) for seed in (0, 1)]
    states = []
    for length in (6, 11):
        data = [{"input_ids": b["input_ids"], "lengths": b["attention_mask"]}
                for b in batches(length)]  # fmt: skip
        states.append(zipfx.zip(models, data, progress=False).state_dict())
    assert max(error(states[0][key], states[1][key]) for key in states[0]) > 1e-3


def test_where_positions_are_others_it_is_said() -> None:
    class Classified(Reader):
        """With a position of its own in front, which the mask does not have."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            y = self.table(input_ids)
            y = torch.cat([y.mean(1, keepdim=True), y], 1)
            z: Tensor = self.h((y + self.b(self.a(y).relu()))[:, 0])
            return z

    def noted(models: list[nn.Module], data: Any) -> list[str]:
        notes = zipfx.zip(models, data, progress=False).meta["zipfx"].notes
        return [n for n in notes if n.startswith("positions that the mask leaves out")]

    assert len(noted([Classified(0), Classified(1)], batches(6))) == 1
    assert noted([Reader(0), Reader(1)], batches(6)) == []
    square = [{k: t[:6] for k, t in b.items()} for b in batches(6)]
    assert len(noted([Reader(0), Reader(1)], square)) == 1
