"""Features that are moved, chosen by data, or written to where others lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.blocks import Net, Size, data, law1, parameter, sizes


@pytest.mark.xfail(strict=True, reason="the index of a feature is pinned where it is used")
def test_experts_that_are_chosen_by_their_indices() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        most, index = s.g(x).topk(2, -1)
        gate = x.new_zeros(len(x), 3).scatter(1, index, most.softmax(-1))
        return torch.einsum("be,eoi,bi->bo", gate, s.w, x)

    assert (3, ()) in sizes(Net(forward, g=nn.Linear(6, 3), w=parameter(3, 7, 6)), data(6))


CHOSEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # y: (2, 6 tokens, 8 features); x: inputs
    "largest": lambda y, x: y.topk(3, 2)[0].sum(2, keepdim=True) * y,
    "sorted": lambda y, x: y - y.sort(2)[0][..., 3:4],
    "quantile": lambda y, x: y - y.quantile(0.5, dim=2, keepdim=True),
    "kthvalue": lambda y, x: y * (y > y.kthvalue(3, 2, keepdim=True)[0]),
    "moments": lambda y, x: torch.mul(*torch.std_mean(y, 2, keepdim=True)) * y,
    "range": lambda y, x: torch.mul(*y.aminmax(dim=2, keepdim=True)) * y,
    "largest tokens": lambda y, x: y.topk(3, 1)[0],
    "token of a feature": lambda y, x: y.gather(1, y.argmax(1, keepdim=True)),
    "token of a sample": lambda y, x: y[torch.arange(len(y)), x.sum(2).argmax(1)],
    "tokens in another order": lambda y, x: y[:, x[0].sum(1).argsort()],
    "masked tokens": lambda y, x: y[x.sum(2) > 0].sum(0, keepdim=True) + y,
    "scattered": lambda y, x: y.scatter_add(1, x.argmax(1)[:, :1, None].expand(-1, 1, 8), y[:, :1]),
    "added": lambda y, x: y.index_add(1, x[0, :, 0].argsort()[:2], y[:, :2]),
    "put": lambda y, x: y.index_put((x.sum(2) > 0,), y.new_ones(())),
    "put rows": lambda y, x: y.index_put((x[:, 0, 0].argsort(),), y[:1].flip(1)),
    "distances": lambda y, x: torch.cdist(y, 1 + y) @ y,
    "sampled": lambda y, x: (
        F.grid_sample(y.mT[..., None], x[:, None, :, :2], align_corners=False)[:, :, 0].mT
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CHOSEN)
def test_what_data_chooses_on_one_axis_leaves_the_others(name: str) -> None:
    model = Net(lambda s, x: s.h(CHOSEN[name](s.a(x), x)), a=nn.Linear(5, 8), h=nn.Linear(8, 3))
    assert sizes(model, data(6, 5)) == [(8, ())]
    law1(model, 6, 5)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda y, x: y.sort(2)[0],
        lambda y, x: y.gather(2, x[..., :1].argmax(1, keepdim=True).expand(-1, 6, 8)),
        lambda y, x: y[:, :, x[0, 0].argsort()[:1].expand(8)],
        lambda y, x: y * y.topk(3, 2)[1][..., :1],
        lambda y, x: y.index_put((x.argmax(0)[:2, :1] * 0,), y.new_ones(())),
        lambda y, x: y * torch.zeros_like(y).scatter(2, y.argmax(2, keepdim=True), 1.0),
    ],
    ids="ranks gathered listed index put scattered".split(),
)
def test_what_data_chooses_among_features_is_pinned_or_in_no_order(chosen: Any) -> None:
    law1(Net(lambda s, x: s.h(chosen(s.a(x), x)), a=nn.Linear(5, 8), h=nn.Linear(8, 3)), 6, 5)


def test_an_operation_that_writes_and_returns() -> None:
    """rrelu writes down the slopes that it drew."""
    model = Net(lambda s, x: s.h(F.rrelu(s.a(x))), a=nn.Linear(5, 6), h=nn.Linear(6, 3))
    assert sizes(model, data(5)) == [(6, ())]
    law1(model, 5)


def test_some_of_repeated_features_are_written_to() -> None:
    """All features took part in the writing, but not everywhere where they lie."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        y = torch.cat([y, y], 1)
        y[:, :2] *= 0.5
        return s.h(s.n(y))

    model = Net(forward, a=nn.Linear(4, 6), n=nn.GroupNorm(1, 12), h=nn.Linear(12, 2))
    law1(model, 4)


@pytest.mark.parametrize(
    ("values", "spaces"), [((2.0, 0.0), [(3, ()), (3, ())]), ((2.0, 2.0), [(6, ())])]
)
def test_a_mask_is_written_in_place(values: tuple[float, float], spaces: list[Size]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        mask = x.new_zeros(6)
        mask[:3], mask[3:] = values
        return s.h(s.a(x) * mask)

    model = Net(forward, a=nn.Linear(4, 6), h=nn.Linear(6, 2))
    law1(model, 4)
    assert sizes(model, data(4)) == spaces
