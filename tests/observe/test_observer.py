from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zipfx
from zipfx.analysis.analysis import run_analysis
from zipfx.analysis.spaces.values import Place
from zipfx.observe.data import calibration
from zipfx.observe.joint_graph import observe
from zipfx.observe.observer import Observer
from zipfx.trace.tracing import trace


def place(index: Tensor, *dims: int) -> Place:
    return Place("node", dims, index, read=True)


def filled(where: Place, *batches: tuple[Tensor, ...]) -> Observer:
    observer = Observer(where, len(batches[0]))
    for features in batches:
        observer(*features)
    return observer


def features(count: int = 60, mean: float = 0.0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated features (count, 4) of two models."""
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(count, 8, generator=generator).double()
        @ torch.randn(8, 8, generator=generator).double()
    )
    x = mean + scale * x
    return x[:, :4], x[:, 4:]


ROWS = place(torch.arange(4)[:, None], 1)


@pytest.mark.parametrize("cuts", [[60], [1, 59], [7] * 8 + [4], [1] * 60], ids=len)
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_statistics_are_those_of_all_samples_however_they_are_cut(
    cuts: list[int], mean: float
) -> None:
    a, b = features(mean=mean)
    parts = list(zip(torch.split(a, cuts), torch.split(b, cuts), strict=True))
    found = filled(ROWS, *parts).statistics()
    whole = torch.cat([a, b], 1)
    assert found.count == 60
    assert found.sizes == (4, 4)
    torch.testing.assert_close(found.mean, whole.mean(0), rtol=1e-12, atol=1e-12)
    cov = torch.cov(whole.T, correction=0)
    torch.testing.assert_close(found.covariance, cov, rtol=1e-9, atol=1e-9 * float(cov.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_half_precision_is_summed_in_more(dtype: torch.dtype, tolerance: float) -> None:
    a, b = (t.to(dtype) for t in features(5000, scale=10.0))
    found = filled(ROWS, *zip(a.split(50), b.split(50), strict=True)).statistics()
    whole = torch.cat([a, b], 1).double()  # the very numbers that were seen
    cov = torch.cov(whole.T, correction=0)
    torch.testing.assert_close(found.covariance, cov, rtol=0, atol=1e-5 * float(cov.abs().max()))
    exact = torch.cov(torch.cat(features(5000, scale=10.0), 1).T, correction=0)
    gap = (found.covariance - exact).abs().max() / exact.abs().max()
    assert gap < tolerance
    assert found.resolution == torch.finfo(dtype).eps


def test_a_large_mean_in_float32_costs_no_precision_of_the_sums() -> None:
    a, b = (t.float() for t in features(4000, mean=1000.0))
    found = filled(ROWS, *zip(a.split(100), b.split(100), strict=True)).statistics()
    cov = torch.cov(torch.cat([a, b], 1).double().T, correction=0)
    torch.testing.assert_close(found.covariance, cov, rtol=0, atol=1e-5 * float(cov.abs().max()))


def test_positions_and_occurrences_are_samples() -> None:
    x = torch.randn(3, 4, 5, 6).double()
    by_channel = filled(place(torch.arange(4)[:, None], 1), (x, -x)).statistics()
    flat = x.permute(0, 2, 3, 1).reshape(-1, 4)
    assert by_channel.count == 90
    expected = torch.cov(torch.cat([flat, -flat], 1).T, correction=0)
    torch.testing.assert_close(by_channel.covariance, expected)
    flattened = x.flatten(1)  # each feature is 30 columns now
    index = torch.arange(120).reshape(4, 30)
    again = filled(place(index, 1), (flattened, -flattened)).statistics()
    torch.testing.assert_close(again.covariance, by_channel.covariance)
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    index = torch.argsort(shuffled).reshape(4, 30)
    moved = filled(place(index, 1), (flattened[:, shuffled], -flattened[:, shuffled])).statistics()
    torch.testing.assert_close(moved.covariance, by_channel.covariance)


def test_a_part_of_an_axis_and_other_features_along_another() -> None:
    x = torch.randn(50, 6, 3).double()
    where = Place("node", (1,), torch.tensor([[4], [1]]), read=True, blurred=(2,))
    found = filled(where, (x, x)).statistics()
    part = x.mean(2)[:, [4, 1]]
    torch.testing.assert_close(
        found.covariance, torch.cov(torch.cat([part, part], 1).T, correction=0)
    )


@pytest.mark.parametrize("model", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_broken_model_is_known(model: int, value: float) -> None:
    pair = features()
    pair[model][17, 2] = value
    good = filled(ROWS, features())
    assert good.first_broken() is None
    assert filled(ROWS, features(), pair).first_broken() == model


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models_are_merged_in_their_dtype(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(kind)
    spaces = zipfx.analyze(net, torch.randn(4, 3, dtype=kind))
    twin = spaces.permuted(net, spaces.random_permutations(1))
    data = [torch.randn(64, 3, dtype=kind) for _ in range(4)]
    merged = zipfx.zip([net, twin], data, matcher="permute", repair="none", progress=False)
    assert {p.dtype for p in merged.parameters()} == {kind}
    x = torch.randn(16, 3, dtype=kind)
    torch.testing.assert_close(merged(x), net(x), rtol=2e-2, atol=2e-2)


def test_statistics_are_given_out_once_and_freed() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    data = [torch.randn(16, 4) for _ in range(3)]
    modules = [trace(model) for model in nets]
    spaces = run_analysis(modules[0], (data[0],)).spaces
    seen = observe(modules, spaces, calibration(data, 2))
    assert seen.names == {"0"}
    assert seen.samples == {}
    found = seen.take("0")
    assert found.count == 48
    assert seen.samples == {"0": 48}
    assert seen.names == {"0"}  # it was seen
    with pytest.raises(KeyError):
        seen.take("0")
