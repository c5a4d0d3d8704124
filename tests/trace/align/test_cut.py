"""Where a model can be cut, and what is said of other names."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.helpers.refused import batch, mlp, refuse


# ------------------------------------------------------------------ partial
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fc3", r"\['fc1', .*'fc2'"),
        ("ouput", r"\[.*'out'\]"),
        ("zzz", r"\['fc1', 'fc2', 'out'\]"),
    ],
)
def test_unknown_partial_suggests_what_is_near_in_the_graph(name: str, nearest: str) -> None:
    says = rf"partial='{name}' names no module; near it in the graph are {nearest}"
    refuse([mlp(), mlp()], [batch()], says, partial=name)


def test_a_module_that_does_not_run_is_no_cut() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.idle = nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    says = r"partial='idle' is a module that the model does not run; near it in the graph are"
    refuse([Idle().double(), Idle().double()], [batch()], says, partial="idle")
    says = r"partial='body\.0\.weight' lies inside 'body\.0', a Linear that is one node"
    refuse([Idle().double(), Idle().double()], [batch()], says, partial="body.0.weight")
