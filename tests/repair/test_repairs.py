"""Repairs by name, and of one's own."""

from __future__ import annotations

from typing import Any

import pytest

import zipfx
from tests.helpers.pairs import data, equal, merge, pair
from zipfx.repair import Repaired


def test_a_repair_of_ones_own() -> None:
    seen: dict[str, Any] = {}

    def own(fused: Any, traced: Any, given: Any, *, progress: bool = False) -> Repaired:
        seen.update(models=len(traced.modules), batches=len(list(given)), progress=progress)
        fused.module.get_parameter("2.bias").zero_()
        return Repaired(3, notes=("the bias is nothing",))

    merged = merge(pair(), data(), repair=own)
    report = merged.meta["zipfx"]
    assert seen == {"models": 2, "batches": 3, "progress": False}
    assert not merged.get_parameter("2.bias").any()
    assert report.batches == {"observe": 3, "repair": 3}
    assert "the bias is nothing" in report.notes
    assert report.repair.endswith("test_a_repair_of_ones_own.<locals>.own")


def test_a_repair_of_ones_own_can_be_saved(tmp_path: Any) -> None:
    merged = merge(pair(), data(), repair=lambda *_, **__: Repaired(None))
    zipfx.save(merged, tmp_path / "merged")
    again = zipfx.load(tmp_path / "merged", pair())
    assert equal(merged, again)
    assert again.meta["zipfx"] == merged.meta["zipfx"]


def test_a_repair_must_say_what_it_did() -> None:
    with pytest.raises(
        zipfx.ZipError, match=r"repair .*<lambda> gave a NoneType: .* a zipfx.repair"
    ):
        merge(pair(), data(), repair=lambda *_, **__: None)


def test_a_repair_that_fails_says_so() -> None:
    def broken(*_: Any, **__: Any) -> Repaired:
        raise RuntimeError("out of paint")

    with pytest.raises(zipfx.ZipError, match=r"repair .*broken fails: out of paint"):
        merge(pair(), data(), repair=broken)


@pytest.mark.parametrize("repair", ["fix", 3, ["bn"]])
def test_what_is_no_repair(repair: Any) -> None:
    with pytest.raises(
        zipfx.ZipError, match=r"is unknown; choose one of \['none', 'bn', 'affine', 'r"
    ):
        merge(pair(), data(), repair=repair)


def test_a_repair_needs_data() -> None:
    with pytest.raises(
        zipfx.ZipError, match=r"calib_loader=None works only with .* repair=\"none\""
    ):
        merge(pair(), None, matcher="weights", repair=lambda *_, **__: Repaired(None),
              example_inputs=data()[0])  # fmt: skip


def test_a_refit_is_a_repair_as_any() -> None:
    settings = zipfx.Refit(ridges=(1e-2,))

    def own(*arguments: Any, progress: bool = False) -> Repaired:
        return settings(*arguments, progress=progress)

    assert equal(merge(pair(), data(), repair=own), merge(pair(), data(), repair=settings))
