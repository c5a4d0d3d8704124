"""The numeric check: what changes the function is pinned."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, fx, nn

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


class OnlyFloat32(nn.Module):
    """As a kernel that has no float64."""

    def __init__(self, escape: bool = False) -> None:
        super().__init__()
        self.a, self.h, self.escape = nn.Linear(3, 6), nn.Linear(6, 2), escape

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.dtype != torch.float32:
            raise RuntimeError("Expected Float32, got Double")
        y = y.relu()
        if self.escape:  # what labels can not see
            y = torch.from_numpy(y.detach().numpy() * np.arange(6, dtype=np.float32))
        z: Tensor = self.h(y)
        return z


def test_what_does_not_run_in_float64_is_checked_in_its_own_dtype() -> None:
    class Leaf(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, OnlyFloat32) or super().is_leaf_module(m, name)

    x = torch.randn(4, 3)
    for escape in (False, True):
        model = nn.Sequential(OnlyFloat32(escape))
        spaces = zipfx.analyze(model, x, tracer=Leaf())
        assert [s.size for s in spaces] == ([] if escape else [6])
        (note,) = [n for n in spaces.notes if n.startswith("checked in its own dtype")]
        assert "Expected Float32, got Double" in note
        twin = spaces.permuted(model, spaces.random_permutations(1))
        assert torch.allclose(model(x), twin(x), atol=1e-5)
