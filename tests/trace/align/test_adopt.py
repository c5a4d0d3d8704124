"""A model takes over the graph of another, and what differs is made up for in weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.laws import EXACT, error, merge, run
from zipfx import ZipError
from zipfx.trace.align.alignment import aligned
from zipfx.trace.align.cut import last_node
from zipfx.trace.tracing import trace


def test_eps_is_made_up_for_in_the_weight_where_variances_are_small() -> None:
    class Small(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.a, self.n = nn.Linear(4, 6), nn.BatchNorm1d(6, eps)
            self.h = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.relu(self.n(self.a(x))))

    torch.manual_seed(0)
    models = [Small(1e-3).double().eval(), Small(1e-6).double().eval()]
    for model in models:
        model.n.running_var.fill_(1e-4)
    data = [(torch.randn(16, 4).double(),)] * 2
    merged = merge(models, data, partial="h")
    for output, model in zip(run(merged, data[0]), models, strict=True):
        assert output.shape == run(model, data[0]).shape
    notes = [n for n in merged.meta["zipfx"].notes if "eps" in n]
    assert notes[1:] == [
        "BatchNorm's eps is 1e-06 in model 1 and 0.001 in model 0, in 1 layers: made up for in the "
        "statistics"
    ]
    same = copy.deepcopy(models[0])
    same.n.eps = 1e-6
    with torch.no_grad():
        same.n.weight.mul_(((same.n.running_var + 1e-6) / (same.n.running_var + 1e-3)).sqrt())
    assert error(run(models[0], data[0]), run(same, data[0])) < EXACT
    exact = merge([models[0], same], data, matcher="permute")
    assert error(run(models[0], data[0]), run(exact, data[0])) < EXACT
    for model in (models[0], same):
        model.n.weight = model.n.bias = None
    with pytest.raises(ZipError, match=r"its variance is too small to make up for that"):
        merge([models[0], same], data)


@pytest.mark.sweep
@pytest.mark.parametrize("eps", [(1e-5, 1e-3), (1e-3, 1e-5), (1e-5, 2e-5), (1e-2, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.half])
@pytest.mark.parametrize("partial", [None, "4"])
def test_eps_is_made_up_for_in_every_dtype(
    eps: tuple[float, float], dtype: torch.dtype, partial: str | None
) -> None:
    """Also where some variances are too small: those features are scaled in the weight."""

    def make(eps: float) -> nn.Module:
        torch.manual_seed(1)
        norms = [nn.BatchNorm2d(6, eps), nn.BatchNorm2d(6, eps)]
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.running_var.copy_(torch.tensor([1e-6, 2e-5, 3e-3, 0.2, 1.0, 30.0]))
        first, second = ([nn.Conv2d(c, 6, 3), n] for c, n in zip((3, 6), norms, strict=True))
        layers = [*first, nn.ReLU(), *second, nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)]
        return nn.Sequential(*layers).to(dtype).eval()

    models = [make(eps[0]), make(eps[1])]
    x = torch.randn(8, 3, 8, 8).mul(0.01).to(dtype)  # half overflows soon
    expected = run(models[1], (x,))
    modules = [trace(m) for m in models]
    adopted = aligned(modules, last_node(modules[0], partial), [x], partial).modules[1]
    assert adopted.get_submodule("zipfx_trunk.1" if partial else "1").eps == eps[0]
    bound = max(1e-12, 60 * torch.finfo(dtype).eps)
    assert error(expected.double(), run(adopted, (x,)).double()) < bound
    notes = merge(models, [(x,)], partial=partial).meta["zipfx"].notes
    assert any("made up for" in note for note in notes)
