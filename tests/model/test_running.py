"""A model runs on its own weights, and leaves them as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.fused import batches, example, fetch
from tests.helpers.laws import error, merge, permuted, run
from zipfx.model.running import decomposed, renewed


# ------------------------------------------------------------------ law 6: the backends' flags
def flags() -> tuple[Any, ...]:
    cuda: Any = torch.backends.cuda
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def test_fused_paths_are_off_inside_only() -> None:
    before = flags()
    with decomposed(nn.GRU(2, 2)):
        assert flags() == (False, False, False, False, False, True)
    with decomposed(nn.Linear(2, 2)):
        assert flags()[:3] == (False, *before[1:3])
    assert flags() == before


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("name", ["lstm", "encoder"])
def test_flags_are_restored_after_success_and_failure(name: str, chosen: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(chosen)
    try:
        before, models = flags(), [fetch(name), fetch(name)]
        merge(models, batches(name))
        assert flags() == before
        with pytest.raises(zipfx.ZipError, match="the traced model fails on example_inputs"):
            zipfx.analyze(models[0], example(name)[..., :4])
        assert flags() == before
        with pytest.raises(zipfx.ZipError, match="the models fail on a calibration batch"):
            merge(models, [*batches(name), (example(name)[..., :4],)])
        assert flags() == before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


# ------------------------------------------------------------------ what is kept between calls
class Keeping(nn.Module):
    """Keeps what it computes from a weight for later calls in eval mode, as LeViT does."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.h = nn.Linear(4, 8), nn.Linear(8, 3)
        self.bias = nn.Parameter(torch.randn(8))
        self.kept: dict[str, Tensor] = {}
        self.double().eval()

    def train(self, mode: bool = True) -> Keeping:
        self.kept = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        key = str(x.device)
        if self.training or key not in self.kept:
            self.kept[key] = self.bias.exp()
        found: Tensor = self.h(self.a(x).relu() * self.kept[key])
        return found


def ran(seed: int = 0) -> nn.Module:
    model = Keeping(seed)
    run(model, (torch.randn(2, 4).double(),))
    assert model.kept
    return model


def test_models_that_keep_what_they_have_computed_can_be_permuted_and_merged() -> None:
    model, x = ran(), (torch.randn(16, 4).double(),)
    twin = permuted(model, x)
    assert error(run(model, x), run(twin, x)) < 1e-12
    assert error(run(model, x), run(merge([model, twin], [x], matcher="permute"), x)) < 1e-12
    merged = merge([model, ran(1)], [x])
    assert error(run(merged, x), run(zipfx.to_model(merged, like=model), x)) < 1e-12
    assert model.kept  # the caller's own


def test_what_is_kept_is_forgotten_and_modes_stay() -> None:
    keeping = ran()
    model = nn.Sequential(keeping, nn.Dropout(), nn.Linear(3, 3).eval())
    modes = [True, False, False, False, True, False]
    assert [m.training for m in model.modules()] == modes
    assert renewed(model) is model
    assert keeping.kept == {}
    assert [m.training for m in model.modules()] == modes
