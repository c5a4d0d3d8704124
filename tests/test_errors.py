"""Bad input: what the message says, and that the caller's models are unharmed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import merge, run
from tests.helpers.refused import batch, mlp, refuse
from zipfx import ZipError


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([], r"at least two models; got 0"),
        ([mlp()], r"at least two models; got 1"),
        (mlp(), r"at least two models"),
        ([mlp(), "b"], r"model 1 is a str, not a torch.nn.Module"),
        ([mlp(), mlp().float()], r"different dtypes: model 0 .*float64.*model 1 .*float32"),
        ([mlp(), mlp().to("meta")], r"model 1: 'fc1\.weight' is on the meta device"),
    ],
    ids=["none", "one", "bare", "text", "dtype", "device"],
)
def test_bad_models(models: Any, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        zipfx.zip(models, [batch()], progress=False)


# ------------------------------------------------------------------ tracing
class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        return self.b(y)


def test_untraceable_model_names_the_line_and_what_to_do() -> None:
    line = r"test_errors\.py:\d+ \(if y\.sum\(\) > 0:\)"
    says = rf"can not trace Branch at .*{line}.*torch\.fx\.wrap.*tracer="
    refuse([Branch().double(), Branch().double()], [batch()], says)
    with pytest.raises(ZipError, match=says):
        zipfx.analyze(Branch().double(), batch())


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ZipError, match=r"(?s)fails on example_inputs.*Pass inputs that the model"):
        zipfx.analyze(mlp(), batch()[:, :4])
    refuse([mlp(), mlp()], [batch()], r"does not fit|fails on", example_inputs=(batch(), batch()))


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        (float("nan"), 0),
        (float("nan"), 1),
        (float("inf"), 0),
        (float("inf"), 1),
        (-float("inf"), 1),
        (-float("inf"), 0),
    ],
)
def test_broken_activations_name_space_and_model(value: float, bad: int) -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    with torch.no_grad():
        models[bad].fc1.weight[2, 3] = value
    says = rf"activations of space 'fc1' are NaN or Inf in model {bad} .*check that model's weights"
    refuse(models, [batch()], says, partial="fc2")


def test_broken_batch_is_found_whichever_it_is() -> None:
    broken = batch()
    broken[5, 2] = float("nan")
    refuse([mlp(), mlp()], [batch(1), broken, batch(2)], "are NaN or Inf in model 0")


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_bad_alpha(alpha: float) -> None:
    with pytest.raises(ZipError, match=rf"alpha is {alpha}: choose a value from 0 to 1"):
        zipfx.Zip(alpha=alpha)


@pytest.mark.parametrize("k", [-1, 2, "0"])
def test_a_head_that_is_not_there(k: Any) -> None:
    merged = merge([mlp(), mlp(seed=1)], [(batch(),)], partial="fc2")
    with pytest.raises(ZipError, match=rf"there is no head {k!r}: the merged model has 2 heads"):
        zipfx.head(merged, k)
    with pytest.raises(ZipError, match=r"there is no head 0.*full zip has one output"):
        zipfx.head(merge([mlp(), mlp(seed=1)], [(batch(),)]), 0)


@pytest.mark.parametrize("matcher", ["weights", "identity"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_no_activation_has_shown_to_be_broken(matcher: str, value: float) -> None:
    models = [mlp(), mlp(seed=1)]
    with torch.no_grad():
        models[1].fc2.weight[2, 3] = value  # type: ignore[union-attr]
    refuse(models, None, r"parameter 'fc2.weight' of model 1 holds NaN or Inf", matcher=matcher)


def test_a_model_that_is_compiled() -> None:
    refuse([mlp(), torch.compile(mlp(seed=1))], [(batch(),)], r"model 1 was compiled .*the module")


def test_a_device_that_is_not_there() -> None:
    refuse([mlp(), mlp(seed=1)], [(batch(),)], r"device='cuda:99' is none: ", device="cuda:99")
    refuse([mlp(), mlp(seed=1)], [(batch(),)], r"device='attic' is none: ", device="attic")


def test_a_permutation_that_is_none() -> None:
    model = mlp()
    spaces = zipfx.analyze(model, batch())
    with pytest.raises(ZipError, match=r"space 'fc1' has 6 features; .* no permutation of 0\.\.5"):
        spaces.permuted(model, {"fc1": torch.tensor([0, 1, 2, 3, 4, 4])})


def test_repair_needs_batches_of_more_than_one_sample() -> None:
    models = [mlp(act=nn.BatchNorm1d(6), seed=s) for s in (0, 1)]
    refuse(models, [batch(n=1)], r'fewer than two values .* or repair="none"', repair="bn")


@pytest.mark.parametrize("order", [None, 3, [0, 1], torch.arange(6.0), torch.tensor(3)])
def test_orders_of_the_wrong_kind(order: Any) -> None:
    model = mlp()
    spaces = zipfx.analyze(model, batch())
    with pytest.raises(ZipError, match=r"must be a tensor \(6,\) of int64"):
        spaces.permuted(model, {"fc1": order})
    with pytest.raises(ZipError, match=r"permutations are a list: give a dict"):
        spaces.permuted(model, [order])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features() -> None:
    """There is nothing to solve for."""
    for widths in ((0, 3), (6, 0)):
        models = [mlp(*widths), mlp(*widths, seed=1)]
        merged = merge(models, [(batch(),)], repair="refit")
        assert run(merged, [batch()]).shape == (16, widths[1])
