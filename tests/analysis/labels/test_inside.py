"""Spaces inside one node: leaf modules of torch.nn, wrapped functions, leaves of one's own.

They are found by the aten calls and observed where a weight reads or makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import SwinTransformer

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, run, running_modules
from zipfx.analysis.analysis import run_analysis
from zipfx.model.running import decomposed
from zipfx.observe.joint_graph import observe
from zipfx.trace.tracing import Tracer, trace

FIRST = {"batch_first": True}


class Around(nn.Module):
    """A leaf module between two linear layers; `take` picks from what it returns."""

    def __init__(self, leaf: nn.Module, out: int, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.e, self.leaf, self.h, self.take = nn.Linear(5, 6), leaf, nn.Linear(out, 3), take

    def forward(self, x: Tensor) -> Any:
        return self.h(self.take(self.leaf(self.e(x))))


class Attention(nn.Module):
    def __init__(self, weights: bool, **options: Any) -> None:
        super().__init__()
        self.e, self.h, self.weights = nn.Linear(5, 6), nn.Linear(6, 3), weights
        self.leaf = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        y = self.e(x)
        return self.h(self.leaf(y, y, y, need_weights=self.weights)[0])


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Linear(5, 6), nn.Linear(6, 3)
        self.leaf = nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 10, **FIRST), 2)

    def forward(self, x: Tensor) -> Any:
        y = self.e(x)
        return self.h(self.leaf(y, y.flip(1)))


class Loop(nn.Module):
    """A cell, called at every step of a loop in Python."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.e, self.cell, self.h = nn.Linear(5, 6), cell, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        state, seen = None, []
        for step in range(4):
            state = self.cell(self.e(x[:, step]), state)
            seen.append(state[0] if isinstance(self.cell, nn.LSTMCell) else state)
        return self.h(torch.stack(seen, 1))


def output(found: Any) -> Any:
    return found[0]


def swin() -> nn.Module:
    return SwinTransformer([2, 2], 8, [2, 2], [2, 2], [4, 4], num_classes=5)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Around(nn.LSTM(6, 8, 2, **FIRST), 8, output),
    "lstm_no_bias": lambda: Around(nn.LSTM(6, 8, 2, bias=False), 8, output),
    "lstm_bidirectional": lambda: Around(nn.LSTM(6, 8, 2, bidirectional=True), 16, output),
    "lstm_projected": lambda: Around(nn.LSTM(6, 8, 2, proj_size=4, **FIRST), 4, output),
    "lstm_cell_state": lambda: Around(nn.LSTM(6, 8, 2, **FIRST), 8, lambda found: found[1][1]),
    "gru": lambda: Around(nn.GRU(6, 8, 3, **FIRST), 8, output),
    "gru_state": lambda: Around(nn.GRU(6, 8, 2, bias=False), 8, lambda found: found[1][-1]),
    "rnn": lambda: Around(nn.RNN(6, 8, 2, nonlinearity="relu"), 8, output),
    "lstm_cell": lambda: Loop(nn.LSTMCell(6, 8)),
    "gru_cell": lambda: Loop(nn.GRUCell(6, 8)),
}
TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(True),
    "attention_sdpa": lambda: Attention(False, bias=False),
    "encoder_layer": lambda: Around(nn.TransformerEncoderLayer(6, 2, 10, **FIRST), 6, lambda y: y),
    "encoder": lambda: Around(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 10, **FIRST), 2), 6, lambda y: y
    ),
    "decoder": Decoder,
}
MODELS = {**RECURRENT, **TRANSFORMERS, "swin": swin}


def example(name: str, batch: int = 2, length: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, 16, 16) if name == "swin" else (batch, length, 5)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fetch(name: str) -> nn.Module:
    """A model in float64 without constant parameters."""
    model = MODELS[name]().double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def batches(name: str) -> list[tuple[Tensor]]:
    """Batches of several sizes, one sample among them, and of several lengths if possible."""
    sizes = [(30, 4), (7, 4), (1, 4), (30, 4), (30, 4)]
    if name != "swin" and not name.endswith("_cell"):
        sizes += [(20, 1), (5, 9)]
    return [(example(name, *size, seed=i),) for i, size in enumerate(sizes)]


def parameters_of(space: zipfx.Space) -> set[str]:
    return {a.parameter for a in space.axes}


# ------------------------------------------------------------------ what is found
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, EXACT), (torch.float32, 1e-5)])
@pytest.mark.filterwarnings("ignore:.*not supported with oneDNN")
def test_law_1_and_nothing_is_opaque(name: str, dtype: torch.dtype, most: float) -> None:
    model, x = fetch(name).to(dtype), example(name).to(dtype)
    spaces = zipfx.analyze(model, x)
    assert not [p for p in spaces.pinned if "understood" in p.reason or "numeric" in p.reason]
    twin = spaces.permuted(model, spaces.random_permutations(2))
    assert error(run(model, (x,)), run(twin, (x,))) < most


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
    seen = observe([module], wanted, data, choose=lambda s: s.places)
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


# ------------------------------------------------------------------ own leaves, other ways
class Odd(nn.Module):
    """A leaf with a hidden layer, which takes another way through it for long sequences."""

    def __init__(self, long: int = 100) -> None:
        super().__init__()
        self.a, self.b, self.long = nn.Linear(6, 9), nn.Linear(9, 6), long

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.long:
            return x
        return self.b(F.gelu(self.a(x)))


class Recursion(nn.Module):
    """A leaf whose hidden state no other weight reads, and which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(6, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 9)
        for t in x.unbind(1):
            h = torch.tanh(self.w(t) + self.u(h))
        return h.square().mean(-1, keepdim=True).expand(-1, 6)


class Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, (Odd, Recursion)) or super().is_leaf_module(m, name)


def own(leaf: nn.Module) -> nn.Module:
    return Around(leaf, 6, lambda y: y).double().eval()


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


# ------------------------------------------------------------------ cells as they are on CUDA
def lstm_cell(a: Tensor, b: Tensor, c: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = sum(bias, start=a + b)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, gates


def gru_cell(a: Tensor, b: Tensor, h: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (a + bias[0], b + bias[1]) if bias else (a, b)
    (r, z, n), (hr, hz, hn) = a.chunk(3, 1), b.chunk(3, 1)
    n, z = torch.tanh(n + (r + hr).sigmoid() * hn), (z + hz).sigmoid()
    return n + z * (h - n), h.new_zeros(len(h), 5 * h.shape[1])


@pytest.fixture
def cuda_cells() -> Any:
    """The operations that only CUDA has, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_lstm_cell", lstm_cell, "CPU")
    library.impl("_thnn_fused_gru_cell", gru_cell, "CPU")
    yield
    library._destroy()


class Fused(nn.Module):
    """A layer as `torch.lstm` and `torch.gru` run it on CUDA without cuDNN."""

    def __init__(self, gates: int, bias: bool) -> None:
        super().__init__()
        self.op: Any = {4: "_thnn_fused_lstm_cell", 3: "_thnn_fused_gru_cell"}[gates]
        self.gates, self.bias = gates, bias
        self.w, self.u = nn.Linear(6, gates * 9, bias), nn.Linear(9, gates * 9, bias)
        self.out = nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        op = getattr(torch.ops.aten, self.op)
        h, c = x.new_zeros(len(x), 9), x.new_zeros(len(x), 9)
        bias = (self.w.bias, self.u.bias) if self.bias else ()
        for gates in F.linear(x, self.w.weight).unbind(1):
            hidden = F.linear(h, self.u.weight)
            if self.gates == 4:
                h, c, _ = op(gates, hidden, c, *bias)
            else:
                h, _ = op(gates, hidden, h, *bias)
        return self.out(h)


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_cell_is_understood(gates: int, bias: bool, cuda_cells: None) -> None:
    class AsLeaf(Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, Fused) or super().is_leaf_module(m, name)

    model, x = own(Fused(gates, bias)), example("lstm")
    spaces = run_analysis(trace(model, AsLeaf()), (x,)).spaces
    (space,) = [s for s in spaces if s.size == 9]
    tied = {(a.parameter, a.dim): a.index.numel() for a in space.axes}
    tensors = ("w.weight", "u.weight", *(("w.bias", "u.bias") if bias else ()))
    assert tied == {
        **{(f"leaf.{name}", 0): gates * 9 for name in tensors},
        ("leaf.u.weight", 1): 9,
        ("leaf.out.weight", 1): 9,
    }
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(run(model, (x,)), run(twin, (x,))) < EXACT
    merged = merge([model, twin], [(x,)] * 3, matcher="permute", tracer=AsLeaf())
    assert error(run(model, (x,)), run(merged, (x,))) < EXACT
