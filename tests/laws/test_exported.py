"""Modules that `torch.export` wrote: merges of them are called as they are, and give the same."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import zipfx
from tests.helpers.laws import error

Pair = namedtuple("Pair", ["a", "b"])


class Net(nn.Module):
    """Takes and gives containers."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.h = nn.Conv2d(3, 8, 3), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(
        self, images: dict[str, Tensor], more: tuple[Tensor, list[Tensor]], *, shift: Tensor
    ) -> dict[str, Any]:
        x = torch.relu(self.c(images["rgb"])).mean((2, 3))
        x = torch.relu(self.a(x) + more[0] + more[1][0] + shift)
        return {"logits": self.h(x), "all": (x.mean(-1), [x.mean(), 1, None])}


def inputs(seed: int, n: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    return {"images": {"rgb": draw(3, 8, 8)}, "more": (draw(1), [draw(1)]), "shift": draw(1)}


def exported(seed: int, cls: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    given = inputs(0)
    args = (given["images"], given["more"])
    rows = {0: torch.export.Dim("n", min=1, max=64)}
    sizes = {"images": {"rgb": rows}, "more": (rows, [rows]), "shift": rows}
    kwargs = {"shift": given["shift"]}
    program = torch.export.export(cls().eval(), args, kwargs, dynamic_shapes=sizes)
    return program.module()


def flat(found: dict[str, Any]) -> list[Tensor]:
    return [found["logits"], found["all"][0], found["all"][1][0]]


@pytest.mark.slow
def test_called_as_they_are(tmp_path: Path) -> None:
    models, data = [exported(0), exported(1)], [inputs(k) for k in range(4)]
    merged: Any = zipfx.zip(models, data, progress=False)
    x = data[0]
    found = merged(x["images"], x["more"], x["shift"])
    assert list(found) == ["logits", "all"]
    assert isinstance(found["all"], tuple)
    assert found["all"][1][1:] == [1, None]
    again = merged(x["images"], x["more"], shift=x["shift"])
    assert all(map(torch.equal, flat(found), flat(again)))
    assert [r.name for r in merged.meta["zipfx"].refits] == ["c", "a", "h"]
    assert not merged.meta["zipfx"].notes
    assert sorted(merged.state_dict()) == sorted(models[0].state_dict())
    zipfx.save(merged, tmp_path / "merged")
    loaded = zipfx.load(tmp_path / "merged", [exported(4), exported(5)])
    assert all(map(torch.equal, flat(loaded(x["images"], x["more"], x["shift"])), flat(found)))
    expected = models[0](x["images"], x["more"], shift=x["shift"])  # which they have left as it was
    assert list(expected) == list(found)


def test_law_3() -> None:
    model, data = exported(0), [inputs(k) for k in range(4)]
    x = data[0]
    arguments = x["images"], x["more"], x["shift"]
    spaces = zipfx.analyze(model, arguments)
    assert sorted(s.size for s in spaces) == [8, 16]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged: Any = zipfx.zip([model, twin], data, matcher="permute", repair="none", progress=False)
    expected = flat(model(*arguments[:2], shift=x["shift"]))
    for y, z in zip(expected, flat(merged(*arguments)), strict=True):
        assert error(y, z) < 1e-5


class Named(Net):
    def forward(self, images: Any, more: Any, *, shift: Tensor) -> Any:
        found = super().forward(images, more, shift=shift)
        return Pair(found["logits"], shift)


def test_named_tuples_are_given_back_as_such() -> None:
    models, data = [exported(0, Named), exported(1, Named)], [inputs(k) for k in range(4)]
    merged: Any = zipfx.zip(models, data, progress=False)
    x = data[0]
    found = merged(x["images"], x["more"], x["shift"])
    assert type(found) is Pair
    assert torch.equal(found.b, x["shift"])
    assert found.a.shape == (16, 3)


class Odd:
    """A container that can not be made of what it holds."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.both = [a, b]


class Other(Net):
    def forward(self, images: Any, more: Any, *, shift: Tensor) -> Any:
        return Odd(super().forward(images, more, shift=shift)["logits"], shift)


def test_other_containers() -> None:
    register_pytree_node(
        Odd, lambda x: (x.both, "no names"), lambda parts, _: Odd(*parts),
        serialized_type_name="tests.Odd",
    )  # fmt: skip
    models = [exported(0, Other), exported(1, Other)]
    with pytest.raises(zipfx.ZipError, match=r"the output of GraphModule holds a Odd, which no"):
        zipfx.zip(models, [inputs(0)], progress=False)


def test_of_one_size() -> None:
    """They are analysed on a whole batch, since they take no other."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        models.append(torch.export.export(net, (torch.zeros(16, 4),)).module())
    data = [torch.randn(16, 4) for _ in range(3)]
    merged: Any = zipfx.zip(models, data, progress=False)
    assert merged(data[0]).shape == (16, 3)
    assert len(merged.meta["zipfx"].refits) == 2
    with pytest.raises(zipfx.ZipError, match=r"Guard failed: .*== 16"):
        zipfx.zip(models, [*data, torch.randn(8, 4)], progress=False)
