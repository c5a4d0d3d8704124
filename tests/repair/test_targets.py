"""What a layer is to compute, where its outputs are added to a stream."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.laws import merge
from tests.helpers.strangers import strangers
from zipfx.repair.layerwise import Refit
from zipfx.repair.targets import plan_targets


def test_the_sum_on_a_stream_makes_up_for_what_the_stream_has_lost() -> None:
    """The layer before an addition knows the other part: with as many features as there are inputs
    it can give the very sum that is wanted."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.relu(torch.tanh(self.a(x)) + self.b(x)))

    models = strangers(2, Stream)
    x = torch.randn(400, 4, dtype=torch.float64)
    merged = merge(models, [(x,)], matcher="permute", repair=Refit(rounds=0))
    name, *_ = [r for r in merged.meta["zipfx"].refits if r.name == "b"]
    assert name.changed == 8  # alone it is linear in x, and nothing would change


@pytest.mark.parametrize("written", ["relu_", "module", "function", None])
def test_a_stream_that_is_written_to_later_is_not_what_the_layer_knows(
    written: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x)
            if written == "relu_":
                x.relu_()
            elif written == "module":
                self.act(x)
            elif written == "function":
                F.relu(x, inplace=True)
            return self.h(y + x)

    stage, steps = sys.modules["zipfx.repair.layerwise"], []

    def spy(*arguments: Any) -> Any:
        found = plan_targets(*arguments)
        steps.extend(found[0])
        return found

    monkeypatch.setattr(stage, "plan_targets", spy)
    merge(strangers(2, Late), [(torch.randn(90, 4).double(),)], repair="refit")
    (step,) = [s for s in steps if s.node.target == "b"]
    assert (step.skip is None) == (written is not None)
