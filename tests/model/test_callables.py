"""Callables are named by what they are: no addresses, no long texts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from zipfx.model.callables import name_of_callable


# ------------------------------------------------------------------ names of callables
def by_rank(statistics: zipfx.Statistics, merged: int, *, across_only: bool = False) -> Any:
    ranks = [s.argsort().argsort() for s in statistics.mean.split(statistics.sizes)]
    return zipfx.Matching(torch.cat(ranks), statistics.sizes, merged)


class ByRank:
    def __init__(self, function: Any = by_rank) -> None:
        self.function = function

    def __call__(self, statistics: Any, merged: int, *, across_only: bool = False) -> Any:
        return by_rank(statistics, merged)

    def method(self, statistics: Any, merged: int, *, across_only: bool = False) -> Any:
        return by_rank(statistics, merged)

    @classmethod
    def of_class(cls, statistics: Any, merged: int, *, across_only: bool = False) -> Any:
        return by_rank(statistics, merged)


class Told(ByRank):
    def __repr__(self) -> str:
        return f"Told({self.function})"


class Silent(ByRank):
    def __repr__(self) -> str:
        return "what it says"


class Broken(ByRank):
    def __repr__(self) -> str:
        raise RuntimeError


@dataclasses.dataclass
class Data(ByRank):
    function: Any = by_rank
    weights: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(1000))


ME = __name__


@pytest.mark.parametrize(
    ("matcher", "name"),
    [
        (by_rank, f"{ME}.by_rank"),
        (lambda *a, **b: by_rank(*a, **b), f"{ME}.<lambda>"),
        (functools.partial(by_rank), f"partial({ME}.by_rank)"),
        (
            functools.partial(ByRank().method, across_only=True),
            f"partial({ME}.ByRank.method, across_only=True)",
        ),
        (functools.partial(max, key=by_rank), f"partial(builtins.max, key={ME}.by_rank)"),
        (functools.partial(max, ByRank()), f"partial(builtins.max, {ME}.ByRank)"),
        (ByRank(), f"{ME}.ByRank"),
        (ByRank().method, f"{ME}.ByRank.method"),
        (ByRank.of_class, f"{ME}.ByRank.of_class"),
        (Told(), "Told(<function by_rank>)"),
        (Silent(), f"{ME}.Silent: what it says"),
        (Broken(), f"{ME}.Broken"),
        (Data(weights=torch.ones(1)), "Data(function=<function by_rank>, weights=tensor([1.]))"),
        (zipfx.Zip(alpha=0.5), "Zip(alpha=0.5, beta=1.0)"),
        (zipfx.Weights(), repr(zipfx.Weights())),
    ],
)  # fmt: skip
def test_callables_are_named_without_addresses(matcher: Any, name: str) -> None:
    assert name_of_callable(matcher) == name


def test_long_names_are_cut() -> None:
    found = name_of_callable(Data(function=list(range(1000))))
    assert len(found) == 200
    assert found.endswith("...")


@pytest.mark.parametrize(
    "matcher", [by_rank, ByRank(), ByRank().method, functools.partial(by_rank)]
)
def test_the_report_names_the_matcher(matcher: Any) -> None:
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    merged = zipfx.zip(models, [torch.randn(32, 4)], progress=False, matcher=matcher)
    found = merged.meta["zipfx"]
    assert found.matcher == name_of_callable(matcher)
    assert "0x" not in str(found)
