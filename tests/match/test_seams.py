"""The seams between stages: what a matcher needs, repairs of one's own, statistics."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zipfx
from zipfx.analysis import run_analysis
from zipfx.match import Identity, Permute, Weights
from zipfx.observe import calibration, observe
from zipfx.repair import Repaired
from zipfx.trace import trace


def pair() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double() for _ in range(2)]


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def merge(models: list[nn.Module], batches: Any, **options: Any) -> Any:
    return zipfx.zip(models, batches, progress=False, **options)


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


class Recorded:
    """A matcher that notes what it is called with."""

    needs: ClassVar[str] = "weights"

    def __init__(self, inner: zipfx.Matcher, needs: str) -> None:
        self.inner, self.seen = inner, list[zipfx.Statistics]()
        self.needs = needs  # type: ignore[misc]

    def __call__(self, statistics: zipfx.Statistics, merged: int, **options: Any) -> Any:
        self.seen.append(statistics)
        return self.inner(statistics, merged, **options)


# ------------------------------------------------------------------ what a matcher needs
def test_a_matcher_by_weights_of_ones_own_is_asked() -> None:
    own = Recorded(Permute(similarity="covariance"), "weights")
    found = merge(pair(), None, matcher=own, repair="none", example_inputs=data()[0])
    wanted = merge(pair(), None, matcher=Weights(), repair="none", example_inputs=data()[0])
    assert own.seen
    assert equal(found, wanted)


def test_its_sweeps_are_heeded() -> None:
    once = Recorded(Permute(similarity="covariance"), "weights")
    once.sweeps = 1  # type: ignore[attr-defined]
    merge(pair(), None, matcher=once, repair="none", example_inputs=data()[0])
    assert len(once.seen) == 1  # there is one space
    once.sweeps = 0  # type: ignore[attr-defined]
    with pytest.raises(zipfx.ZipError, match="sweeps is 0: it must be a whole number, at least 1"):
        merge(pair(), None, matcher=once, repair="none", example_inputs=data()[0])


def test_a_matcher_that_needs_nothing_is_asked_without_data() -> None:
    own = Recorded(Identity(), "nothing")
    found = merge(pair(), None, matcher=own, repair="none", example_inputs=data()[0])
    assert [s.sizes for s in own.seen] == [(8, 8)]
    assert not own.seen[0].mean.any()
    assert torch.equal(own.seen[0].covariance, torch.eye(16, dtype=torch.float64))
    assert equal(found, merge(pair(), None, matcher="identity", repair="none",
                              example_inputs=data()[0]))  # fmt: skip


@pytest.mark.parametrize("needs", ["activations", None])
def test_a_matcher_needs_data_if_it_does_not_say_otherwise(needs: str | None) -> None:
    def own(statistics: zipfx.Statistics, merged: int, *, across_only: bool = False) -> Any:
        return Permute()(statistics, merged)

    if needs is not None:
        own.needs = needs  # type: ignore[attr-defined]
    with pytest.raises(zipfx.ZipError, match='calib_loader=None works only with matcher="weights"'):
        merge(pair(), None, matcher=own, repair="none", example_inputs=data()[0])
    assert equal(merge(pair(), data(), matcher=own, repair="none"),
                 merge(pair(), data(), matcher="permute", repair="none"))  # fmt: skip


def test_a_matcher_needs_something_that_is_known() -> None:
    with pytest.raises(
        zipfx.ZipError, match=r"the matcher needs 'gradients': choose one of \['act"
    ):
        merge(pair(), data(), matcher=Recorded(Permute(), "gradients"))


# ------------------------------------------------------------------ repairs
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


# ------------------------------------------------------------------ statistics
def test_statistics_are_given_out_once_and_freed() -> None:
    modules = [trace(model) for model in pair()]
    spaces = run_analysis(modules[0], (data()[0],)).spaces
    seen = observe(modules, spaces, calibration(data(), 2))
    assert seen.names == {"0"}
    assert seen.samples == {}
    found = seen.take("0")
    assert found.count == 48
    assert seen.samples == {"0": 48}
    assert seen.names == {"0"}  # it was seen
    with pytest.raises(KeyError):
        seen.take("0")
