"""K models as graphs: traced on one input, with what they write to, and cut at one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zipfx import ZipError
from zipfx.trace.align.models import TracedModels, correspond, trace_all

X = (torch.randn(4, 5),)


class Counting(nn.Module):
    """With another name for its layer, if it is given one; counts in a buffer, or a parameter."""

    def __init__(self, name: str = "a", learns: bool = False) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(5, 6))
        self.norm, self.h = nn.BatchNorm1d(6), nn.Linear(6, 2)
        count = torch.zeros(1)
        if learns:
            self.count = nn.Parameter(count, requires_grad=False)
        else:
            self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        z: Tensor = self.h(self.norm(self.get_submodule(self.name)(x)).relu())
        return z


def traced(*models: nn.Module, partial: str | None = None) -> TracedModels:
    own = [m.eval() for m in models]
    cpu = torch.device("cpu")
    return trace_all(own, X, (), "these", partial=partial, device=cpu, home=cpu)


def test_graphs_share_weights_with_the_models_and_know_what_forward_writes() -> None:
    models = [Counting(), Counting()]
    found = traced(*models)
    for module, model, state in zip(found.modules, models, found.states, strict=True):
        assert module.a.weight is model.a.weight
        assert [t.shape for t in state.tensors] == [(1,)]
        assert state.tensors[0] is not model.count
        assert not model.count.any()


def test_parameters_that_forward_writes_to_are_copies() -> None:
    models = [Counting(learns=True), Counting(learns=True)]
    found = traced(*models)
    assert found.modules[0].a.weight is not models[0].a.weight
    assert not models[0].count.any()


@pytest.mark.slow
def test_without_a_cut_there_is_no_head_and_with_one_the_trunk_ends_there() -> None:
    models = Counting(), Counting()
    whole, part = traced(*models), traced(*models, partial="norm")
    assert (whole.cut, part.cut) == (None, "norm")
    names = [n.name for n in part.modules[0].graph.nodes]
    assert names[part.last] == "norm"
    assert whole.last >= len(names) - 2


def test_the_parameters_that_correspond_are_known_by_their_names_in_the_first() -> None:
    models = Counting(), Counting("b")
    found = correspond(traced(*models, partial="norm"))
    named = found.parameters()
    assert sorted(named) == ["a.bias", "a.weight", "norm.bias", "norm.weight"]
    assert named["a.weight"][1] is models[1].get_submodule("b").weight
    assert found.as_traced is not found.modules or found.notes == ()


def test_models_as_they_are_stay_the_same_objects() -> None:
    found = traced(Counting(), Counting())
    alike = correspond(found)
    assert [a is b for a, b in zip(alike.modules, found.modules, strict=True)] == [True, True]
    assert list(alike.states) == list(found.states)


def test_errors_name_the_model_and_the_inputs() -> None:
    with pytest.raises(ZipError, match=r"model 1 fails on these"):
        traced(Counting(), nn.Sequential(nn.Linear(5, 6), nn.Linear(5, 2)))
    with pytest.raises(ZipError, match=r"partial='nowhere' names no module"):
        traced(Counting(), Counting(), partial="nowhere")
    unlike = Counting()
    unlike.h = nn.Linear(6, 3)
    with pytest.raises(
        ZipError, match=r"model 0 gives shapes \[\(4, 2\)\] and model 1 \[\(4, 3\)\]"
    ):
        correspond(traced(Counting(), unlike))
    assert correspond(traced(Counting(), unlike, partial="norm")).cut == "norm"
