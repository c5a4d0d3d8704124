"""Tensors of every kind, and those that share memory, are stored and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.saved import equal, models, reloaded, same, state, zipped
from zipfx.report.files import stored
from zipfx.report.format import container

QUIET = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


# ------------------------------------------------------------------ tensors of every kind
class Kinds(nn.Module):
    """Buffers of every dtype and of odd shapes, tied ones, and a parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 8)
        for dtype in (*container.DTYPES, torch.complex64, torch.complex128):
            values = torch.arange(1, 7).reshape(2, 3).to(dtype)
            self.register_buffer(str(dtype).replace("torch.", "of_"), values)
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("one", torch.arange(3.0))
        self.register_buffer("two", self.one)
        self.register_buffer("unnamed_ä\n\"'\\", torch.ones(1))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.attribute = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x) * self.get_buffer("scalar") + self.get_buffer("one").sum()
        return y + self.get_buffer("two").sum() + self.get_buffer("turned")[0, 1]


@pytest.mark.parametrize("tracer", [None, fx.Tracer])
def test_tensors_of_every_kind_come_back(tracer: Any, tmp_path: Path) -> None:
    options = {} if tracer is None else {"tracer": tracer()}
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    merged = zipfx.zip([Kinds(), Kinds()], [x], progress=False, **options)
    assert len(state(merged)) > 20
    found = reloaded(merged, [Kinds(), Kinds()], tmp_path, **options)
    assert equal(merged, found)
    assert same(found(x), merged(x))
    with safetensors.safe_open(tmp_path / "one.safetensors", "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(torch.view_as_complex(held["of_complex64"]), merged.of_complex64)
    assert "two" not in held


def test_any_reader_of_safetensors_reads_the_tensors(tmp_path: Path) -> None:
    tensors = {str(d): torch.arange(1, 7).reshape(2, 3).to(d) for d in container.DTYPES}
    tensors |= {"é\n": torch.ones(()), "": torch.zeros(0, 3)}
    with (tmp_path / "file").open("wb") as out:
        container.write(out, '{"a": 1}', tensors)
    found = safetensors.torch.load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(t.dtype == found[n].dtype for n, t in tensors.items())
    assert all(torch.equal(t.double(), found[n].double()) for n, t in tensors.items())


def shared(tied: bool = True) -> nn.Sequential:
    """Two norms with one running mean, or with one each."""
    layers = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6)
    )
    if tied:
        layers[4].running_mean = layers[1].running_mean
    return layers.eval()


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_buffers_are_tied_as_they_were_saved(first: bool, now: bool, tmp_path: Path) -> None:
    """Moving a module unties them, as `zip` does with device=... of another kind."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    merged = zipfx.zip([shared(first), shared(first)], [x], progress=False, repair="none")
    ties = {"4.running_mean": "1.running_mean"} if first else {}
    for _ in range(2):
        assert stored.further_names(stored.named(merged)) == ties
        merged.get_submodule("4").running_mean.fill_(3)
        zipfx.save(merged, tmp_path / "merged")
        found = zipfx.load(tmp_path / "merged", [shared(now), shared(now)])
        assert equal(merged, found)
        assert stored.further_names(stored.named(found)) == ties
        assert same(found(x), merged(x))
        zipfx.save(found, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "merged").read_bytes()
        merged.double().float()
        merged.get_submodule("1").running_mean.fill_(2)
        ties = {}


def test_tied_models_on_meta_stay_tied(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    torch.manual_seed(0)
    x = torch.randn(32, 4)
    merged = zipfx.zip([make(), make()], [x], progress=False)
    with torch.device("meta"):
        fresh = make()
    assert same(reloaded(merged, [fresh, fresh], tmp_path)(x), merged(x))


def test_parameters_on_one_memory_come_back_on_their_own(tmp_path: Path) -> None:
    merged = zipped()
    memory = torch.arange(16.0)
    norm = merged.get_submodule("1")
    norm.weight, norm.bias = nn.Parameter(memory[:8]), nn.Parameter(memory[8:])
    zipfx.save(merged, tmp_path / "merged")
    found = zipfx.load(tmp_path / "merged", models())
    assert equal(merged, found)
    zipfx.save(found, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "merged").read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_merges_on_a_gpu_come_back(tmp_path: Path) -> None:
    x = torch.randn(16, 4, device="cuda")
    merged = zipfx.zip([shared().cuda(), shared().cuda()], [x], progress=False)
    for fresh in (shared().cuda(), shared()):
        found = reloaded(merged, [fresh, fresh], tmp_path)
        home = fresh[0].weight.device
        assert {t.device for t in state(found).values()} == {home}
        assert torch.allclose(found(x.to(home)).cuda(), merged(x), atol=1e-5)
