"""Ways of use that once went wrong without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.cases import noise
from tests.helpers.laws import error, permuted

EXACTLY = {"matcher": "permute", "repair": "none", "progress": False}
ROWS = [noise(32, 4, seed=k) for k in range(4)]


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).eval()


def test_parameters_that_are_views_of_one_vector() -> None:
    model = mlp(0)
    twin, wanted = permuted(model, (ROWS[0],)), model(ROWS[0])
    for m in (model, twin):
        vector = nn.utils.parameters_to_vector(m.parameters())
        nn.utils.vector_to_parameters(vector, m.parameters())
    merged = zipfx.zip([model, twin], ROWS, **EXACTLY)
    assert error(wanted, merged(ROWS[0])) < 1e-5


def test_inside_of_inference_mode_the_merge_is_that_of_outside() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    model, images = nn.Sequential(*layers).eval(), [noise(8, 3, 8, 8, seed=k) for k in range(4)]
    twin = permuted(model, (images[0],))
    with torch.inference_mode():
        merged = zipfx.zip([model, twin], images, **EXACTLY)
        assert error(model(images[0]), merged(images[0])) < 1e-5


def test_data_without_an_end_is_read_as_far_as_asked_for() -> None:
    drawn = []

    def batches() -> Iterator[Tensor]:
        while len(drawn) < 500:
            drawn.append(torch.randn(8, 4))
            yield drawn[-1]

    zipfx.zip([mlp(0), mlp(1)], batches(), max_samples=32, progress=False)
    assert len(drawn) <= 8


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_weights_packed_in_quantised_layers_are_refused() -> None:
    """They are hidden: the first model would come back alone."""
    to = {"qconfig_spec": {nn.Linear}, "dtype": torch.qint8}
    models = [torch.ao.quantization.quantize_dynamic(mlp(k), **to) for k in (0, 1)]
    with pytest.raises(zipfx.ZipError):
        zipfx.zip(models, ROWS, progress=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_traced_scripts_are_refused() -> None:
    with pytest.raises(zipfx.ZipError):
        zipfx.zip([torch.jit.trace(mlp(k), ROWS[0]) for k in (0, 1)], ROWS, progress=False)


def test_merges_of_exported_modules_give_tensors() -> None:
    """As the modules do, where the graph gives a tuple of one."""
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    models = [torch.export.export(mlp(k), (ROWS[0],), dynamic_shapes=sizes) for k in (0, 1)]
    merged = zipfx.zip([m.module() for m in models], ROWS, progress=False)
    assert isinstance(merged(ROWS[0]), Tensor)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(F.relu(self.b(F.relu(self.a(x)).to(self.b.weight.dtype))))
        return y


def test_a_layer_that_is_asked_for_its_dtype_is_refitted() -> None:
    merged = zipfx.zip([Asking().eval(), Asking().eval()], ROWS, progress=False)
    assert "b" in [r.name for r in merged.meta["zipfx"].refits]


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(x)))
        return y


def test_batches_may_hold_more_than_forward_names() -> None:
    batches = [{"x": x, "labels": x[:, 0]} for x in ROWS]
    merged = zipfx.zip([Keywords(), Keywords()], batches, progress=False)
    assert merged(ROWS[0]).shape == (32, 3)
