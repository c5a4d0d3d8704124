"""FLOPs are counted, those inside fused kernels as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zipfx


class Fused(nn.Module):
    """Kernels that torch's FLOP counter can not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Linear(5, 8), nn.LSTM(8, 8, batch_first=True)
        self.m, self.h = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(self.e(x))[0]
        out: Tensor = self.h(self.m(y, y, y)[0])
        return out


def test_flops_inside_fused_kernels_count() -> None:
    merged = zipfx.zip([Fused(), Fused()], [torch.randn(4, 6, 5)], progress=False)
    attention = 4 * 8 * 8 + 2 * 6 * 8  # projections; scores and sums, for each of 6 steps
    by_hand = 2 * 6 * (5 * 8 + 4 * 8 * (8 + 8) + attention + 8 * 3)
    assert merged.meta["zipfx"].flops == by_hand


def test_flops_are_of_one_sample_also_beside_what_has_none() -> None:
    class Masked(Fused):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * mask)

    data = [{"x": torch.randn(4, 6, 5), "mask": torch.ones(6, 5)}]
    merged = zipfx.zip([Masked(), Masked()], data, progress=False)
    plain = zipfx.zip([Fused(), Fused()], [torch.randn(4, 6, 5)], progress=False)
    assert merged.meta["zipfx"].flops == plain.meta["zipfx"].flops
