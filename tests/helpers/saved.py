"""Merges that are saved and loaded again, and files that must be refused."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import zipfx
from tests.helpers.laws import unharmed
from zipfx.report.files import stored
from zipfx.report.format import container

QUIET = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are the same to the bit (NaN where NaN is)."""
    (ours, structure), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(
        torch.equal(torch.isnan(x), torch.isnan(y)) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(ours, theirs, strict=True)
    )


def reloaded(merged: nn.Module, models: Sequence[nn.Module], folder: Path, **options: Any) -> Any:
    """Saved and loaded: the same module but for what it computes, which is up to the caller."""
    one, two = folder / "one.safetensors", folder / "two.safetensors"
    zipfx.save(merged, one)  # type: ignore[arg-type]
    seen = [m for m in models if not any(p.is_meta for p in m.parameters())]
    found = unharmed(seen, lambda: zipfx.load(one, models, **options))
    if isinstance(found, Exception):
        raise found
    zipfx.save(found, two)
    assert one.read_bytes() == two.read_bytes()
    assert found.code == merged.code
    assert str(found) == str(merged)
    ours, theirs = merged.state_dict(), found.state_dict()
    assert list(ours) == list(theirs)
    for t, u in zip(ours.values(), theirs.values(), strict=True):
        assert (t.dtype, t.stride()) == (u.dtype, u.stride())
    assert [m.training for m in merged.modules()] == [m.training for m in found.modules()]
    assert repr(as_stored(merged)) == repr(as_stored(found))
    return found


def as_stored(merged: Any) -> dict[str, Any]:
    """The meta of a merge, but for what was measured while it was made, which is not stored."""
    report = dataclasses.replace(merged.meta["zipfx"], seconds={}, bytes={})
    return {**merged.meta, "zipfx": report}


def network(outputs: int = 3, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, outputs),
    )  # fmt: skip


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 8, 8, generator=generator).to(dtype)


def zipped(partial: str | None = "2", models: Sequence[nn.Module] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    models = models or [network().eval(), network().eval()]
    return zipfx.zip(models, [images()], partial=partial, progress=False, **options)


class Attention(nn.Module):
    """Token ids, a mask, an optional argument and a number; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.l, self.h = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 11)

    def forward(
        self, ids: Tensor, pads: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        y = self.e(ids) * scale
        y = y + self.a(y, y, y, key_padding_mask=pads)[0]
        for i in range(ids.shape[1]):  # needs the length
            y = y + y[:, i : i + 1] / 8
        return {"logits": self.h(self.l(y)[0])}


# ------------------------------------------------------------------ what is refused
def refuse(path: Path, says: str, models: Sequence[nn.Module] | None = None) -> None:
    with pytest.raises(zipfx.ZipError, match=says) as raised:
        zipfx.load(path, models or [network(), network()])
    assert str(raised.value).startswith(f"{str(path)!r} can not be loaded: ")


def edited(file: Path, folder: Path, change: Callable[[dict[str, Any], Any], Any]) -> Path:
    """A copy of a file, with its tensors and its header changed, and with the right checksum."""
    with safetensors.safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["zipfx"])
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    del header["sha256"]
    change(found, header)
    path = folder / "edited.safetensors"
    with path.open("wb") as out:
        container.write(out, json.dumps(header), found)
    return path


def models(count: int = 2) -> list[nn.Module]:
    return [network() for _ in range(count)]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in stored.named(module).items()}


def equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = state(a), state(b)
    return ours.keys() == theirs.keys() and all(
        (t.dtype, t.shape) == (theirs[name].dtype, theirs[name].shape)
        and t.contiguous().flatten().view(torch.uint8).equal(
            theirs[name].contiguous().flatten().view(torch.uint8)
        )
        for name, t in ours.items()
    )  # fmt: skip


# ------------------------------------------------------------------ the header
def header_of(path: Path) -> str:
    with safetensors.safe_open(path, "pt") as file:
        found: str = file.metadata()["zipfx"]
    return found


def attentions(count: int = 2) -> list[nn.Module]:
    return [Attention().eval() for _ in range(count)]


def with_header(file: Path, folder: Path, text: str) -> Path:
    """A copy of a file with another header, and a right checksum."""
    tensors = safetensors.torch.load_file(file)
    with (folder / "changed").open("wb") as out:
        container.write(out, text, tensors)
    return folder / "changed"


def peak() -> float:
    """Megabytes that this process has had at most."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
