"""A merge between the stages: its weights are plain until it is finished."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

from tests.helpers.pairs import data
from zipfx.analysis import analyze_trunk
from zipfx.match import Identity, match_models
from zipfx.merge import Fused, fuse_models
from zipfx.trace import correspond, trace_all

CPU = torch.device("cpu")


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def normed(seed: int) -> nn.Module:
    """The rows of the first weight have the length that is learned for each."""
    model = plain(seed)
    parametrizations.weight_norm(model[0])  # type: ignore[index]
    return model


def orthogonal(seed: int) -> nn.Module:
    """The columns of the first weight are orthonormal: few weights are possible."""
    model = plain(seed)
    parametrizations.orthogonal(model[0])  # type: ignore[index]
    return model


def fused(
    make: Callable[[int], nn.Module], partial: str | None = None
) -> tuple[Fused, list[nn.Module]]:
    models = [make(seed).eval() for seed in (0, 1)]
    (x, *_) = data()
    with torch.no_grad():
        traced = trace_all(models, (x,), (), "x", partial=partial, device=CPU, home=CPU)
        traced = correspond(traced)
        analysis = analyze_trunk(traced, verify=False, seed=0)
        matches = match_models(Identity(), tuple(analysis.spaces), None, traced.parameters, 2)
        return fuse_models(traced, analysis, matches, models, CPU), models


def mean_weight(models: list[nn.Module]) -> torch.Tensor:
    weights = [m[0].weight.detach() for m in models]  # type: ignore[index]
    return torch.stack(weights).mean(0)


@pytest.mark.parametrize("make", [plain, normed])
def test_by_position_weights_are_averages_of_what_layers_work_with(
    make: Callable[[int], nn.Module],
) -> None:
    found, models = fused(make)
    first = found.module.get_submodule("0")
    assert not is_parametrized(first)
    assert torch.allclose(first.weight, mean_weight(models))  # type: ignore[arg-type]
    assert (found.plans, found.notes) == ([], ())


def test_there_is_a_plan_for_every_head() -> None:
    found, models = fused(plain, "0")
    assert len(found.plans) == 2
    heads = found.module.get_submodule("task_heads")
    for k, model in enumerate(models):
        own = dict(heads.get_submodule(str(k)).named_parameters())
        assert list(own) == ["2.weight", "2.bias"]
        assert torch.equal(own["2.weight"], model[2].weight)  # type: ignore[index]


def test_what_models_compute_is_known_and_computed_again_at_the_end() -> None:
    found, models = fused(normed)
    assert list(found.computed) == list(found.kept) == ["0.weight"]
    merged = found.module.get_submodule("0").weight
    assert found.finish(models, CPU) == []
    first = found.module.get_submodule("0")
    assert is_parametrized(first)
    assert torch.allclose(first.weight, merged)  # type: ignore[arg-type]
    assert set(found.module.state_dict()) == set(models[0].state_dict())


def test_tensors_that_can_not_have_every_value_know_the_nearest() -> None:
    assert fused(plain)[0].limits() == fused(normed)[0].limits() == []
    found, _ = fused(orthogonal)
    ((tensor, nearest),) = found.limits()
    assert tensor is found.module.get_submodule("0").weight
    eye = torch.eye(4, dtype=torch.float64)
    near = nearest(torch.randn(8, 4, dtype=torch.float64))
    assert torch.allclose(near.T @ near, eye, atol=1e-9)
    assert any("moved to the nearest weight" in note for note in found.notes)


def test_zeros_of_a_mask_stay() -> None:
    found, _ = fused(plain)
    masked = torch.tensor([0.0, 2.0, 3.0])
    ((tensor, nearest),) = found.limits([masked])
    assert tensor is masked
    assert nearest(torch.tensor([5.0, 6.0, 7.0])).tolist() == [0, 6, 7]


@pytest.mark.parametrize("training", [False, True])
def test_modes_are_those_of_the_models(training: bool) -> None:
    found, models = fused(plain, "0")
    for model in models:
        model.train(training)
    models[1][2].train(not training)  # type: ignore[index]
    found.finish(models, CPU)
    assert found.module.training == training
    assert found.module.get_submodule("task_heads.1.2").training == (not training)
    assert found.module.get_submodule("task_heads.0.2").training == training
