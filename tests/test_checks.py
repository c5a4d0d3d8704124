"""Options of the wrong kind are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zipfx
from tests.helpers.refused import batch, mlp, refuse
from zipfx import ZipError


# ------------------------------------------------------------------ options
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"matcher": "zipp"},
            r"no matcher 'zipp'; did you mean 'zip'\? Known: identity, kmeans, optimal",
        ),
        ({"matcher": 7}, r"the matcher is a int: pass one of"),
        ({"matcher": zipfx.Zip}, r"the matcher is the class Zip: pass an instance"),
        ({"repair": "magic"}, r"repair='magic' is unknown; choose one of .*'none'.*'bn'"),
        ({"places": "where"}, r"places='where' is unknown; choose one of .*'last'"),
        ({"max_samples": 0}, r"max_samples .* is 0: .* whole number, at least 1"),
        ({"max_samples": -3}, r"max_samples .* is -3: .* whole number, at least 1"),
    ],
    ids=lambda v: str(next(iter(v.items()))) if isinstance(v, dict) else "",
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    refuse([mlp(), mlp()], [batch()], says, **options)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        zipfx.zip([mlp(), mlp()], [batch()], "fc2")  # type: ignore[misc]


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": float("nan")}, r"device=nan is none"),
        ({"device": [1]}, r"device=\[1\] is none"),
        ({"verify": "no"}, r"verify is 'no': it must be True or False"),
        ({"progress": torch.ones(2)}, r"progress is tensor.*True or False"),
        (
            {"matcher": failing},
            r"the matcher fails for space 'fc1' \(6 .*no such thing",
        ),
        ({"batch_to_args": failing}, r"batch_to_args fails on a batch, a Tensor: .*no such thing"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], says: str) -> None:
    refuse([mlp(), mlp(seed=1)], [batch()], says, **options)


@pytest.mark.parametrize("odd", [None, 3, "abc", [], torch.ones(2), nn.Linear])
def test_what_is_no_module(odd: Any) -> None:
    spaces = zipfx.analyze(mlp(), batch())
    for call in (
        lambda: zipfx.analyze(odd, batch()),
        lambda: spaces.permuted(odd, spaces.random_permutations(0)),
        lambda: zipfx.zip([mlp(), odd], [batch()]),
    ):
        with pytest.raises(ZipError, match=r"is a \w+, not a torch.nn.Module"):
            call()
    with pytest.raises(ZipError, match=r"and no result of zipfx.zip"):
        zipfx.head(odd, 0)
