"""The table of a space map: what it says, and that it stays narrow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zipfx
from tests.helpers.models import NETS
from zipfx.analysis.spaces.space_map import WIDTH, SpaceMap, block_text
from zipfx.analysis.spaces.values import Axis, Pinned, Role, Space

CONSTANTS = "unlike any other: it meets fixed coordinates (input channels, positions, constants)"


def space(name: str, blocks: tuple[int, ...] = (), **roles: list[str]) -> Space:
    index = torch.arange(96).reshape(96, 1)
    axes = tuple(
        Axis(parameter, 0, Role(role), index)
        for role, names in roles.items()
        for parameter in names
    )
    return Space(name, 96, axes, blocks=blocks)


BODY = space(
    "conv1",
    produces=["conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv2.weight"],
    consumes=["layer1.0.conv1.weight", "layer1.1.conv1.weight", "fc.weight"],
    elementwise=["bn1.weight", "bn1.bias", "scale"],
)


READABLE = """
space   size  blocks  produced by            consumed by         elementwise
----------------------------------------------------------------------------
conv1   96            conv1, layer1.*.conv2  layer1.*.conv1, fc  bn1, scale
attn.q  96    3 x 32  attn.q                 attn.k

pinned                                   axes  indices  why
-----------------------------------------------------------
conv1.weight dim 1, scale dim 0          2     7        unlike any other: it meets fixed coordinates
                                                        (input channels, positions, constants)
out.weight dim 0, layer1.*.conv2.weight  13    63       output
dim 1, a.bias dim 0 (+6 more)

2 spaces, 192 features; 14 of 25 parameter axes (56%) pinned as a whole, 1 in part
note: something to know
"""


def test_a_map_as_a_person_reads_it() -> None:
    query = space("attn.q", (32, 32, 32), produces=["attn.q.weight"], consumes=["attn.k.weight"])
    pinned = (
        Pinned("conv1.weight", 1, 3, CONSTANTS),
        Pinned("out.weight", 0, 9, "output"),
        *(Pinned(f"layer1.{i}.conv2.weight", 1, 8, "output") for i in range(5)),
        *(Pinned(f"{c}.bias", 0, 2, "output") for c in "abcdefg"),
        Pinned("scale", 0, 4, CONSTANTS),
    )
    found = SpaceMap((BODY, query), pinned, notes=("something to know",))
    assert str(found) == READABLE.strip()


def test_no_column_of_blocks_where_there_are_none() -> None:
    assert str(SpaceMap((BODY,), ())).splitlines()[0].split()[:3] == ["space", "size", "produced"]


def test_nothing_found_is_said() -> None:
    text = str(zipfx.analyze(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)))
    assert text.startswith("pinned")
    assert "0 spaces, 0 features; 3 of 3 parameter axes (100%) pinned as a whole, 0 in part" in text


def test_the_printed_axes_add_up() -> None:
    net = NETS["CatTwice"]
    spaces = zipfx.analyze(net.build(), net.inputs(2))
    axes = {(a.parameter, a.dim) for s in spaces for a in s.axes}
    whole = {(p.parameter, p.dim) for p in spaces.pinned} - axes
    assert f"{len(whole)} of {len(axes | whole)} parameter axes" in str(spaces)


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_long_names_are_wrapped_and_kept_whole(depth: int) -> None:
    name = "encoder.layers.encoder_layer_10." * depth + "self_attention.in_proj_weight"
    found = space(
        name, tuple(range(8)), produces=[name], consumes=[f"{name}.w"], elementwise=[name]
    )
    reason = f"mylib::scale is not understood (node {'x' * 200!r}); teach it"
    lines = str(SpaceMap((found,), (Pinned(name, 1, 3, reason),))).splitlines()
    assert max(map(len, lines)) <= WIDTH
    column = lines[0].index("size")
    until = lines.index("")
    assert "".join(line[:column].strip() for line in lines[2:until]) == name
    column = lines[until + 1].index("why")
    assert "x" * 200 in "".join(line[column:].strip() for line in lines[until + 3 :])


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((), ""),
        ((5,), "1 x 5"),
        ((32, 32, 32), "3 x 32"),
        ((8, 16), "8 + 16"),
        ((4, 8, 8, 12), "4 of 4 to 12"),
    ],
)
def test_blocks(blocks: tuple[int, ...], text: str) -> None:
    assert block_text(blocks) == text
