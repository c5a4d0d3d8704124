"""How data is cut into batches, ordered, shared among loaders and limited makes no difference, or
is said."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zipfx
from tests.helpers.convolutional import cut, images, models
from tests.helpers.laws import error, merge, run


# ------------------------------------------------------------------ law 5
@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["bn", "affine", "refit"])
@pytest.mark.parametrize("partial", [None, "n1"])
@pytest.mark.parametrize("way", ["sizes", "order", "both", "shuffled"])
def test_repairs_do_not_depend_on_batches(repair: str, partial: str | None, way: str) -> None:
    pair, x = models(), images(64)
    other = {
        "sizes": cut(x, 60, 4),
        "order": cut(x, 32, 32)[::-1],
        "both": cut(x, 1, 30, 2, 31)[::-1],
        "shuffled": cut(x[torch.randperm(64)], 32, 32),
    }[way]
    options: dict[str, Any] = {"repair": repair, "partial": partial}
    one = run(merge(pair, cut(x, 32, 32), **options), (x,))
    two = run(merge(pair, other, **options), (x,))
    pairs = [(one, two)] if partial is None else list(zip(one, two, strict=True))
    assert all(error(a, b) < 1e-9 for a, b in pairs)


@pytest.mark.parametrize("repair", ["bn", "refit"])
def test_nor_do_those_of_one_loader_for_each_model(repair: str) -> None:
    pair, x = models(), images(90)
    found = [
        run(merge(pair, loaders, repair=repair), (x,))
        for loaders in (
            [cut(x[:50], 50), cut(x[50:], 40)],
            [cut(x[:50], 7, 43)[::-1], cut(x[50:].flip(0), 20, 20)],
        )
    ]
    assert error(*found) < 1e-9


# ------------------------------------------------------------------ limits
def counted(batches: Any, drawn: list[int]) -> Iterator[Any]:
    for batch in batches:
        drawn.append(1)
        yield batch


@pytest.mark.parametrize("repair", ["none", "bn", "refit"])
def test_no_batch_is_drawn_beyond_max_samples(repair: str) -> None:
    drawn: list[int] = []
    endless = counted(((images(8, seed),) for seed in itertools.count()), drawn)
    merged = merge(models(), endless, max_samples=32, repair=repair)
    assert len(drawn) == 4
    expected = merge(models(), [(images(8, seed),) for seed in range(4)], repair=repair)
    assert error(run(expected, (images(3, 9),)), run(merged, (images(3, 9),))) < 1e-10


def test_max_samples_counts_for_each_loader() -> None:
    loaders = [cut(images(64, seed), 32, 32) for seed in range(2)]
    first = [[batches[0]] for batches in loaders]
    options: dict[str, Any] = {"partial": "n1", "repair": "refit"}
    merged = merge(models(), loaders, max_samples=32, **options)
    report = merged.meta["zipfx"]
    assert report.batches["repair"] == 2
    assert {r.name for r in report.refits if r.changed} >= {"task_heads.0.b", "task_heads.1.b"}
    one, two = (run(m, (images(3, 9),)) for m in (merged, merge(models(), first, **options)))
    assert all(error(a, b) < 1e-12 for a, b in zip(one, two, strict=True))


def test_an_iterator_given_for_two_models_is_drawn_once() -> None:
    drawn: list[int] = []
    both = counted(cut(images(64), 32, 32), drawn)
    merged = merge(models(), [both, both], repair="bn")
    assert len(drawn) == 2
    expected = merge(models(), [cut(images(64), 32, 32)] * 2, repair="bn")
    assert error(run(expected, (images(3, 9),)), run(merged, (images(3, 9),))) < 1e-10


def test_an_empty_batch_is_no_sample() -> None:
    batches = [(images(0),), *cut(images(32), 16, 16)]
    merged = merge(models(), batches, max_samples=32, repair="refit")
    assert merged.meta["zipfx"].batches == {"observe": 2, "repair": 2}
    with pytest.raises(zipfx.ZipError, match="all its batches are empty"):
        merge(models(), [(images(0),)] * 2)
    with pytest.raises(zipfx.ZipError, match=r"calib_loader\[1\], gave no sample"):
        merge(models(), [cut(images(8), 8), [(images(0),)]])


# ------------------------------------------------------------------ what could not be repaired
def test_one_sample_refits_nothing_and_says_so() -> None:
    notes = merge(models(), cut(images(1), 1), repair="refit").meta["zipfx"].notes
    assert any(n.startswith("not refitted for want of data") and "a, b, h" in n for n in notes)
    assert any(n.startswith("the repair changed nothing") for n in notes)


def test_a_head_with_one_sample_is_named() -> None:
    loaders = [cut(images(64), 32, 32), cut(images(1, 5), 1)]
    report = merge(models(), loaders, partial="n1", repair="refit").meta["zipfx"]
    (note,) = (n for n in report.notes if n.startswith("not refitted for want of data"))
    assert "task_heads.1.b, task_heads.1.h" in note
    assert "task_heads.0" not in note
