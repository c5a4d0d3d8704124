"""A header that was changed is refused, or gives a module: it never runs anything."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zipfx
from tests.helpers.saved import QUIET, attentions, header_of, images, models, peak, with_header

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 10**6, 10**9, 2**63, -(10**30), 0.5, 1e400, "", "x", "int64", "nan",
    "unmerge_0", [], {}, [0], ["x"], {"a": 1}, "\ud800", "x" * 1000, "__import__('os').abort()",
    {"shape": [2, 3, 10**6, 10**6], "dtype": "float32", "largest": None},
    {"shape": [2, 2**20], "dtype": "int64", "largest": 5},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in lists and dicts."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def value_at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def changes(draw: st.DrawFn, header: dict[str, Any]) -> dict[str, Any]:
    """A header with a few of its values replaced, exchanged, repeated or left out."""
    changed = copy.deepcopy(header)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from([("recipe",), ("traced",), ("report",), ()]))
        known = [p for p in places(changed) if p[: len(kind)] == kind and len(p) > len(kind)]
        if not known:
            continue
        path = draw(st.sampled_from(known))
        home, key = value_at(changed, path[:-1]), path[-1]
        alike = [p for p in places(header) if p[-1] == key]
        how = draw(st.sampled_from(["value", "other", "alike", "alike", "drop", "twice"]))
        if how == "value":
            home[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif how == "other" or (how == "alike" and not alike):
            home[key] = copy.deepcopy(value_at(header, draw(st.sampled_from(list(places(header))))))
        elif how == "alike":
            home[key] = copy.deepcopy(value_at(header, draw(st.sampled_from(alike))))
        elif how == "drop":
            del home[key]
        elif isinstance(home, list):
            home.insert(key, copy.deepcopy(home[key]))
        else:
            home["twice"] = copy.deepcopy(home[key])
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deeper", "looping"])
def test_a_header_that_was_changed_is_refused_or_gives_a_module(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Never another exception, never long, never much memory; with a right checksum."""
    path = request.getfixturevalue(name)
    header = json.loads(header_of(path))
    del header["sha256"]
    made = models() if name == "deeper" else attentions()
    x = images() if name == "deeper" else torch.randint(5, 11, (3, 4))
    before = peak()

    @settings(max_examples=250 if name == "deeper" else 100, **QUIET)
    @given(changes(header))
    def check(changed: dict[str, Any]) -> None:
        changed_file = with_header(path, tmp_path, json.dumps(changed))
        start = time.perf_counter()
        try:
            found = zipfx.load(changed_file, made)
        except zipfx.ZipError:
            return
        finally:
            assert time.perf_counter() - start < 20
        found(x)
        assert str(found.meta["zipfx"])
        zipfx.save(found, tmp_path / "again")

    check()
    assert peak() - before < 300


@settings(max_examples=200, **QUIET)
@given(st.data())
def test_bytes_that_were_changed_are_refused(
    deeper: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(deeper.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at, old = data.draw(st.integers(0, len(whole) - 1)), bytes(whole)
        how = data.draw(st.sampled_from(["change", "cut", "insert"]))
        if how == "change":
            whole[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del whole[at : at + data.draw(st.integers(1, 100))]
        else:
            whole[at:at] = old[: data.draw(st.integers(1, 100))]
    if bytes(whole) == deeper.read_bytes():
        return
    path = tmp_path_factory.mktemp("bytes") / "changed"
    path.write_bytes(whole)
    with pytest.raises(zipfx.ZipError):
        zipfx.load(path, models())
