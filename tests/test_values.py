"""Public values: equal by what they hold, hashable, looked up by name, named without addresses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import zipfx
from zipfx.values import same


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 6), nn.ReLU(),
        nn.Linear(6, 3),
    ).eval()  # fmt: skip


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()


DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DOUBLE = {"dtype": torch.float64}


def spaces(width: int = 8) -> zipfx.SpaceMap:
    return zipfx.analyze(network(width), DATA)


def report(**options: Any) -> zipfx.Report:
    merged = zipfx.zip([network(), network()], [DATA], progress=False, **options)
    found = merged.meta["zipfx"]
    assert isinstance(found, zipfx.Report)
    return found


#: makes a value of each public class, and one that differs
VALUES: dict[type, tuple[Any, Any]] = {
    zipfx.SpaceMap: (spaces, lambda: spaces(9)),
    zipfx.Space: (lambda: spaces()["0"], lambda: spaces()["3"]),
    zipfx.Axis: (lambda: spaces()["0"].axes[0], lambda: spaces()["0"].axes[1]),
    zipfx.Place: (lambda: spaces()["0"].places[0], lambda: spaces()["3"].places[0]),
    zipfx.NodeInfo: (lambda: spaces().nodes[0], lambda: spaces().nodes[1]),
    zipfx.Pinned: (lambda: spaces().pinned[0], lambda: spaces().pinned[1]),
    zipfx.Matching: (
        lambda: zipfx.Matching(torch.tensor([0, 1, 1, 0]), (2, 2), 2),
        lambda: zipfx.Matching(torch.tensor([0, 1, 0, 1]), (2, 2), 2),
    ),
    zipfx.LinearMerge: (
        lambda: zipfx.LinearMerge(torch.ones(1, 2, **DOUBLE), torch.ones(2, 1, **DOUBLE), (1, 1)),
        lambda: zipfx.LinearMerge(torch.ones(1, 2, **DOUBLE), torch.zeros(2, 1, **DOUBLE), (1, 1)),
    ),
    zipfx.Statistics: (
        lambda: zipfx.Statistics(9, torch.zeros(2, **DOUBLE), torch.eye(2, **DOUBLE), (1, 1)),
        lambda: zipfx.Statistics(9, torch.ones(2, **DOUBLE), torch.eye(2, **DOUBLE), (1, 1)),
    ),
    zipfx.Report: (report, lambda: report(matcher="permute")),
    zipfx.Refitted: (
        lambda: zipfx.Refitted("0", 1.0, float("nan"), 0.1, 2, 3),
        lambda: zipfx.Refitted("0", 1.0, 0.5, 0.1, 2, 3),
    ),
    zipfx.Refit: (zipfx.Refit, lambda: zipfx.Refit(rounds=2)),
    zipfx.Export: (zipfx.Export, lambda: zipfx.Export(({0: 4},))),
    zipfx.Zip: (zipfx.Zip, lambda: zipfx.Zip(alpha=0.1)),
    zipfx.Permute: (zipfx.Permute, lambda: zipfx.Permute(ridge=0.1)),
    zipfx.Optimal: (zipfx.Optimal, lambda: zipfx.Optimal(ridge=0.1)),
    zipfx.KMeans: (zipfx.KMeans, lambda: zipfx.KMeans(ridge=0.1)),
    zipfx.Weights: (zipfx.Weights, zipfx.Svd),
    zipfx.Identity: (zipfx.Identity, zipfx.Svd),
    zipfx.Svd: (zipfx.Svd, zipfx.Identity),
}


def test_every_public_dataclass_is_tested_here() -> None:
    public = {getattr(zipfx, name) for name in zipfx.__all__}
    assert {kind for kind in public if dataclasses.is_dataclass(kind)} == set(VALUES)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_public_values_are_equal_by_what_they_hold(kind: type) -> None:
    make, other = VALUES[kind]
    value, twin, different = make(), make(), other()
    assert type(value) is kind
    assert value == twin
    assert (value != twin) is False
    assert value == copy.deepcopy(value)
    assert value == pickle.loads(pickle.dumps(value))
    assert value != different
    assert hash(value) == hash(twin)
    assert len({value, twin, different}) == 2
    assert [different, twin].index(value) == 1
    for stranger in (None, 3, "0", torch.ones(3), object()):
        assert (value == stranger) is False
        assert (stranger == value) is False


@pytest.mark.parametrize("field", dataclasses.fields(zipfx.Axis), ids=lambda f: f.name)
def test_every_field_counts(field: Any) -> None:
    axis = spaces()["0"].axes[0]
    changed = {
        "parameter": "x", "dim": 7, "role": zipfx.Role.CONSUMES, "index": axis.index.flip(0),
        "by": 3, "parts": 9, "implied": True,
    }  # fmt: skip
    assert dataclasses.replace(axis, **{field.name: changed[field.name]}) != axis


def test_blocks_are_equal_by_what_they_hold() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    one, two = zipfx.analyze(attention(), x), zipfx.analyze(attention(), x)
    assert one == two
    assert any(space.within for space in one)
    assert [s.within for s in one] == [s.within for s in two]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), 1.0, False),
        (torch.tensor([1, float("nan")]), torch.tensor([1, float("nan")]), True),
        (torch.tensor([1, float("nan")]), torch.tensor([1, 2.0]), False),
        (torch.tensor(1j * float("nan")), torch.tensor(1j * float("nan")), True),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), False),  # nobody knows
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.zeros(0), torch.zeros(0), True),
        (float("nan"), -float("nan"), True),
        (0.0, -0.0, True),
        ((1, [torch.ones(1)]), (1, [torch.ones(1)]), True),
        ((1, 2), [1, 2], False),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, True),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, False),
    ],
)
def test_values_with_tensors_in_them(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal
    assert same(b, a) is equal
    assert same(a, a)


# ------------------------------------------------------------------ look up
def test_spaces_are_found_by_name_and_by_value() -> None:
    found, again = spaces(), spaces()
    assert "0" in found
    assert "1" not in found
    assert again["0"] in found
    assert spaces(9)["0"] not in found
    for stranger in (0, None, ("0",), torch.tensor(0), torch.ones(3)):
        assert stranger not in found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("00", r"^there is no space '00'; the nearest names are \['0', '3'\]$"),
        ("conv", r"^there is no space 'conv'; the nearest names are \['0', '3'\]$"),
        (0, r"looked up by their names, such as \['0', '3'\], and 0 is a int; by position: .space"),
        (-1, "and -1 is a int; by position: .spaces.i."),
        (None, "and None is a NoneType"),
        (slice(0, 1), "is a slice"),
    ],
)
def test_unknown_names_are_zip_errors_and_key_errors(name: Any, says: str) -> None:
    for kind in (zipfx.ZipError, KeyError):
        with pytest.raises(kind, match=says):
            spaces()[name]


def test_a_map_without_spaces_says_so() -> None:
    none = zipfx.analyze(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(zipfx.ZipError, match="no space 'a'; there are none at all"):
        none["a"]


def test_permuting_an_unknown_space_is_a_zip_error() -> None:
    with pytest.raises(zipfx.ZipError, match="there is no space 'nothing'"):
        spaces().permuted(network(), {"nothing": torch.arange(8)})


def test_permuting_another_model_is_a_zip_error() -> None:
    found = spaces()
    with pytest.raises(zipfx.ZipError, match=r"no parameter '0.weight': give the one that was ana"):
        found.permuted(nn.Linear(2, 2), found.random_permutations())


AGAIN = """
import sys, torch, zipfx
from torch import nn
class Matcher:
    def __call__(self, statistics, merged, *, across_only=False):
        return zipfx.Zip()(statistics, merged, across_only=across_only)
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
torch.manual_seed(0)
models, x = [net(), net()], torch.randn(32, 4)
clutter = [object() for _ in range(int(sys.argv[2]))]
zipfx.save(zipfx.zip(models, [x], matcher=Matcher(), progress=False), sys.argv[1])
"""


@pytest.mark.slow
def test_equal_merges_of_two_processes_are_equal_files(tmp_path: Any) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for i, file in enumerate(files):
        command = [sys.executable, "-c", AGAIN, str(file), str(i * 12345)]
        subprocess.run(command, check=True, timeout=300)
    assert files[0].read_bytes() == files[1].read_bytes()
