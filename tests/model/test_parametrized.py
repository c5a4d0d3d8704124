"""Weights that modules compute (`torch.nn.utils.parametrize`): merged and refitted as what they
are, and computed again in the merge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations as known
from torch.nn.utils import parametrize

import zipfx
from tests.helpers.laws import error, notes

MOVED = "moved to the nearest weight that its parametrization can give: "
PLAIN = "plain, since its parametrization has no values that give the merged weight: "
LEFT = "not refitted: "

Wrap = Callable[[nn.Module], nn.Module]


class LowRank(nn.Module):
    """Has no way back."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.randn(shape) / 3) for shape in ((2, columns), (rows, 2))
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Doubled(nn.Module):
    """Has one."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Wrong(Doubled):
    """Has one that leads elsewhere."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class Failing(Doubled):
    def right_inverse(self, weight: Tensor) -> Tensor:
        raise NotImplementedError


class Bounded(nn.Module):
    """Gives weights below 1 only."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.clamp(-0.999, 0.999).atanh()


class Masking(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(columns) > 0).float().expand(rows, -1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class Summed(nn.Module):
    """Of two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight / 3, weight * 2 / 3


def by(make: Callable[..., nn.Module], sized: bool = False) -> Wrap:
    def wrap(layer: nn.Module) -> nn.Module:
        weight: Any = layer.weight
        one = make(*weight.shape) if sized else make()
        parametrize.register_parametrization(layer, "weight", one)
        return layer

    return wrap


def twice(layer: nn.Module) -> nn.Module:
    """Two, one after the other, of a weight; and one of its bias."""
    by(Doubled)(known.weight_norm(layer))
    parametrize.register_parametrization(layer, "bias", Doubled())
    return layer


def plain(layer: nn.Module) -> nn.Module:
    return layer


EXACT: dict[str, Wrap] = {
    "weight_norm": known.weight_norm,
    "doubled": by(Doubled),
    "summed": by(Summed),
    "twice": twice,
}
NEAREST: dict[str, Wrap] = {
    "spectral": known.spectral_norm,
    "spectral, columns": lambda layer: known.spectral_norm(layer, dim=1),
    "orthogonal": known.orthogonal,
    "cayley": lambda layer: known.orthogonal(layer, orthogonal_map="cayley"),
    "bounded": by(Bounded),
}
NO_WAY: dict[str, Wrap] = {
    "lowrank": by(LowRank, True),
    "wrong": by(Wrong),
    "failing": by(Failing),
    "masking": by(Masking, True),
}
EVERY = EXACT | NEAREST | NO_WAY


def net(wrap: Wrap, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    layers = wrap(nn.Linear(6, 24)), nn.ReLU(), wrap(nn.Linear(24, 24)), nn.ReLU()
    return nn.Sequential(*layers, wrap(nn.Linear(24, 3))).to(dtype).eval()


def pair(wrap: Wrap, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [net(wrap, seed, dtype) for seed in (0, 1)]


def data(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = (torch.randn(64, 6, generator=torch.Generator().manual_seed(k)) for k in range(4))
    return [x.to(dtype) for x in drawn]


def folded(model: nn.Module) -> nn.Module:
    """The same with plain weights."""
    twin = net(plain, 0, next(model.parameters()).dtype)
    for path in "024":
        layer, own = model.get_submodule(path), twin.get_submodule(path)
        own.load_state_dict({name: getattr(layer, name).detach() for name in ("weight", "bias")})
    return twin


def merge(models: list[nn.Module], **settings: Any) -> Any:
    batches = data(next(models[0].parameters()).dtype)
    return zipfx.zip(models, batches, progress=False, **settings)


def off(merged: nn.Module, models: list[nn.Module]) -> float:
    x = data(next(models[0].parameters()).dtype)[0]
    with torch.no_grad():
        return sum(error(m(x), y) for m, y in zip(models, merged(x), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("matcher", ["permute", "zip"])
def test_law_3(name: str, matcher: str) -> None:
    model = net(EVERY[name], 0, torch.float64)
    x = data(torch.float64)[0]
    spaces = zipfx.analyze(model, x)
    wrapped = spaces.permuted(model, spaces.random_permutations(1))
    merged = merge([model, wrapped], matcher=matcher, repair="none")
    assert error(model(x), merged(x)) < 1e-6


class Late(nn.Module):
    """A convolution of spectral norm behind the cut, whose matrix has rows of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 12, 3, padding=1)
        self.c = known.spectral_norm(nn.Conv2d(12, 12, 3), dim=dim)
        self.h = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.c(torch.relu(self.a(x))))
        return self.h(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_heads_stay_exact(dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Late(dim).eval().double(), torch.randn(16, 3, 6, 6).double()
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged: Any = zipfx.zip(
        [model, twin], [x], partial="a", matcher="permute", repair="none", progress=False
    )
    for y in merged(x):
        assert error(model(x), y) < 1e-9
    assert not notes(merged, PLAIN)


@pytest.mark.sweep
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_ones_merge_as_plain_ones(name: str, dtype: torch.dtype) -> None:
    """To rounding; and a full zip has the models' own parameters (law 7)."""
    models = pair(EXACT[name], dtype)
    before = [copy.deepcopy(m.state_dict()) for m in models]
    for repair in ("none", "refit"):
        merged = merge(models, partial="3", repair=repair)
        other = merge([folded(m) for m in models], partial="3", repair=repair)
        x = data(dtype)[0]
        assert error(torch.cat(other(x)), torch.cat(merged(x))) < (
            1e-4 if dtype == torch.float32 else 1e-10
        )
        assert not merged.meta["zipfx"].notes
        fitted = [r.name for r in merged.meta["zipfx"].refits]
        assert fitted == [r.name for r in other.meta["zipfx"].refits]
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*EXACT, *NEAREST])
@pytest.mark.parametrize("repair", ["none", "refit"])
def test_law_7(name: str, repair: str) -> None:
    models = pair(EVERY[name])
    merged = merge(models, repair=repair)
    fresh = net(EVERY[name], 7)
    fresh.load_state_dict(merged.state_dict())
    x = data()[0]
    assert error(merged(x), fresh(x)) < 1e-6


@pytest.mark.sweep
@pytest.mark.parametrize("name", NEAREST)
def test_nearest_ones(name: str) -> None:
    """Weights are what the parametrization can give, refitted or not, and it is said."""
    models = pair(NEAREST[name])
    none = merge(models, partial="3", repair="none")
    merged = merge(models, partial="3")
    assert not notes(merged, LEFT)
    assert [r.name for r in merged.meta["zipfx"].refits][:2] == ["0", "2"]
    assert off(merged, models) < off(none, models)
    for one in (none, merged):
        layer = one.get_submodule("2")
        if name.startswith("spectral"):
            assert abs(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) - 1) < 1e-4
            step = layer.parametrizations.weight[0]
            for vector in (step._u, step._v):
                assert abs(float(vector.norm()) - 1) < 1e-5
        elif name == "bounded":
            assert float(layer.weight.detach().abs().max()) < 1
        else:
            w = layer.weight.detach()
            assert float((w.T @ w - torch.eye(24)).abs().max()) < 1e-5
    if name != "bounded":
        assert len(notes(merged, MOVED)) == 1


@pytest.mark.parametrize("name", NO_WAY)
def test_no_way_back(name: str) -> None:
    models = pair(NO_WAY[name])
    none = merge(models, partial="3", repair="none")
    merged = merge(models, partial="3")
    assert notes(merged, PLAIN) == [
        PLAIN + "0.weight, 2.weight, task_heads.0.4.weight, task_heads.1.4.weight"
    ]
    assert not notes(merged, LEFT)
    assert not [n for n in merged.state_dict() if "parametrizations" in n]
    assert off(merged, models) < off(none, models)
    if name == "masking":
        closed = none.get_submodule("0").weight == 0
        assert closed.any()
        assert not merged.get_submodule("0").weight[closed].any()


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("partial", ["3", None])
def test_files_and_copies(name: str, partial: str | None, tmp_path: Path) -> None:
    models, x = pair(EVERY[name]), data()[0]
    merged = merge(models, partial=partial)
    zipfx.save(merged, tmp_path / "merged")
    loaded = zipfx.load(tmp_path / "merged", [net(EVERY[name], k) for k in (5, 6)])
    zipfx.save(loaded, tmp_path / "again")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "again").read_bytes()
    results = merged(x) if partial else [merged(x)]
    for one in (loaded, copy.deepcopy(merged), copy.deepcopy(loaded)):
        found = one(x) if partial else [one(x)]
        assert all(map(torch.equal, found, results))
        assert list(one.state_dict()) == list(merged.state_dict())
    if partial:
        assert torch.equal(zipfx.head(loaded, 0)(x), results[0])


@pytest.mark.parametrize("name", ["weight_norm", "spectral"])
def test_low_precision(name: str) -> None:
    models = pair(EVERY[name], torch.bfloat16)
    merged = merge(models, partial="3")
    assert {t.dtype for t in merged.parameters()} == {torch.bfloat16}
    assert not notes(merged, LEFT)
    assert off(merged, models) < off(merge(models, partial="3", repair="none"), models)


def test_trains_on() -> None:
    """What the merge computes, it computes with gradients."""
    merged = merge(pair(known.spectral_norm), partial="3").train()
    sum(y.square().sum() for y in merged(data()[0])).backward()
    originals = [p for n, p in merged.named_parameters() if n.endswith("original")]
    assert len(originals) == 2
    assert all(p.grad is not None and p.grad.any() for p in originals)


class Own(nn.Module):
    """Parametrized tensors of the model itself, of a module of one's own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 6))
        self.inner = nn.Module()
        self.inner.v = nn.Parameter(torch.randn(24, 24))
        self.register_buffer("scale", torch.rand(24) + 0.5)
        self.h = nn.Linear(24, 3)
        parametrize.register_parametrization(self, "w", Doubled())
        parametrize.register_parametrization(self.inner, "v", Summed())
        parametrize.register_parametrization(self, "scale", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.w)) * self.scale
        return self.h(F.relu(F.linear(x, self.inner.v)))  # type: ignore[arg-type]


def test_of_modules_of_ones_own(tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Own().eval())
    x = data()[0]
    merged = merge(models)
    assert [r.name for r in merged.meta["zipfx"].refits] == ["w", "inner.v", "h"]
    fresh = Own().eval()
    fresh.load_state_dict(merged.state_dict())
    assert error(merged(x), fresh(x)) < 1e-6
    zipfx.save(merged, tmp_path / "merged")
    assert torch.equal(zipfx.load(tmp_path / "merged", [Own(), Own()])(x), merged(x))


def test_zero_rows() -> None:
    """A row of nothing has no direction: weight norm gives it none that is NaN."""
    models = [net(plain, seed) for seed in (0, 1)]
    for model in models:
        for layer in (model[0], model[2]):  # type: ignore[index]
            layer.weight.data[3] = 0
            layer.bias.data[3] = -1
            known.weight_norm(layer)
            layer.parametrizations.weight.original1.data[3] = 1.0  # it is 0 / 0 else
    merged = merge(models, partial="3")
    assert all(t.isfinite().all() for t in merged.state_dict().values())
    assert all(y.isfinite().all() for y in merged(data()[0]))


def test_ties_stay() -> None:
    """Two layers that share what their weights are computed from still do."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = known.weight_norm(nn.Linear(6, 6)), known.weight_norm(nn.Linear(6, 6))
            ours: Any = self.a.parametrizations
            theirs: Any = self.b.parametrizations
            theirs.weight.original1 = ours.weight.original1

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.b(F.relu(self.a(x)))
            return found

    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Tied().eval())
    merged = merge(models)
    first, second = (merged.get_submodule(n).parametrizations.weight for n in "ab")
    assert first.original1 is second.original1
    assert notes(merged, LEFT) == [LEFT + "a, b"]
    fresh = Tied().eval()
    fresh.load_state_dict(merged.state_dict())
    assert error(merged(data()[0]), fresh(data()[0])) < 1e-6


def test_one_of_them_alone() -> None:
    """A net with weight norm and one without compute the same."""
    models = [net(known.weight_norm, 0), net(plain, 1)]
    for some in (models, models[::-1]):
        merged = merge(some, partial="3")
        both = merge([folded(m) for m in some], partial="3")
        assert error(torch.cat(both(data()[0])), torch.cat(merged(data()[0]))) < 1e-4
        assert not notes(merged, LEFT)


def test_what_can_not_be_computed() -> None:
    class Broken(nn.Module):
        ok = True

        def forward(self, weight: Tensor) -> Tensor:
            if not self.ok:
                raise ValueError("out of order")
            return weight

    models = pair(by(Broken))
    layer: Any = models[1][2]  # type: ignore[index]
    layer.parametrizations.weight[0].ok = False
    with pytest.raises(zipfx.ZipError, match=r"module '2' fails to compute its 'weight': out of"):
        merge(models)
