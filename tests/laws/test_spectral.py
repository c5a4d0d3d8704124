"""Complex numbers and Fourier transforms: their features are found, permuted and averaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fft, nn

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, parameter, sizes
from tests.helpers.laws import EXACT, error, heads_error, merge, run
from zipfx.analysis.spaces.values import Place
from zipfx.observe.observer import Observer

ops = torch.ops.zipfxspectral


@torch.library.custom_op("zipfxspectral::turn", mutates_args=())
def _turn(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def weight(*shape: int, kind: torch.dtype = torch.complex128) -> nn.Parameter:
    """A complex parameter; `net` gives it values."""
    return nn.Parameter(torch.zeros(*shape, dtype=kind))


def net(function: Callable[[Any, Tensor], Tensor], seed: int = 0, **parts: Any) -> Net:
    model = Net(function, **parts)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.is_complex():
            parts_of = torch.randn(*p.shape, 2, generator=generator, dtype=torch.float64)
            p.data.copy_(torch.view_as_complex(parts_of / 2))
    return model


def modrelu(z: Tensor, bias: Tensor) -> Tensor:
    return z * F.relu(z.abs() + bias) / (z.abs() + 1e-3)


# ------------------------------------------------------------------ models
def fourier_operator(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    for low, high, skip in ((s.w1, s.w2, s.s1), (s.w3, s.w4, s.s2)):
        f = fft.rfft2(y)
        g = torch.zeros(x.shape[0], 6, f.shape[-2], f.shape[-1], dtype=f.dtype)
        g[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", f[:, :, :2, :2], low)
        g[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", f[:, :, -2:, :2], high)
        y = F.gelu(fft.irfft2(g, s=y.shape[-2:]) + skip(y))
    return s.h(y)


def adaptive_operator(s: Any, x: Tensor) -> Tensor:
    """Matrices for blocks of features, their parts in one real parameter; in a residual block."""
    y = s.a(x)
    f = fft.rfft2(y, dim=(1, 2), norm="ortho").unflatten(-1, (2, 4))

    def product(z: Tensor, i: int) -> Tensor:
        return torch.einsum("...bi,bio->...bo", z, s.w[i])

    re = F.relu(product(f.real, 0) - product(f.imag, 1) + s.b[0])
    im = F.relu(product(f.imag, 0) + product(f.real, 1) + s.b[1])
    z = torch.view_as_complex(torch.stack([re, im], -1)).flatten(-2)
    return s.h(fft.irfft2(z, s=y.shape[1:3], dim=(1, 2), norm="ortho") + y)


def state_space(s: Any, x: Tensor) -> Tensor:
    u = s.a(x).mT
    length = u.shape[-1]
    step = (-s.decay.exp() + 1j * s.turn) * s.step.exp()[:, None]
    c = torch.view_as_complex(s.c) * (step.exp() - 1) / step
    powers = torch.exp(step[..., None] * torch.arange(length))
    kernel = 2 * torch.einsum("hn,hnl->hl", c, powers).real
    f = fft.rfft(u, n=2 * length) * fft.rfft(kernel, n=2 * length)
    y = fft.irfft(f, n=2 * length)[..., :length] + u * s.d[:, None]
    return s.h(F.gelu(y).mT)


def conjugated(s: Any, x: Tensor) -> Tensor:
    z = modrelu(torch.complex(s.a(x), s.b(x)) @ s.w.conj().mT, s.m)
    z = z * z.conj().roll(1, 1)
    return s.h((z @ s.v.mH).abs())


def complex_attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = (
        torch.polar(F.softplus(a(x)), b(x)) for a, b in ((s.q, s.qi), (s.k, s.ki), (s.v, s.vi))
    )
    return s.h(((q @ k.mH).abs().softmax(-1).to(v.dtype) @ v).imag)


def written_parts(s: Any, x: Tensor) -> Tensor:
    z = torch.zeros(x.shape[0], 6, 6, dtype=torch.complex128)
    z.real.copy_(s.a(x))
    z.imag.copy_(s.b(x).tanh())
    torch.view_as_real(z)[..., 1] *= 2
    return s.h((z * z).imag)


def convolved(s: Any, x: Tensor) -> Tensor:
    return s.h(fft.ifft(modrelu(F.conv1d(fft.fft(s.a(x)), s.w, s.b), s.m)).real)


def inside_numbers(s: Any, x: Tensor) -> Tensor:
    """Pairs of one linear layer's features are complex numbers, which move as wholes."""
    z = torch.view_as_complex(s.a(x).unflatten(-1, (6, 2)).contiguous())
    return s.h(torch.view_as_real(z * z.abs()).flatten(-2))


def global_filter(s: Any, x: Tensor) -> Tensor:
    f = fft.rfft2(s.a(x), norm="ortho") * torch.view_as_complex(s.w)
    return s.h(fft.irfft2(f, s=x.shape[-2:], norm="ortho"))


def all_complex(s: Any, x: Tensor) -> Tensor:
    z = modrelu(F.linear(torch.view_as_complex(x), s.w, s.b), s.m)
    return F.linear(z, s.v)


def linears(names: str, *shape: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(*shape) for name in names.split()}


def convs(**shapes: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(*shape, 1) for name, shape in shapes.items()}


SIX: Size = (6, ())
MODELS: dict[str, tuple[Callable[[], Net], tuple[int, ...], list[Size]]] = {
    "fourier_operator": (
        lambda: net(
            fourier_operator,
            **{f"w{i}": weight(6, 6, 2, 2) for i in (1, 2, 3, 4)},
            **convs(a=(3, 6), s1=(6, 6), s2=(6, 6), h=(6, 3)),
        ),
        (3, 8, 8), [SIX] * 3,
    ),
    "adaptive_operator": (
        lambda: net(
            adaptive_operator, a=nn.Linear(3, 8), h=nn.Linear(8, 3),
            w=parameter(2, 2, 4, 4), b=parameter(2, 2, 4),
        ),
        (4, 4, 3), [(2, ()), (8, (4, 4))],
    ),
    "state_space": (
        lambda: net(
            state_space, a=nn.Linear(3, 6), h=nn.Linear(6, 3), step=parameter(6), d=parameter(6),
            decay=parameter(6, 4), turn=parameter(6, 4), c=parameter(6, 4, 2),
        ),
        (8, 3), [SIX],
    ),
    "conjugated": (
        lambda: net(
            conjugated, **linears("a b", 5, 6), h=nn.Linear(4, 3),
            w=weight(7, 6), m=parameter(7), v=weight(4, 7),
        ),
        (6, 5), [(4, ()), SIX, (7, ())],
    ),
    "complex_attention": (
        lambda: net(complex_attention, **linears("q qi k ki v vi", 5, 6), h=nn.Linear(6, 3)),
        (4, 5), [SIX] * 2,
    ),
    "written_parts": (
        lambda: net(written_parts, **linears("a b", 5, 6), h=nn.Linear(6, 3)),
        (6, 5), [SIX],
    ),
    "convolved": (
        lambda: net(
            convolved, a=nn.Conv1d(3, 6, 1), h=nn.Conv1d(7, 3, 1),
            w=weight(7, 6, 3), b=weight(7), m=parameter(7, 1),
        ),
        (3, 8), [SIX, (7, ())],
    ),
    "inside_numbers": (
        lambda: net(inside_numbers, a=nn.Linear(5, 12), h=nn.Linear(12, 3)), (5,), [SIX],
    ),
    "global_filter": (
        lambda: net(global_filter, **convs(a=(3, 6), h=(6, 3)), w=parameter(6, 4, 3, 2)),
        (3, 4, 4), [SIX],
    ),
    "all_complex": (
        lambda: net(all_complex, w=weight(7, 4), b=weight(7), m=parameter(7), v=weight(3, 7)),
        (4, 2), [(7, ())],
    ),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_spaces_of_complex_models(name: str) -> None:
    make, shape, expected = MODELS[name]
    model = make()
    assert sizes(model, data(*shape)) == expected
    assert sorted((s.size, s.blocks) for s in zipfx.analyze(model, data(*shape))) == expected
    law1(model, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_law_3_of_complex_models(name: str) -> None:
    make, shape, _ = MODELS[name]
    model = make()
    law3(model, *shape, seeds=range(2))
    for cut in dict(model.named_children()):
        law3(model, *shape, seeds=[0], partial=cut)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "matcher",
    [
        "zip", "weights", "optimal", zipfx.Permute(similarity="cosine"),
        zipfx.Permute(similarity="covariance"), zipfx.Zip(unmerge="lstsq"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["conjugated", "all_complex", "fourier_operator"])
def test_every_matcher_finds_the_twin_of_a_complex_model(name: str, matcher: Any) -> None:
    make, shape, _ = MODELS[name]
    model, x = make(), data(*shape)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    batches = [(data(*shape, seed=100 + i, batch=32),) for i in range(4)]
    merged = merge([model, twin], batches, matcher=matcher)
    assert error(model(x), merged(x)) < 1e-11


def test_complex_layers_are_not_refitted_and_said_not_to_be(tmp_path: Path) -> None:
    make, shape, _ = MODELS["fourier_operator"]
    models = [make(), net(fourier_operator, 1, **dict(make().named_children()),
                          **{f"w{i}": weight(6, 6, 2, 2) for i in (1, 2, 3, 4)})]  # fmt: skip
    batches = [(data(*shape, seed=i, batch=8),) for i in range(4)]
    plain, refitted = (merge(models, batches, repair=repair) for repair in ("none", "refit"))
    assert any("not refitted: w1, w2, w3, w4" in note for note in refitted.meta["zipfx"].notes)
    assert any(r.changed for r in refitted.meta["zipfx"].refits)
    assert torch.equal(plain.w1, refitted.w1)
    zipfx.save(refitted, tmp_path / "merged.safetensors")
    again = zipfx.load(tmp_path / "merged.safetensors", models=models)
    assert torch.equal(again(batches[0][0]), refitted(batches[0][0]))


def test_a_layer_of_complex_weights_is_left_alone_by_a_refit() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [
            nn.Linear(4, 7, dtype=torch.cfloat),
            nn.Tanh(),
            nn.Linear(7, 3, dtype=torch.cfloat),
        ]
        return nn.Sequential(*layers)

    batches = [torch.randn(16, 4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(i))
               for i in range(4)]  # fmt: skip
    merged = zipfx.zip([make(0), make(1)], batches, progress=False)
    assert merged(batches[0]).dtype == torch.cfloat
    assert merged.meta["zipfx"].spaces[0].size == 7
    assert any("not refitted: 0, 2" in note for note in merged.meta["zipfx"].notes)


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        (torch.tensor([1j, 2.0] * 3), [(3, ()), (3, ())]),
        (torch.full((6,), 1j), [SIX]),
        (1j ** torch.arange(4).repeat(2)[:6], [(2, ()), (2, ())]),  # the other two are alone
    ],
    ids=["alternating", "uniform", "rotations"],
)
def test_features_that_meet_complex_constants(constant: Tensor, expected: list[Size]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h((s.a(x) * constant.to(torch.complex128)).abs().cos() + (s.a(x) * 1j).imag
                   + (s.a(x) * constant.to(torch.complex128)).real)  # fmt: skip

    model = net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 3))
    assert sizes(model, data(5)) == expected
    law1(model, 5)


def test_real_and_imaginary_parts_are_samples() -> None:
    place = Place("z", (1,), torch.arange(3)[:, None], read=True)
    z = torch.randn(20, 3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    ours, parts = Observer(place, 2), Observer(place, 2)
    ours(z, 2 * z)
    parts(torch.cat([z.real, z.imag]), torch.cat([2 * z.real, 2 * z.imag]))
    assert ours.statistics().count == 160
    assert ours.resolution == torch.finfo(torch.float64).eps
    assert torch.allclose(ours.statistics().covariance, parts.statistics().covariance)


def test_two_complex_spaces_of_one_real_part_are_told_apart() -> None:
    """Matching by real parts alone would take every feature for every other."""

    def forward(s: Any, x: Tensor) -> Tensor:
        z = torch.complex(x.mean(-1, keepdim=True).expand(-1, 6), s.a(x).tanh())
        return s.h((z * z).imag)

    law3(net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 3)), 5)


def test_the_numeric_check_compares_complex_outputs() -> None:
    zipfx.register_rule(ops.turn.default, "pointwise")

    def forward(s: Any, x: Tensor) -> Tensor:
        return F.linear(ops.turn(torch.complex(s.a(x), s.b(x))), s.w)

    model = net(forward, **linears("a b", 5, 6), w=weight(3, 6))
    assert len(zipfx.analyze(model, data(5), verify=False)) == 1
    spaces = zipfx.analyze(model, data(5))
    assert not len(spaces)
    assert any("numeric check" in p.reason for p in spaces.pinned)


def test_models_whose_complex_dtypes_differ_are_refused() -> None:
    make = lambda kind: net(all_complex, w=weight(7, 4, kind=kind), b=weight(7, kind=kind),  # noqa: E731
                            m=parameter(7), v=weight(3, 7, kind=kind))  # fmt: skip
    models = [make(torch.complex128), make(torch.complex64)]
    with pytest.raises(zipfx.ZipError, match="different dtypes"):
        merge(models, [(data(4, 2),)])


def test_a_real_tensor_that_is_read_as_other_bits_is_pinned() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(torch.view_as_real(s.a(x).view(torch.complex64).abs() + 1j).double().sum(-1))

    spaces = zipfx.analyze(
        net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 3)), data(5), verify=False
    )
    assert not len(spaces)
    assert any(p.reason == "seen through another dtype" for p in spaces.pinned)


# ------------------------------------------------------------------ transforms; y: (2, 6, 8)
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": lambda y: fft.fft(y, dim=1).real,
    "ifft": lambda y: fft.ifft(y, dim=1, norm="forward").abs(),
    "rfft and irfft": lambda y: fft.irfft(fft.rfft(y, dim=1) * 0.5, n=y.shape[1], dim=1),
    "padded": lambda y: fft.irfft(fft.rfft(y, n=16, dim=1), n=16, dim=1)[:, :6].tanh(),
    "cropped": lambda y: fft.irfft(fft.rfft(y, n=4, dim=1), n=6, dim=1, norm="ortho"),
    "several axes": lambda y: fft.ifftn(
        fft.fftn(y.unflatten(1, (2, 3)), dim=(1, 2)).conj(), s=(4, 2), dim=(1, 2)
    ).real.flatten(1, 2),
    "with the batch": lambda y: fft.fft2(y, dim=(0, 1)).imag,
    "hermitian": lambda y: fft.hfft(fft.ihfft(y, dim=1), n=6, dim=1),
    "shifted": lambda y: fft.ifft(
        fft.ifftshift(fft.fftshift(fft.fft(y, dim=1), dim=1).roll(1, 1), dim=1), dim=1
    ).real,
    "magnitude and phase": lambda y: torch.mul(
        (f := fft.rfft(y, dim=1)).abs().log1p(), f.angle().cos()
    ),
    "convolution theorem": lambda y: fft.irfft(
        fft.rfft(y, n=12, dim=1) * fft.rfft(y.tanh(), n=12, dim=1), n=12, dim=1
    ),
    "short-time": lambda y: torch.stft(
        y.mT.flatten(0, 1), 4, 2, window=torch.hann_window(4, dtype=y.dtype), return_complex=True
    ).abs().flatten(1).unflatten(0, (-1, 8)).mT,
    "short-time and back": lambda y: torch.istft(
        torch.stft(
            y.mT.flatten(0, 1), 4, 2, window=(window := torch.ones(4, dtype=y.dtype)),
            return_complex=True,
        ) * 1j, 4, 2, window=window, return_complex=False, onesided=True,
    ).unflatten(0, (-1, 8)).mT,
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_positions_leave_the_features(name: str) -> None:
    transform = TRANSFORMS[name]
    model = Net(lambda s, x: s.h(transform(s.a(x))), a=nn.Linear(5, 8), h=nn.Linear(8, 3))
    assert sizes(model, data(6, 5)) == [(8, ())]
    if name != "with the batch":
        law1(model, 6, 5)
        law3(model, 6, 5, seeds=[0])


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("_fft_c2c", lambda y: fft.fft2(y, dim=(-1, -2)).real),  # the mixing of FNet
        ("_fft_r2c", lambda y: fft.rfft(y, dim=2).abs()),
        ("_fft_c2r", lambda y: fft.irfft(torch.complex(y, y), dim=2)),
    ],
)
def test_transforms_of_features_pin_them(name: str, transform: Any) -> None:
    x = data(6, 5)
    width = transform(torch.randn(2, 6, 8)).shape[-1]
    model = Net(lambda s, x: s.h(transform(s.a(x))), a=nn.Linear(5, 8), h=nn.Linear(width, 3))
    spaces = zipfx.analyze(model, x, verify=False)
    assert not len(spaces)
    assert f"aten::{name} mixes all that lies along an axis, in its order" in {
        p.reason for p in spaces.pinned
    }


def test_a_transform_of_features_in_blocks_moves_whole_blocks() -> None:
    """Features of two heads; inside a head they are transformed."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(fft.rfft(s.a(x).unflatten(-1, (3, 4))).abs().flatten(-2))

    model = Net(forward, a=nn.Linear(5, 12), h=nn.Linear(9, 3))
    assert sizes(model, data(5)) == [(3, ())]
    law1(model, 5)
    law3(model, 5)


def test_a_stack_of_matrices_in_a_residual_block() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        z = torch.einsum("...bi,bio->...bo", y.unflatten(-1, (2, 4)), s.w) + s.b
        return s.h(y + F.relu(z).flatten(-2))

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), w=parameter(2, 4, 4),
                b=parameter(2, 4))  # fmt: skip
    assert sizes(model, data(5)) == [(2, ()), (8, (4, 4))]
    law1(model, 5)
    law3(model, 5, seeds=range(2))


def test_heads_of_complex_models_are_cut_out() -> None:
    make, shape, _ = MODELS["fourier_operator"]
    models, x = [make(), make()], data(*shape)
    merged = merge(models, [(data(*shape, seed=3, batch=8),)], matcher="permute", partial="s1")
    assert heads_error(merged, [run(m, (x,)) for m in models], (x,)) < EXACT


def test_models_that_ask_for_single_precision_are_checked_in_double() -> None:
    """The check widens the weights; what asks for cfloat gets as wide a kind."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Conv1d(2, 6, 1), nn.Conv1d(6, 2, 1)
            self.w = nn.Parameter(torch.randn(6, 6, 4, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            f = fft.rfft(self.a(x))
            g = torch.zeros(x.shape[0], 6, 4, dtype=torch.cfloat)
            g[:, :, :] = torch.einsum("bix,iox->box", f[..., :4], self.w)
            y: Tensor = self.h(fft.irfft(torch.einsum("bix,iox->box", g, self.w), n=x.shape[-1]))
            return y

    torch.manual_seed(0)
    spaces = zipfx.analyze(Asks(), torch.randn(2, 2, 12))
    assert [s.size for s in spaces] == [6]
    assert not any("numeric check" in p.reason for p in spaces.pinned)


@pytest.mark.parametrize("repair", ["affine", "refit"])
def test_a_real_layer_that_is_added_to_complex_numbers_is_refitted_by_itself(repair: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        z = modrelu(F.linear(fft.fft(s.a(x), dim=1) + s.b(x), s.w), s.m)
        return s.h(fft.ifft(z, dim=1).real)

    def make(seed: int) -> Net:
        layers = {**linears("a b", 5, 6), "h": nn.Linear(7, 3)}
        return net(forward, seed, **layers, w=weight(7, 6), m=parameter(7))

    loader = [(data(6, 5, seed=i, batch=16),) for i in range(4)]
    report = merge([make(0), make(1)], loader, repair=repair).meta["zipfx"]
    assert [r.name for r in report.refits] == ["a", "b", "h"]
    assert "not refitted: w, m" in report.notes
