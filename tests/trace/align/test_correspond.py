"""Models are one network, node by node, or the first difference is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.laws import merge
from tests.helpers.refused import batch, mlp, refuse


# ------------------------------------------------------------------ models that do not correspond
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: mlp(hidden=7), r"models 0 and 1 .*'fc1'.*'fc1'.*out_features=6.*out_features=7"),
        (lambda: mlp(act=nn.Tanh()), r"models 0 and 1 .*'act'.*'act'.*ReLU\(\).*Tanh\(\)"),
        (
            lambda: mlp(fc1=nn.ReLU(), act=nn.Linear(5, 6)),
            r"models 0 and 1 .*'fc1'.*'fc1'.*Linear\(.*ReLU\(\)",
        ),
        (lambda: mlp(fc2=nn.Linear(6, 4, bias=False)), r"'fc2'.*bias=True.*bias=False"),
        (lambda: nn.Sequential(*mlp()[:2]), r"models 0 and 1 do not correspond"),
        (lambda: mlp(fc1=nn.Sequential(nn.Linear(5, 6), nn.Tanh())), r"'act'.*fc1\.1"),
    ],
    ids=["width", "type", "order", "setting", "shorter", "longer"],
)
def test_models_that_differ(other: Callable[[], nn.Module], says: str) -> None:
    refuse([mlp(), other()], [batch()], says, partial="fc2")


def test_models_that_differ_after_the_cut_are_fine() -> None:
    models = [mlp(), mlp(outputs=7, seed=1), mlp(out=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))]
    merged = merge(models, [(batch(),)], partial="fc2")
    assert [tuple(y.shape) for y in merged(batch())] == [(16, 3), (16, 7), (16, 4)]


def test_full_zip_of_different_outputs_names_shapes_and_partial() -> None:
    says = r"model 0 gives shapes \[\(2, 3\)\] and model 1 \[\(2, 7\)\].*partial="
    refuse([mlp(), mlp(outputs=7)], [batch()], says)


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def test_models_that_tie_weights_differently() -> None:
    models = [Tied(True).double(), Tied(False).double()]
    refuse(models, [batch()], "weights are tied differently.*Tie or untie them alike.*partial='a'")
