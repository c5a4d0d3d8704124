"""A model runs on its own weights, and leaves them as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zipfx
from tests.helpers.fused import batches, example, fetch
from tests.helpers.laws import merge
from zipfx.model.running import decomposed


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
