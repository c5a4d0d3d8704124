"""What `zip` is asked for, in the terms of the stages; what it can not be asked for is an error."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import zipfx
from zipfx import ZipError
from zipfx.arguments import Job
from zipfx.observe import PLACES
from zipfx.repair import REPAIRS, NoRepair, OwnRepair, Refit, Repair

DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(zipfx.zip).parameters.items()
    if p.default is not p.empty and name != "calib_loader"
}
BATCHES = [torch.zeros(4, 3)]


def job(loader: Any = BATCHES, **changes: Any) -> Job:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    return Job.of(models, loader, **{**DEFAULTS, **changes})


def own_repair(merge: Any) -> None:
    """A repair of the caller's, which none of these tests runs."""


def test_what_is_not_said_is_the_default_of_zip() -> None:
    found = job()
    assert (found.repair_name, found.partial, found.seed) == ("refit", None, 0)
    assert found.choose is PLACES[DEFAULTS["places"]]
    assert found.home == found.device == torch.device("cpu")
    assert found.observes


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_has_a_name(name: str) -> None:
    found = job(repair=name)
    assert (found.repair, found.repair_name) == (REPAIRS[name], name)


@pytest.mark.parametrize(
    ("given", "kind", "name"),
    [
        (Refit(), Refit, "refit"),
        (NoRepair(), NoRepair, "none"),
        (own_repair, OwnRepair, f"{__name__}.own_repair"),
    ],
)
def test_or_is_a_callable(given: Any, kind: type[Repair], name: str) -> None:
    found = job(repair=given)
    assert isinstance(found.repair, kind)
    assert found.repair_name == name


def test_without_data_nothing_is_repaired_or_observed() -> None:
    found = job(None, matcher="weights")
    assert (found.data, found.repair_name, found.observes) == (None, "none", False)


def test_weights_alone_are_not_observed_where_there_is_data() -> None:
    found = job(matcher="weights")
    assert found.data is not None
    assert not found.observes


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int) -> None:
    assert job(seed=seed).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": "everywhere"}, r"places='everywhere' is unknown; choose one of \["),
        ({"places": ["read"]}, r"places=\['read'\] is unknown"),
        ({"partial": 3}, "partial is 3; give the qualified name of a module"),
        ({"repair": "magic"}, r"repair='magic' is unknown; choose one of \['none', "),
        ({"repair": 7}, "repair=7 is unknown"),
        ({"matcher": "magic"}, "magic"),
        ({"verify": "yes"}, "verify"),
        ({"progress": 2}, "progress"),
        ({"seed": 1.5}, "seed"),
        ({"device": "cuda:none"}, "device='cuda:none' is none: "),
        ({"loader": None}, "calib_loader=None works only with matcher="),
        ({"loader": None, "matcher": "weights", "repair": "bn"}, "calib_loader=None works only"),
    ],
)
def test_what_can_not_be_used_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ZipError, match=message):
        job(**changes)
