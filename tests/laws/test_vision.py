"""Operations of torchvision inside a trunk."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import DeformConv2d, nms, ps_roi_align, roi_align, roi_pool

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, sizes

for name in ("nms", "ps_roi_align", "roi_align", "roi_pool", "boxes_of"):
    torch.fx.wrap(name)
SIX: Size = (6, ())


def deformed(groups: int = 1, offset_groups: int = 1, mask: bool = False) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        weighed = s.mask(y).sigmoid() if mask else None
        return s.h(s.d(y, s.off(y), weighed).relu().mean((2, 3)))

    near = {"kernel_size": 3, "padding": 1}
    parts = {"mask": nn.Conv2d(6, 9 * offset_groups, **near)} if mask else {}
    return Net(
        forward,
        a=nn.Conv2d(3, 6, 1),
        off=nn.Conv2d(6, 18 * offset_groups, **near),
        d=DeformConv2d(6, 6, **near, groups=groups),
        h=nn.Linear(6, 3),
        **parts,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [SIX, SIX]),
        ({"mask": True}, [SIX, SIX]),
        ({"groups": 2}, [(2, ()), (6, (3, 3)), (6, (3, 3))]),
        ({"groups": 6}, [SIX]),
        ({"offset_groups": 2, "mask": True}, [(3, ()), (3, ()), SIX]),
    ],
    ids=str,
)
def test_deformable_convolution(settings: dict[str, Any], expected: list[Size]) -> None:
    model = deformed(**settings)
    assert sizes(model, data(3, 6, 6)) == expected
    law1(model, 3, 6, 6)
    law3(model, 3, 6, 6, seeds=[0])
    for cut in ("a", "off", "d"):
        law3(model, 3, 6, 6, seeds=[1], partial=cut)


def test_offsets_are_made_by_rows_that_keep_their_order() -> None:
    spaces = zipfx.analyze(deformed(mask=True), data(3, 6, 6), verify=False)
    pinned = {(p.parameter, p.dim): p.reason for p in spaces.pinned}
    for layer in ("off", "mask"):
        assert pinned[f"{layer}.weight", 0] == "says which pixels are read"
        assert (f"{layer}.weight", 1) not in pinned


def boxes_of(x: Tensor) -> Tensor:
    """One box of every image."""
    count = torch.arange(len(x), dtype=x.dtype)
    corner = x.flatten(1)[:, :2].abs()
    return torch.cat([count[:, None], corner, corner + 3], 1)


REGIONS = {
    "align": lambda s, x: roi_align(s.a(x), boxes_of(x), 2, 1.0, 2),
    "pool": lambda s, x: roi_pool(s.a(x), boxes_of(x), 2),
    "by bin": lambda s, x: ps_roi_align(s.p(s.a(x)), boxes_of(x), 2),
    "of a batch": lambda s, x: roi_align(s.a(x).flatten(0, 1)[:, None], boxes_of(x), 2),
}


@pytest.mark.parametrize(
    ("region", "expected"),
    [("align", [SIX]), ("pool", [SIX]), ("by bin", [SIX, SIX]), ("of a batch", [])],
)
def test_regions_that_boxes_choose(region: str, expected: list[Size]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = REGIONS[region](s, x).relu().mean((2, 3))
        return s.h(y.expand(-1, 6) if region == "of a batch" else y)

    layers = {"a": nn.Conv2d(3, 6, 1), "p": nn.Conv2d(6, 24, 1), "h": nn.Linear(6, 3)}
    model = Net(forward, **layers)
    assert sizes(model, data(3, 8, 8)) == expected
    law1(model, 3, 8, 8)
    if region != "of a batch":
        law3(model, 3, 8, 8, seeds=[0])
        law3(model, 3, 8, 8, seeds=[1], partial="a")


def test_what_suppresses_boxes_is_pinned() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)[0]
        kept = nms(boxes_of(x.expand(6, -1, -1, -1))[:, 1:], y.mean((1, 2)), 0.5)
        return s.h(y[kept[:1]].mean((1, 2)).expand(6))

    model = Net(forward, a=nn.Conv2d(3, 6, 1), h=nn.Linear(6, 3))
    spaces = zipfx.analyze(model, data(3, 8, 8, batch=1), verify=False)
    reasons = {p.reason for p in spaces.pinned if p.parameter == "a.weight" and p.dim == 0}
    assert reasons == {"says which boxes are left"}


@pytest.mark.slow
def test_torchvision_is_not_needed_and_may_come_later() -> None:
    script = """
import sys, torch, zipfx
assert "torchvision" not in sys.modules
from torchvision.ops import DeformConv2d
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = torch.nn.Conv2d(3, 6, 1), torch.nn.Conv2d(6, 2, 1)
        self.d, self.h = DeformConv2d(6, 5, 1), torch.nn.Conv2d(5, 2, 1)
    def forward(self, x):
        y = self.a(x)
        return self.h(self.d(y, self.o(y)))
spaces = zipfx.analyze(Net(), torch.randn(2, 3, 4, 4))
assert [s.size for s in spaces] == [6, 5], spaces
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_regions_that_a_model_proposes_are_others_in_every_model() -> None:
    """There features can not be compared: they are observed before, or matched by weights."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        corner = s.box(y.mean((2, 3))).sigmoid()
        boxes = torch.cat([boxes_of(x)[:, :1], corner, corner + 3], 1)
        return s.h(roi_align(s.b(y), boxes, 2).relu().mean((2, 3)))

    convs = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 5, 1)}
    model = Net(forward, **convs, box=nn.Linear(6, 2), h=nn.Linear(5, 3))
    (space,) = (s for s in zipfx.analyze(model, data(3, 8, 8)) if s.size == 5)
    assert [p.chosen for p in space.places] == [False, True, True, True]
    law3(model, 3, 8, 8, seeds=[0])
