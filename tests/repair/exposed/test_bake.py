"""Weights that forward computes from parameters: refitted as the weights that they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error, notes

NOTE = "weights that forward computed, plain parameters since they were refitted: "
LEFT = "not refitted: "


class Layer(nn.Module):
    """y = weight(..) x + bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 10)
        self.build(inputs, outputs)

    def build(self, inputs: int, outputs: int) -> None:
        pass

    def weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class LowRank(Layer):
    def build(self, inputs: int, outputs: int) -> None:
        self.a = nn.Parameter(torch.randn(2, inputs) / 3)
        self.b = nn.Parameter(torch.randn(outputs, 2) / 3)

    def weight(self) -> Tensor:
        return self.w + self.b @ self.a


class Mixture(Layer):
    """Of banks, by a softmax of coefficients, asked for the dtype of the input."""

    def build(self, inputs: int, outputs: int) -> None:
        self.banks = nn.Parameter(torch.randn(3, outputs, inputs) / inputs**0.5)
        self.mix = nn.Parameter(torch.randn(3))
        self.soft = nn.Softmax(0)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.einsum("k,koi->oi", self.soft(self.mix), self.banks) + self.w
        return F.linear(x, weight.to(x.dtype), self.bias)


class Spline(Layer):
    """Of a fixed basis, as layers of splines have it."""

    def build(self, inputs: int, outputs: int) -> None:
        self.c = nn.Parameter(torch.randn(outputs, inputs, 4) / inputs**0.5)
        self.register_buffer("basis", torch.tensor([0.1, 0.4, 0.4, 0.1]))

    def weight(self) -> Tensor:
        return (self.c * self.basis).sum(-1) + self.w


class Masked(Layer):
    """As in autoregressive nets: what is masked must stay so."""

    def build(self, inputs: int, outputs: int) -> None:
        self.register_buffer("mask", torch.ones(outputs, inputs).tril(inputs // 2))

    def weight(self) -> Tensor:
        return self.w * self.mask


class Asking(Layer):
    """Asks for more than its weight's values, in every way there is."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.w.dtype).to(self.w.device).to(self.w).type_as(self.w)
        x = x.reshape(-1, self.w.shape[1]) + self.w.new_zeros(1)
        return F.linear(x, self.w, self.bias) * self.w.size(0) / self.w.shape[0]


class Turned(Layer):
    """Parts of one weight, one of them the other way round."""

    def build(self, inputs: int, outputs: int) -> None:
        half = outputs // 2
        self.w = nn.Parameter(torch.randn(outputs * inputs) / inputs**0.5)
        self.size = half, inputs

    def forward(self, x: Tensor) -> Tensor:
        half, n = self.size
        first = F.linear(x, self.w[: half * n].view(half, n), self.bias[:half])
        return torch.cat([first, F.linear(x, self.w[half * n :].view(n, -1).t())], -1)


class Twice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w.view(self.w.shape)) + F.linear(x.abs(), self.w[:, :])


class Noisy(Layer):
    def weight(self) -> Tensor:
        return self.w + torch.randn_like(self.w) / 1e3


class Dynamic(Layer):
    """By the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w * x.mean().sigmoid(), self.bias)


class Written(Layer):
    """By what forward writes to."""

    def build(self, inputs: int, outputs: int) -> None:
        self.register_buffer("n", torch.ones(()))

    def weight(self) -> Tensor:
        self.n.add_(1)
        return self.w / self.n.clamp(max=2)


class InPlace(Layer):
    def weight(self) -> Tensor:
        return (self.w * 2).mul_(0.5)


class Scaled(nn.Conv2d):
    """Weights that are standardised first, as in nets without norms."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) * 6), self.bias, padding=1)


BAKED = [LowRank, Mixture, Spline]
LEFT_OUT = [Noisy, Dynamic, Written, InPlace]


def net(kind: Callable[[int, int], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [kind(6, 24), nn.ReLU(), kind(24, 24), nn.ReLU(), kind(24, 3)]
    return nn.Sequential(*layers).eval()


def strangers(kind: Callable[[int, int], nn.Module]) -> list[nn.Module]:
    return [net(kind, seed) for seed in (0, 1)]


def data(n: int = 4) -> list[Tensor]:
    return [torch.randn(64, 6, generator=torch.Generator().manual_seed(k)) for k in range(n)]


def off(merged: nn.Module, models: list[nn.Module], x: Tensor) -> float:
    found = merged(x)
    return sum(error(m(x), y) for m, y in zip(models, found, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", BAKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_baked(kind: type[Layer], dtype: torch.dtype, tmp_path: Path) -> None:
    models = [m.to(dtype) for m in strangers(kind)]
    batches = [x.to(dtype) for x in data()]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    plain = zipfx.zip(models, batches, partial="3", repair="none", progress=False)
    merged = zipfx.zip(models, batches, partial="3", progress=False)
    refits = merged.meta["zipfx"].refits
    assert [r.name for r in refits] == ["0", "2", "task_heads.0.4", "task_heads.1.4"]
    assert not notes(merged, LEFT)
    homes = ["baked_0", "baked_1", "task_heads.0.baked_0", "task_heads.1.baked_0"]
    parameters = dict(merged.named_parameters())
    both = list(zip(refits, homes, strict=True))
    baked = {r.name: home for r, home in both if home in parameters}
    assert len(baked) >= 2
    assert all(r.changed for r in refits if r.name in baked)
    assert notes(merged, NOTE) == [NOTE + ", ".join(f"{n} (now {p})" for n, p in baked.items())]
    for r, home in both:
        assert (f"{r.name}.w" in parameters) == (r.name not in baked)
        assert home not in parameters or parameters[home].dtype == dtype
    x = batches[0]
    assert off(merged, models, x) < 0.6 * off(plain, models, x)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    # it is a merge like any other
    zipfx.save(merged, tmp_path / "merged")
    loaded = zipfx.load(tmp_path / "merged", [net(kind, k).to(dtype) for k in (5, 6)])
    twin = copy.deepcopy(loaded)
    zipfx.save(twin, tmp_path / "again")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "again").read_bytes()
    for one in (loaded, twin):
        assert all(map(torch.equal, one(x), merged(x)))
        assert torch.equal(zipfx.head(one, 1)(x), merged(x)[1])


def test_as_good_as_plain() -> None:
    """Refitted, it is the merge of the same nets with plain weights."""

    def folded(model: nn.Module) -> nn.Module:
        layers: list[nn.Module] = []
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, Layer):
                linear = nn.Linear(layer.w.shape[1], layer.w.shape[0])
                linear.load_state_dict({"weight": layer.weight(), "bias": layer.bias})
                layers.append(linear)
            else:
                layers.append(layer)
        return nn.Sequential(*layers).eval()

    models, x = strangers(Spline), data()[0]
    merged = zipfx.zip(models, data(), partial="3", progress=False)
    plain = zipfx.zip([folded(m) for m in models], data(), partial="3", progress=False)
    assert off(merged, models, x) < 1.3 * off(plain, models, x)


def test_what_is_not_refitted_stays_computed() -> None:
    """Law 7 holds where nothing was refitted, and where a refit changes nothing."""
    model, x = net(LowRank), data()[0]
    for repair in ("none", "refit"):
        merged = zipfx.zip([model, copy.deepcopy(model)], data(), repair=repair, progress=False)
        assert not notes(merged, NOTE)
        assert set(merged.state_dict()) == set(model.state_dict())
        assert error(model(x), merged(x)) < 1e-6


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_left_computed(kind: type[Layer]) -> None:
    """What is random, depends on data, or is written to is no weight."""
    merged = zipfx.zip(strangers(kind), data(), partial="3", progress=False)
    assert not notes(merged, NOTE)
    assert len(notes(merged, LEFT)) == 1
    assert not [name for name in merged.state_dict() if "baked" in name]


def test_views_are_written_through() -> None:
    """A view of a parameter needs no other one: law 7 holds."""
    models, x = strangers(Turned), data()[0]
    plain = zipfx.zip(models, data(), repair="none", progress=False)
    merged = zipfx.zip(models, data(), progress=False)
    assert not notes(merged, NOTE)
    assert not notes(merged, LEFT)
    assert len(merged.meta["zipfx"].refits) == 6
    mean = (models[0](x) + models[1](x)) / 2
    assert error(mean, merged(x)) < 0.7 * error(mean, plain(x))
    fresh = net(Turned, 5)
    fresh.load_state_dict(merged.state_dict())
    assert error(merged(x), fresh(x)) < 1e-6
    twice = zipfx.zip(strangers(Twice), data(), progress=False)
    assert len(notes(twice, LEFT)) == 1


def test_masks() -> None:
    """A refit does not open what a mask has closed."""
    models, x = strangers(Masked), data()[0]
    plain = zipfx.zip(models, data(), partial="3", repair="none", progress=False)
    merged = zipfx.zip(models, data(), partial="3", progress=False)
    assert off(merged, models, x) < off(plain, models, x)
    layer: Any = plain.get_submodule("0")
    closed = (layer.w * layer.mask) == 0
    assert closed.any()
    assert not merged.baked_0[closed].any()
    assert merged.baked_0[~closed].all()


@pytest.mark.parametrize("kind", [Asking])
def test_questions_keep_no_layer_out(kind: type[Layer]) -> None:
    merged = zipfx.zip(strangers(kind), data(), partial="3", progress=False)
    assert len(merged.meta["zipfx"].refits) == 4
    assert not notes(merged, LEFT)
    assert not notes(merged, NOTE)


def test_convolutions() -> None:
    def small(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = Scaled(3, 16, 3), nn.ReLU(), Scaled(16, 16, 3), nn.ReLU()
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
        ).eval()

    models = [small(0), small(1)]
    images = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    plain = zipfx.zip(models, images, partial="4", repair="none", progress=False)
    merged = zipfx.zip(models, images, partial="4", progress=False)
    assert notes(merged, NOTE) == [NOTE + "0 (now baked_0), 2 (now baked_1)"]
    assert off(merged, models, images[0]) < off(plain, models, images[0])


class Shared(nn.Module):
    """One bank for two layers, of which one has the name that we would give."""

    def __init__(self) -> None:
        super().__init__()
        self.baked_0 = nn.Linear(6, 24)
        self.bank = nn.Parameter(torch.randn(4, 24, 24) / 5)
        self.coefficients = nn.Parameter(torch.randn(3, 4))
        self.h = nn.Linear(24, 3)

    def weight(self, i: int) -> Tensor:
        return torch.einsum("k,koi->oi", self.coefficients[i], self.bank)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.baked_0(x))
        x = F.relu(F.linear(x, self.weight(0)))
        weight = self.weight(1)  # for two layers: no refit has it
        x = F.relu(F.linear(F.relu(F.linear(x, weight)), weight))
        return self.h(F.relu(F.linear(x, self.weight(2))))


def test_shared_parts(tmp_path: Path) -> None:
    """What others still read stays; names that are taken are not used."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Shared().eval())
    merged = zipfx.zip(models, data(), progress=False)
    baked = [name for name, _ in merged.named_parameters() if name.startswith("baked")]
    assert baked == ["baked_1", "baked_2", "baked_0.weight", "baked_0.bias"]
    assert merged.bank.shape == (4, 24, 24)
    zipfx.save(merged, tmp_path / "merged")
    loaded = zipfx.load(tmp_path / "merged", models)
    assert torch.equal(loaded(data()[0]), merged(data()[0]))


def test_other_models_are_not_read_as_these(tmp_path: Path) -> None:
    models = strangers(LowRank)
    merged = zipfx.zip(models, data(), progress=False)
    zipfx.save(merged, tmp_path / "merged")
    with pytest.raises(zipfx.ZipError, match=r"it has no node 'add'"):
        zipfx.load(tmp_path / "merged", strangers(Masked))
