"""The numeric check: what changes the function is pinned."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import zipfx


class Escape(nn.Module):
    """A cumulative sum over the channels, taken in numpy, where labels can not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.relu(self.b(in_numpy(self.a(x)))))
        return y


@torch.fx.wrap
def in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.cumsum(x.detach().numpy(), -1))


def test_what_labels_can_not_see_is_pinned_by_the_numeric_check() -> None:
    torch.manual_seed(0)
    model, x = Escape(), torch.randn(5, 3)
    blind = zipfx.analyze(model, x, verify=False)
    assert [s.name for s in blind] == ["a"]  # wrong, and only the check can know
    spaces = zipfx.analyze(model, x)
    assert not len(spaces)
    reasons = {p.parameter: p.reason for p in spaces.pinned}
    assert "numeric check" in reasons["a.weight"] or "numeric check" in reasons["a.bias"]
