"""Singular vectors that modules keep of their weights fit the merged ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error, notes

NOTE = "singular vectors of a weight, computed for the merged one: "


class Normed(nn.Module):
    """A convolution of spectral norm 1, with vectors of its own that training iterates."""

    both, frozen, column = True, False, False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.randn(outputs) / 10)
        self.keep("u", F.normalize(torch.randn(outputs), dim=0))
        if self.both:
            self.keep("v", F.normalize(torch.randn(inputs * 9), dim=0))
        self.train()
        for _ in range(50):
            self.normed()
        self.eval()

    def keep(self, name: str, value: Tensor) -> None:
        value = value[:, None] if self.column else value
        if self.frozen:
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            self.register_buffer(name, value)

    def normed(self) -> Tensor:
        rows = self.weight.flatten(1)
        u: Any = self.u
        u = u.flatten()
        v = self.v.flatten() if self.both else F.normalize(rows.T @ u, dim=0)  # type: ignore[operator]
        if self.training:
            with torch.no_grad():
                v = F.normalize(rows.T @ u, dim=0)
                u = F.normalize(rows @ v, dim=0)
                self.u.copy_(u.reshape(self.u.shape))  # type: ignore[operator]
                if self.both:
                    self.v.copy_(v.reshape(self.v.shape))  # type: ignore[operator]
        return self.weight / torch.dot(u, rows @ v)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.normed(), self.bias, padding=1)


class Single(Normed):
    both = False


class Frozen(Normed):
    frozen = True


class Column(Normed):
    column = True


KINDS = [Normed, Single, Frozen, Column]


def net(kind: type[Normed], seed: int) -> Any:
    torch.manual_seed(seed)
    layers = kind(3, 16), nn.ReLU(), kind(16, 8), nn.ReLU()
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers, *ends).eval()


def images() -> list[Tensor]:
    return [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def norm(layer: Any) -> float:
    return float(torch.linalg.matrix_norm(layer.normed().detach().flatten(1), 2))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial", ["4", None])
def test_renewed(kind: type[Normed], partial: str | None) -> None:
    models = [net(kind, 0), net(kind, 1)]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    merged = zipfx.zip(models, images(), partial=partial, repair="none", progress=False)
    (note,) = notes(merged, NOTE)
    names = ["0.u", "0.v", "2.u", "2.v"] if kind.both else ["0.u", "2.u"]
    assert note == NOTE + ", ".join(names)
    for path in ("0", "2"):
        layer = net(kind, 2)[int(path)]
        layer.load_state_dict(merged.get_submodule(path).state_dict())
        assert abs(norm(layer) - 1) < 1e-4
        assert abs(float(layer.u.norm()) - 1) < 1e-5
        assert layer.u.shape == models[0][0].u.shape or path == "2"
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_stays(kind: type[Normed]) -> None:
    """Of a model and its permuted self, to the bit where the merge is."""
    model, x = net(kind, 0), images()[0]
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged = zipfx.zip([model, twin], images(), matcher="permute", repair="none", progress=False)
    assert error(model(x), merged(x)) < 1e-6
    assert not notes(merged, NOTE)


class Positive(nn.Module):
    """A constant vector of unit length that happens to lead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(16, 16) / 10)
        self.register_buffer("mean", torch.full((16,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x - (x * self.mean).sum(-1, keepdim=True), self.weight)


def test_constants_are_none() -> None:
    def small(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), Positive(), nn.Linear(16, 3)).eval()

    data = [torch.randn(32, 4) for _ in range(3)]
    merged: Any = zipfx.zip([small(0), small(1)], data, repair="none", progress=False)
    assert not notes(merged, NOTE)
    assert torch.equal(merged.get_submodule("2").mean, torch.full((16,), 0.25))
