"""Spaces inside one node: leaf modules of torch.nn, wrapped functions, leaves of one's own.

They are found by the aten calls and observed where a weight reads or makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.fused import (
    FIRST,
    MODELS,
    RECURRENT,
    Around,
    Leaves,
    Loop,
    Odd,
    Recursion,
    batches,
    example,
    fetch,
    output,
    own,
)
from tests.helpers.laws import EXACT, error, heads_error, merge, run, running_modules
from zipfx.analysis.analysis import run_analysis
from zipfx.analysis.labels.inside import OwnedTensors, Probe
from zipfx.observe.data import calibration
from zipfx.observe.joint_graph import observe
from zipfx.trace.tracing import trace


def parameters_of(space: zipfx.Space) -> set[str]:
    return {a.parameter for a in space.axes}


# ------------------------------------------------------------------ what is found
@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, EXACT), (torch.float32, 1e-5)])
@pytest.mark.filterwarnings("ignore:.*not supported with oneDNN")
def test_law_1_and_nothing_is_opaque(name: str, dtype: torch.dtype, most: float) -> None:
    model, x = fetch(name).to(dtype), example(name).to(dtype)
    spaces = zipfx.analyze(model, x)
    assert not [p for p in spaces.pinned if "understood" in p.reason or "numeric" in p.reason]
    twin = spaces.permuted(model, spaces.random_permutations(2))
    assert error(run(model, (x,)), run(twin, (x,))) < most


@pytest.mark.sweep
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_gate_of_every_layer_is_tied(name: str, dtype: torch.dtype) -> None:
    model = fetch(name).to(dtype)
    spaces = zipfx.analyze(model, example(name).to(dtype), verify=False)
    leaf: Any = model.cell if isinstance(model, Loop) else model.leaf
    for parameter, value in leaf.named_parameters():
        prefix = "cell." if isinstance(model, Loop) else "leaf."
        axes = [
            (space.size, axis.index.numel())
            for space in spaces
            for axis in space.axes
            if (axis.parameter, axis.dim) == (prefix + parameter, 0)
        ]
        assert axes == [(4 if "_hr" in parameter else 8, len(value))], parameter


@pytest.mark.parametrize("name", ["encoder_layer", "encoder", "decoder"])
def test_a_transformer_has_its_stream_and_its_hidden_spaces(name: str) -> None:
    spaces = zipfx.analyze(fetch(name), example(name))
    layers = 1 if name == "encoder_layer" else 2
    assert [s.size for s in spaces if any("linear1" in a for a in parameters_of(s))] == [
        6,
        *[10] * layers,
    ]
    assert "h.weight" in parameters_of(spaces["e"])


# ------------------------------------------------------------------ what is merged
@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_law_3_for_every_batch_size_and_length(name: str) -> None:
    model, x = fetch(name), example(name)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged = merge([model, twin], batches(name), matcher="permute", example_inputs=(x,))
    assert error(run(model, (x,)), run(merged, (x,))) < EXACT
    report = merged.meta["zipfx"]
    assert not [p for p in report.pinned if "inside one node" in p.reason]
    assert len(report.spaces) == len(spaces)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_projected", "gru_state", "encoder_layer", "decoder"])
def test_law_3_at_every_cut(name: str) -> None:
    model, x = fetch(name), example(name)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    for cut in running_modules(model):
        merged = merge([model, twin], batches(name), matcher="permute", partial=cut)
        assert heads_error(merged, [run(model, (x,))] * 2, (x,)) < EXACT


def test_heads_that_take_different_items_of_a_tuple() -> None:
    """The cut stays behind the leaf itself; what leaves it there is merged by position."""
    model, x = fetch("lstm"), example("lstm")
    other = copy.deepcopy(model)
    other.take = lambda found: found[1][0][-1]
    merged = merge([model, other], batches("lstm"), matcher="permute", partial="leaf")
    assert heads_error(merged, [run(model, (x,)), run(other, (x,))], (x,)) < EXACT
    assert "leaf.weight_ih_l0" in {s.name for s in merged.meta["zipfx"].spaces}


@pytest.mark.sweep
@pytest.mark.parametrize("places", ["last", "reads", "all"])
@pytest.mark.parametrize("name", ["lstm_bidirectional", "attention"])
def test_law_3_for_every_choice_of_places(name: str, places: str) -> None:
    model, x = fetch(name), example(name)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    options = {"matcher": "permute", "places": places, "example_inputs": (x,)}
    merged = merge([model, twin], batches(name), **options)
    assert error(run(model, (x,)), run(merged, (x,))) < EXACT


def test_three_float32_models_with_calibration_data_of_their_own() -> None:
    model = MODELS["lstm"]()
    x = example("lstm").float()
    spaces = zipfx.analyze(model, x)
    twins = [spaces.permuted(model, spaces.random_permutations(seed)) for seed in (1, 2)]
    data = [[(t.float(),) for (t,) in batches("lstm")] for _ in range(3)]
    merged = zipfx.zip([model, *twins], data, matcher="permute", progress=False)
    assert error(run(model, (x,)), run(merged, (x,))) < 1e-5


# ------------------------------------------------------------------ what is observed
def observed(model: nn.Module, space: str, data: Sequence[Any], places: int) -> list[Tensor]:
    """The covariances of a space at its first places."""
    module = trace(model)
    spaces = run_analysis(module, (data[0][0][0][:2],)).spaces
    wanted = [replace_places(spaces[space], places)]
    batches = calibration([args for args, _ in data], 2)  # one list of batches
    seen = observe([module], wanted, batches, choose=lambda s: s.places)
    return [o.statistics().covariance for o in seen.observers(space)]


def replace_places(space: zipfx.Space, most: int) -> zipfx.Space:
    twin = copy.copy(space)
    object.__setattr__(twin, "places", space.places[:most])
    return twin


def test_a_hidden_layer_is_observed_before_and_after_its_activation() -> None:
    model = fetch("encoder_layer")
    x = example("encoder_layer", 20)
    made, read = observed(model, "leaf.linear1", [((x,), {})], 2)
    leaf: Any = model.leaf
    with torch.no_grad():
        y = model.e(x)
        y = leaf.norm1(y + leaf.self_attn(y, y, y)[0])
        h = leaf.linear1(y).flatten(0, 1)
    for found, values in ((made, h), (read, h.relu())):
        assert torch.allclose(found, torch.cov(values.T, correction=0), rtol=1e-10)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_observed_where_the_next_one_reads_it(layer: Any) -> None:
    model = Around(layer(6, 8, 2, **FIRST), 8, output).double().eval()
    x = example("lstm", 20)
    _, read = observed(model, "leaf.weight_ih_l0", [((x,), {})], 2)
    below = layer(6, 8, 1, **FIRST).double()
    below.load_state_dict({k: v for k, v in model.leaf.state_dict().items() if "l0" in k})
    with torch.no_grad():
        values = below(model.e(x))[0].flatten(0, 1)
    assert torch.allclose(read, torch.cov(values.T, correction=0), rtol=1e-10)


@pytest.mark.parametrize("name", ["lstm", "lstm_projected", "encoder_layer", "attention"])
def test_law_5_cutting_the_data_changes_nothing(name: str) -> None:
    """Batches of one sample take other aten calls (a bias is added at once, not later)."""
    model, x = fetch(name), example(name, 12)
    space = {"encoder_layer": "leaf.linear1", "attention": "leaf.in_proj_weight"}
    space_name = space.get(name, "leaf.weight_ih_l0")
    whole = observed(model, space_name, [((x,), {})], 2)
    parts = observed(model, space_name, [((part,), {}) for part in x.split([4, 1, 1, 6])], 2)
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12 * float(a.abs().max()))


@pytest.mark.parametrize("leaf", [Odd, Recursion])
def test_a_leaf_of_ones_own(leaf: Any) -> None:
    model, x = own(leaf()), example("lstm")
    module = trace(model, Leaves())
    spaces = run_analysis(module, (x,)).spaces
    assert [s.size for s in spaces if any(p.inner for p in s.places)] == [9]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged = merge(
        [model, twin], batches("lstm"), matcher="permute", tracer=Leaves(), example_inputs=(x,)
    )
    assert not [p for p in merged.meta["zipfx"].pinned if "inside one node" in p.reason]
    assert error(run(model, (x,)), run(merged, (x,))) < EXACT


def test_another_way_through_a_leaf_is_an_error() -> None:
    data = [(example("lstm", 8, length),) for length in (4, 4, 6)]
    with pytest.raises(
        zipfx.ZipError,
        match=r"model 0: node 'leaf' \(call_module leaf\) does not compute on this batch what it",
    ):
        merge([own(Odd(5)), own(Odd(5))], data, tracer=Leaves())


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_heard_with_its_bias(turned: bool) -> None:
    """Whether it is added at once, or later as of what does not lie in one piece; what is added
    after it is not heard."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + 7 * torch.ones(4)  # type: ignore[no-any-return]

    leaf = Sum()
    x = torch.randn(5, 2, 3)
    x = x.transpose(0, 1) if turned else x
    key = OwnedTensors(leaf, ()).key(leaf.layer.weight)
    transposed = OwnedTensors(leaf, ()).key(leaf.layer.weight.T)
    model = nn.Sequential(leaf)
    with torch.no_grad():
        for at in (key, transposed):
            assert at is not None
            try:
                _, heard = Probe(model, "call_module", "0", [(at, True)], "0")(x)
            except zipfx.ZipError:
                continue
            (found,) = heard[at, True]
            assert torch.allclose(found.reshape((*x.shape[:-1], 4)), leaf.layer(x))
            return
    pytest.fail("nothing was heard")
