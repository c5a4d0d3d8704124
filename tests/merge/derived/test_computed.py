"""Tensors that modules compute from others: the way back to a value, or the nearest that exists."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

from zipfx.merge.derived.computed import (
    Computed,
    attach,
    constrained,
    find_computed,
    limits,
    put_back,
    value_of,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Scaled(nn.Module):
    def __init__(self, by: float = 2) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: Tensor) -> Tensor:
        return self.by * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.by


class NoWay(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1


class Broken(NoWay):
    def right_inverse(self, weight: Tensor) -> Tensor:
        raise NotImplementedError


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.abs()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def layer(*how: nn.Module | Callable[..., Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    found = nn.Linear(4, 6).double().eval()
    for one in how:
        if isinstance(one, nn.Module):
            parametrize.register_parametrization(found, "weight", copy.deepcopy(one), unsafe=True)
        else:
            one(found)
    return found.eval()


def computed(*how: Any, models: int = 1) -> Computed:
    lists = [layer(*how, seed=seed).parametrizations.weight for seed in range(models)]
    return Computed("a.b", "weight", tuple(lists))


def drawn(seed: int = 5) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXACT = {
    "scaled": (Scaled(),),
    "twice": (Scaled(), Scaled(3)),
    "weight norm": (parametrizations.weight_norm,),
}
BOUND: dict[str, tuple[Any, ...]] = {
    "spectral norm": (parametrizations.spectral_norm,),
    "orthogonal": (parametrizations.orthogonal,),
    "positive": (Positive(),),
}


@pytest.mark.parametrize("how", EXACT.values(), ids=EXACT)
def test_where_every_weight_has_values_they_are_found(how: Any) -> None:
    one = computed(*how)
    assert one.inverts
    assert not one.limits
    found = one.written(drawn())
    assert torch.allclose(found(), drawn(), **CLOSE)
    assert torch.allclose(one.nearest(drawn()), drawn(), **CLOSE)


@pytest.mark.parametrize("how", BOUND.values(), ids=BOUND)
def test_where_not_the_nearest_is_one_that_stays(how: Any) -> None:
    one = computed(*how)
    assert one.inverts
    assert one.limits
    near = one.nearest(drawn())
    assert not torch.allclose(near, drawn())
    assert torch.allclose(one.nearest(near), near, atol=1e-6)
    assert torch.allclose(one.written(near)(), near, atol=1e-6)


@pytest.mark.parametrize("how", [NoWay(), Broken()])
def test_without_a_way_back_only_its_own_weight_can_be_written(how: nn.Module) -> None:
    one = computed(how)
    assert not one.inverts
    assert one.written(drawn()) is None
    assert torch.equal(one.nearest(drawn()), drawn())
    assert torch.equal(one.written(one.given[0])(), one.given[0])


def test_orthogonal_ones_get_the_nearest_in_the_sense_of_frobenius() -> None:
    one, value = computed(parametrizations.orthogonal), drawn()
    near = one.nearest(value)
    u, _, vh = torch.linalg.svd(value, full_matrices=False)
    assert torch.allclose(near, u @ vh, atol=1e-9)


def test_a_spectral_norm_of_at_most_one_is_kept() -> None:
    one = computed(parametrizations.spectral_norm)
    near = one.nearest(drawn() * 10)
    assert abs(float(torch.linalg.matrix_norm(near, 2)) - 1) < 1e-9
    assert torch.allclose(near * torch.linalg.matrix_norm(drawn(), 2), drawn(), **CLOSE)


def test_nothing_is_written_to_what_was_given() -> None:
    one = computed(parametrizations.weight_norm)
    before = {k: t.clone() for k, t in one.how[0].state_dict().items()}
    one.written(drawn())
    assert all(torch.equal(t, before[k]) for k, t in one.how[0].state_dict().items())


# ------------------------------------------------------------------ in a merge
def models(*how: Any) -> list[nn.Module]:
    return [nn.Sequential(layer(*how, seed=s), nn.ReLU()) for s in (0, 1)]


def plain_merge(value: Tensor) -> fx.GraphModule:
    root = nn.Sequential(layer(), nn.ReLU())
    root[0].weight.data.copy_(value)
    return fx.symbolic_trace(root)


def test_they_are_found_by_their_names_in_the_merge() -> None:
    merged = plain_merge(drawn())
    found = find_computed(merged, models(Scaled()), {"": [0, 1]})
    assert list(found) == ["0.weight"]
    one = found["0.weight"]
    assert (one.path, one.name, one.root) == ("0", "weight", "0.parametrizations.weight")
    assert len(one.how) == 2
    assert not one.of_head
    assert value_of(merged, one) is merged.get_submodule("0").weight
    assert one.is_among(["0.parametrizations.weight.original"])
    assert not one.is_among(["0.weight", "0.parametrizations.weighty.original"])
    assert find_computed(merged, models(Scaled()), {"task_heads.0.": [0]}) == {}


@torch.no_grad()
def test_what_can_not_be_given_is_moved_or_plain_and_said() -> None:
    merged = plain_merge(drawn())
    found = find_computed(merged, models(parametrizations.orthogonal), {"": [0, 1]})
    kept, notes = constrained(merged, found)
    assert list(kept) == ["0.weight"]
    assert notes[0].startswith("moved to the nearest weight that its parametrization can give: 0.w")
    weight = value_of(merged, kept["0.weight"])
    assert torch.allclose(weight.T @ weight, torch.eye(4).double(), atol=1e-9)
    merged = plain_merge(drawn())
    kept, notes = constrained(merged, find_computed(merged, models(NoWay()), {"": [0, 1]}))
    assert kept == {}
    assert notes == [
        "plain, since its parametrization has no values that give the merged weight: 0.weight"
    ]
    assert torch.equal(merged.get_submodule("0").weight, drawn())


def test_limits_are_told_of_those_that_have_some() -> None:
    merged = plain_merge(drawn())
    for how, count in ((Scaled(), 0), (parametrizations.orthogonal, 1)):
        found = find_computed(merged, models(how), {"": [0, 1]})
        assert len(limits(merged, found, found)) == count


@pytest.mark.parametrize("how", [Scaled(), parametrizations.weight_norm])
def test_in_the_end_the_merge_computes_them_again(how: Any) -> None:
    merged, x = plain_merge(drawn()), torch.randn(3, 4, dtype=torch.float64)
    before = merged(x)
    found = find_computed(merged, models(how), {"": [0, 1]})
    assert put_back(merged, found) == []
    assert parametrize.is_parametrized(merged.get_submodule("0"))
    assert torch.allclose(merged(x), before, **CLOSE)
    assert set(merged.state_dict()) == set(models(how)[0].state_dict())


def test_where_the_graph_reads_the_tensor_it_calls_what_computes_it() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(drawn())

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    merged, x = fx.symbolic_trace(Own()), torch.randn(3, 4, dtype=torch.float64)
    before = merged(x)
    one = Computed("", "weight", (layer(Scaled()).parametrizations.weight,))
    attach(merged, one, one.written(drawn()))
    assert [n.op for n in merged.graph.nodes] == [
        "placeholder", "call_module", "call_function", "output",
    ]  # fmt: skip
    assert torch.allclose(merged(x), before, **CLOSE)
    assert list(merged.state_dict()) == ["parametrizations.weight.original"]
