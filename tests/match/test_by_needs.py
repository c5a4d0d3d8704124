"""What a matcher needs, and what it is asked with."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import zipfx
from tests.helpers.pairs import data, equal, merge, pair
from zipfx.match import Identity, Permute, Weights


class Recorded:
    """A matcher that notes what it is called with."""

    needs: ClassVar[str] = "weights"

    def __init__(self, inner: zipfx.Matcher, needs: str) -> None:
        self.inner, self.seen = inner, list[zipfx.Statistics]()
        self.needs = needs  # type: ignore[misc]

    def __call__(self, statistics: zipfx.Statistics, merged: int, **options: Any) -> Any:
        self.seen.append(statistics)
        return self.inner(statistics, merged, **options)


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
