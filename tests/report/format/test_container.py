"""What a file is as bytes: a header of strict JSON, a checksum, and damage that is named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zipfx
from tests.helpers.saved import (
    header_of,
    images,
    models,
    refuse,
    reloaded,
    same,
    state,
    with_header,
)
from tests.helpers.shared import ROOT
from zipfx.report.files import files
from zipfx.report.format import container

DATA = ROOT / "tests" / "data"


def no_constants(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_headers_are_strict_json_and_numbers_come_back(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, most: float = 1.0, names: Any = None) -> Tensor:
            return self.b(self.a(x).clamp(max=most))

    torch.manual_seed(0)
    x = torch.randn(2, 4)
    # nothing is observed, so correlations are nan; the bound is no number of JSON
    inputs = (x, float("inf"), {"shape": float("nan"), "float": (-float("inf"), "nan")})
    merged = zipfx.zip(
        [Scaled(), Scaled()], None, matcher="weights", example_inputs=inputs, progress=False
    )
    zipfx.save(merged, tmp_path / "merged")
    header = json.loads(header_of(tmp_path / "merged"), parse_constant=no_constants)
    assert header["report"]["spaces"][0]["correlation"] == "nan"
    assert header["traced"]["inputs"]["tuple"][1] == {"float": "inf"}
    found = zipfx.load(tmp_path / "merged", [Scaled(), Scaled()])
    assert found.meta["zipfx"] == merged.meta["zipfx"]
    assert found.meta["zipfx"].traced == merged.meta["zipfx"].traced
    assert same(found(x, 0.5), merged(x, 0.5))


@pytest.mark.parametrize("name", ["refit", "weights"])
def test_files_of_the_first_format_are_read(name: str, tmp_path: Path) -> None:
    path = DATA / f"version1_{name}.safetensors"
    assert "NaN" in header_of(path)  # as it was written then
    found = zipfx.load(path, models())
    expected = safetensors.torch.load_file(path)
    assert state(found).keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in state(found).items())
    report = found.meta["zipfx"]
    assert report.seconds
    assert (report.refits[0].ridge == float("inf")) if name == "refit" else not report.refits
    again = reloaded(found, models(), tmp_path)
    assert json.loads(header_of(tmp_path / "one.safetensors"))["version"] == 2
    assert same(again(images()), found(images()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"version": 2, "a": ' + "[" * 10**6, "lists and dicts lie more than 100 deep"),
        ('{"version": 2, "a": ' + '{"a": ' * 101, "lists and dicts lie more than 100 deep"),
        ('{"version": 2, "a": "' + '\\"[' * 10**5, "Unterminated string"),
        ('{"version": 2, "a": ' + "[" * 99 + "]" * 99 + "}", "has no field 'a'"),
        ('{"version": 2, "a": 1' + "0" * 5000 + "}", "Exceeds the limit|has no field"),
        ('{"version": 1e400}', "in version inf of the|header is damaged"),
        ('{"version": NaN}', "its checksum is not right|header is damaged"),
        ('{"version": -1}', "header is damaged"),
        ('{"version": null}', "header is damaged"),
        ('{"version": 2}', "Header is not complete"),
        ("{}", "header is damaged"),
        ("[]", "header is damaged"),
        ("{" + " " * (2**25 + 1) + "}", "its header has 33,5.* bytes, and at most 33,554,432 are"),
    ],
    ids=range(13),
)
def test_headers_that_are_none(text: str, says: str, deeper: Path, tmp_path: Path) -> None:
    refuse(with_header(deeper, tmp_path, text), says)


# ------------------------------------------------------------------ damage
@pytest.mark.slow
def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)) for _ in range(2)]
    merged = zipfx.zip(made, [torch.randn(8, 2)], repair="none", partial="1", progress=False)
    path = tmp_path / "merged"
    zipfx.save(merged, path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    bits = [*range(0, 8 * start, 5), *range(8 * start, 8 * len(whole))]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(zipfx.ZipError):
            files._read_file(str(path))
    path.write_bytes(whole)
    files._read_file(str(path))


def test_damage_is_named(deeper: Path, tmp_path: Path) -> None:
    whole = bytearray(deeper.read_bytes())
    whole[-1] ^= 1
    (tmp_path / "damaged").write_bytes(whole)
    refuse(tmp_path / "damaged", "it is damaged, or was edited: its checksum is not right; save it")


def test_tensors_may_be_written_again_by_others(deeper: Path, tmp_path: Path) -> None:
    """In another order, say: what counts is names, dtypes, shapes and entries."""
    tensors = safetensors.torch.load_file(deeper)
    turned = dict(reversed(tensors.items()))
    save_file(turned, tmp_path / "again", {"zipfx": header_of(deeper), "format": "pt"})
    assert same(
        zipfx.load(tmp_path / "again", models())(images()), zipfx.load(deeper, models())(images())
    )
    for change in ({"0.bias": tensors["0.bias"] + 1e-7}, {"0.bias": tensors["0.bias"].double()}):
        save_file({**tensors, **change}, tmp_path / "again", {"zipfx": header_of(deeper)})
        refuse(tmp_path / "again", "its checksum is not right")


def test_what_changes_while_it_is_written_has_a_right_checksum(tmp_path: Path) -> None:
    """As when a thread saves what another one trains."""
    tensors = {name: torch.zeros(10) for name in "abc"}

    class Changing(io.BytesIO):
        def write(self, data: Any) -> int:
            for t in tensors.values():
                t.add_(1)
            return super().write(data)

    file = Changing()
    container.write(file, '{"a": 1}', tensors)
    (tmp_path / "file").write_bytes(file.getvalue())
    text, found = container.contents(str(tmp_path / "file"))
    assert container.unsigned(text, found) == '{"a": 1}'
    assert len({float(t[0]) for t in found.values()}) == 3
