"""Unfold: what a node keeps inside becomes modules of their own, on the same memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models import swin_transformer

import zipfx
from tests.helpers.laws import error, heads_error, merge, permuted, run
from zipfx.repair.exposed.unfold import unfold
from zipfx.trace.record import record_of
from zipfx.trace.tracing import trace

UNCHANGED = 1e-9


class Attending(nn.Module):
    """Self-attention, masked, and attention to something else."""

    def __init__(
        self, batch_first: bool = True, bias: bool = True, other: int | None = None
    ) -> None:
        super().__init__()
        self.first = batch_first
        self.a, self.other = nn.Linear(5, 16), nn.Linear(5, other or 16)
        self.own = nn.MultiheadAttention(16, 4, batch_first=batch_first, bias=bias)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True, kdim=other, vdim=other)
        self.up, self.h = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, read = torch.tanh(self.a(x)), torch.tanh(self.other(x))
        mask = torch.zeros(6, 6, dtype=torch.bool)
        mask[:, 4:] = True
        z = y if self.first else y.transpose(0, 1)
        z = self.own(z, z, z, need_weights=False, attn_mask=mask)[0]
        y = y + (z if self.first else z.transpose(0, 1))
        mixed, shares = self.cross(query=y, value=read, key=read)
        made: Tensor = self.h(torch.relu(self.up(y + mixed)).mean(1))
        mean: Tensor = shares.mean()
        return made + mean


class Given(nn.Module):
    """Weights that are given to functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.b, self.of_b = nn.Parameter(torch.randn(8, 4, 1, 1) / 2), nn.Parameter(torch.randn(8))
        self.h = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(F.conv2d(x, self.a, None, 2, padding=(1, 1)))
        x = torch.relu(F.conv2d(x, self.b, bias=self.of_b, groups=2))
        return F.linear(x.mean((2, 3)), self.h)


@fx.wrap
def windowed(
    x: Tensor, inner: Tensor, outer: Tensor, *, heads: int, bias: Tensor, doubled: Tensor
) -> Tensor:
    """Attention inside pairs of words, as Swin has it; one bias is changed on its way."""
    pairs = x.reshape(-1, 2, x.shape[-1])
    q, k, v = F.linear(pairs, inner, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    q *= 0.5
    mixed = torch.softmax(q @ k.mT, -1) @ v
    mixed = F.linear(mixed.transpose(1, 2).flatten(2), outer, doubled * 2)
    return mixed.reshape(x.shape)


class Windows(nn.Module):
    """Weights that a wrapped function hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.own = nn.Linear(5, 12), nn.Linear(12, 36)
        self.out, self.up, self.h = nn.Linear(12, 12), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        y = y + windowed(
            y, self.own.weight, self.out.weight, heads=3, bias=self.own.bias, doubled=self.out.bias
        )
        made: Tensor = self.h(torch.relu(self.up(y)).mean(1))
        return made


WORDS, IMAGES = (8, 6, 5), (8, 3, 6, 6)
NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "packed": (Attending, WORDS),
    "time first": (lambda: Attending(batch_first=False), WORDS),
    "separate": (lambda: Attending(other=6), WORDS),
    "no bias": (lambda: Attending(bias=False), WORDS),
    "functions": (Given, IMAGES),
    "wrapped": (Windows, WORDS),
}
nets = pytest.mark.parametrize(("build", "shape"), NETS.values(), ids=NETS)


def made(build: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = build().double().eval()
    for name, t in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(t, std=0.3)
    return model


def batches(shape: tuple[int, ...], count: int = 6) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator).double(),) for _ in range(count)]


@nets
def test_the_function_and_the_names_stay(build: Any, shape: tuple[int, ...]) -> None:
    model = made(build)
    module = trace(model, inputs=batches(shape)[0])
    wide = unfold(module, batches(shape)[0])
    x = batches(shape, 3)[2]
    assert error(run(model, x), run(wide, x)) < 1e-12
    names = [node.name for node in wide.graph.nodes]
    kept = [n.name for n in module.graph.nodes if n.op not in ("get_attr",)]
    assert [n for n in names if n in kept] == kept


@nets
def test_what_is_written_there_is_written_to_the_model(build: Any, shape: tuple[int, ...]) -> None:
    model = copy.deepcopy(made(build))
    inputs = batches(shape)[0]
    wide = unfold(trace(model, inputs=inputs), inputs)
    before = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in wide.parameters():
            p.add_(1)
    assert all(torch.equal(p, was + 1) for p, was in zip(model.parameters(), before, strict=True))


class Declined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.biased = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.zeros = nn.MultiheadAttention(8, 2, add_zero_attn=True)
        self.twice, self.tuple = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
        self.weight, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kernel = nn.Parameter(torch.randn(8, 8, 1))

    def forward(self, x: Tensor) -> Any:
        x = self.biased(x, x, x)[0] + self.zeros(x, x, x)[0]
        x = self.twice(x, x, x)[0] + self.twice(x, x, x)[0]
        x = F.conv1d(x.mT, self.kernel, padding=x.shape[0]).mT[:, : x.shape[1]]
        x = F.linear(x, self.weight.weight * 2) + self.shared(F.linear(x, self.shared.weight))
        return x, self.tuple(x, x, x)


def test_what_can_not_be_unfolded_stays_as_it_is() -> None:
    module = fx.symbolic_trace(Declined())
    assert str(unfold(module, [torch.randn(2, 3, 8)]).graph) == str(module.graph)


def test_the_model_is_not_touched() -> None:
    module = trace(made(Attending), inputs=batches(WORDS)[0])
    graph, names = str(module.graph), list(dict(module.named_modules()))
    unfold(module, batches(WORDS)[0])
    assert (str(module.graph), list(dict(module.named_modules()))) == (graph, names)


# ------------------------------------------------------------------ refit
@pytest.mark.sweep
@nets
def test_law_3_nothing_changes_where_the_merge_is_exact(build: Any, shape: Any) -> None:
    model, data = made(build), batches(shape)
    models = [model, permuted(model, data[0])]
    merged = merge(models, data, matcher="permute", repair="refit")
    assert error(run(model, data[0]), run(merged, data[0])) < UNCHANGED
    assert not any(r.changed for r in merged.meta["zipfx"].refits)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("build", "cut"),
    [*((Attending, cut) for cut in ("a", "own", "cross", "up")), (Windows, "a"), (Windows, "up")],
)
def test_law_3_at_every_cut(build: Any, cut: str) -> None:
    model, data = made(build), batches(WORDS)
    models = [model, permuted(model, data[0])]
    merged = merge(models, data, partial=cut, matcher="permute", repair="refit")
    assert heads_error(merged, [run(model, data[0])] * 2, data[0]) < UNCHANGED


@pytest.mark.sweep
@nets
def test_every_layer_gets_nearer(build: Any, shape: tuple[int, ...]) -> None:
    models, data = [made(build, seed) for seed in range(2)], batches(shape, 40)
    merged = merge(models, data, matcher="permute", repair="refit")
    report = merged.meta["zipfx"]
    left = [note for note in report.notes if "not refitted" in note]
    assert left == (["not refitted: out.bias"] if build is Windows else [])
    parts = ("query", "key", "value", "out_proj")
    attention = [f"{of}.{part}" for of in ("own", "cross") for part in parts]
    expected = {Given: ["a", "b", "h"], Windows: ["a", "own", "out", "up", "h"]}
    everything = ["a", "other", *attention, "up", "h"]
    assert [r.name for r in report.refits] == expected.get(build, everything)
    assert all(r.after < r.before for r in report.refits if r.changed)
    assert {r.name for r in report.refits if not r.changed} <= {"a", "other"}  # they read the data


@fx.wrap
def few_or_many(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) if len(x) < 7 else x @ weight.mT


class FewOrMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.h(torch.relu(few_or_many(torch.tanh(self.a(x)), self.b.weight)))
        return made


def test_a_function_that_goes_another_way_with_other_data() -> None:
    models = [made(FewOrMany, seed) for seed in range(2)]
    merge(models, batches((6, 5)), repair="refit")
    few = "few_or_many does not call F.linear here as on example_inputs; pass"
    with pytest.raises(zipfx.ZipError, match=f"fails on a calibration batch: {few}"):
        merge(models, batches((8, 5)), repair="refit")


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_windowed_attention_of_torchvision(version: int) -> None:
    block = {
        1: swin_transformer.SwinTransformerBlock,
        2: swin_transformer.SwinTransformerBlockV2,
    }[version]

    def swin() -> nn.Module:
        return swin_transformer.SwinTransformer(
            [2, 2], 12, [2], [2], [4, 4], num_classes=3, block=block
        )

    models, data = [made(swin, seed) for seed in range(2)], batches((8, 3, 16, 16))
    gaps = []
    for repair in ("none", "refit"):
        merged = merge(models, data, matcher="permute", repair=repair)
        x = batches((32, 3, 16, 16), 7)[6][0]
        gaps.append(error(sum(run(m, (x,)) for m in models) / 2, run(merged, (x,))))
    report = merged.meta["zipfx"]
    changed = {r.name for r in report.refits if r.changed == r.outputs}
    assert {f"features.1.{b}.attn.{part}" for b in range(2) for part in ("qkv", "proj")} <= changed
    assert gaps[1] < gaps[0] / 2
    left = next(note for note in report.notes if "not refitted" in note)
    assert "qkv.weight" not in left
    assert ("qkv.bias" in left) == (version == 2)  # it is changed on its way


class Encoding(nn.Module):
    """torch's encoder, with or without a mask, which its own code asks about."""

    def __init__(self, masked: bool = False, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, **options)
        self.masked, self.a = masked, nn.Linear(5, 16)
        self.encoder, self.h = (
            nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), False),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1) if self.masked else None
        made: Tensor = self.h(self.encoder(self.a(x), mask=mask).mean(1))
        return made


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}])
def test_transformers_of_torch_are_looked_into(options: Any) -> None:
    enabled = torch.backends.mha.get_fastpath_enabled()
    model, data = made(lambda: Encoding(**options)), batches(WORDS, 20)
    module = trace(model, inputs=data[0])
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    assert not record_of(module).notes
    assert "encoder.layers.1.linear2" in {n.target for n in module.graph.nodes}
    models = [model, permuted(model, data[0])]
    for cut in (None, "encoder.layers.0", "encoder.layers.1.linear1"):
        merged = merge(models, data, partial=cut, matcher="permute", repair="refit")
        heads = [run(merged, data[1])] if cut is None else run(merged, data[1])
        assert all(error(run(model, data[1]), head) < UNCHANGED for head in heads)
    strangers = [made(lambda: Encoding(**options), seed) for seed in range(2)]
    names = {r.name for r in merge(strangers, data, repair="refit").meta["zipfx"].refits}
    assert {"encoder.layers.0.self_attn.query", "encoder.layers.1.linear1"} <= names


def test_a_transformer_that_asks_too_much_stays_a_leaf() -> None:
    model, data = made(lambda: Encoding(masked=True)), batches(WORDS)
    module = trace(model, inputs=data[0])
    assert "encoder" in {n.target for n in module.graph.nodes}
    models = [model, permuted(model, data[0])]
    merged = merge(models, data, matcher="permute", repair="refit")
    assert error(run(model, data[1]), run(merged, data[1])) < UNCHANGED
    assert "not refitted: encoder" in merged.meta["zipfx"].notes


def test_a_tracer_of_one_s_own_decides_for_itself() -> None:
    model, data = made(Encoding), batches(WORDS)
    spaces = zipfx.analyze(model, data[0], tracer=fx.Tracer())
    assert "encoder" in {n.name for n in spaces.nodes}
    assert sorted(s.size for s in spaces) == sorted(s.size for s in zipfx.analyze(model, data[0]))


# ------------------------------------------------------------------ odd places
class Twice(nn.Module):
    """Attention before a layer and after it, and a layer named as a part of it could be."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.a, self.m__query = nn.Linear(5, 16), nn.Linear(16, 16)
        self.m, self.b, self.h = nn.MultiheadAttention(16, 4), nn.Linear(16, 16), nn.Linear(16, 3)
        self.other = self.m if shared else nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.m__query(torch.tanh(self.a(x))))
        y = y + self.m(y, y, y)[0]
        y = y + torch.tanh(self.b(y))
        made: Tensor = self.h(y + self.other(y, y, y)[0])
        return made


@pytest.mark.sweep
@pytest.mark.parametrize("shared", [[True, True], [False, False], [False, True]])
@pytest.mark.parametrize("cut", ["m", "b"])
def test_attention_on_both_sides_of_a_cut(shared: list[bool], cut: str) -> None:
    x = batches(WORDS)[0]
    first, second = (made(lambda s=s: Twice(s)) for s in shared)  # type: ignore[misc]
    data = batches(WORDS)
    models = [first, permuted(first, x) if shared[0] == shared[1] else second]
    merged = merge(models, data, partial=cut, matcher="permute", repair="refit")
    if shared[0] == shared[1]:
        assert heads_error(merged, [run(first, x)] * 2, x) < UNCHANGED
    names = [r.name for r in merged.meta["zipfx"].refits]
    twice = shared[0] and cut == "m"  # all of the network, then, with one attention for two places
    assert ("m.query" in names) != twice
    assert "m__query" in names


class Same(nn.MultiheadAttention):
    """A subclass that changes nothing, which fx would look into."""


def test_subclasses_that_change_nothing_are_attention_too() -> None:
    model = made(Attending)
    model.own = Same(16, 4, batch_first=True).double().eval()
    data = batches(WORDS, 20)
    merged = merge([model, permuted(model, data[0])], data, matcher="permute", repair="refit")
    assert error(run(model, data[1]), run(merged, data[1])) < UNCHANGED
    assert "own.query" in {r.name for r in merged.meta["zipfx"].refits}


class Padded(nn.Module):
    """torch's encoder, told where words are padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.a, self.encoder = nn.Linear(5, 16), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, mask: Any = None, padding: Any = None) -> Tensor:
        found: Tensor = self.encoder(self.a(x), mask=mask, src_key_padding_mask=padding)
        return found.mean(1)


def test_padding_that_the_examples_do_not_have() -> None:
    """torch sets padded words to zero, but only in one of its kernels."""
    model, x = made(Padded), batches(WORDS)[0][0]
    padding = torch.zeros(8, 6, dtype=torch.bool)
    padding[2:, 4:] = True  # the first two samples have none
    data = [{"x": x, "padding": padding}] * 4
    args = (x, None, padding)
    models = [model, permuted(model, args)]
    merged = merge(models, data, matcher="permute", repair="refit")
    assert error(run(model, args), run(merged, args)) < UNCHANGED


def test_a_mask_that_the_examples_do_not_have_is_not_forgotten() -> None:
    model, (x,) = made(Padded), batches(WORDS)[0]
    merged = merge([model, permuted(model, (x,))], [(x,)] * 4, matcher="permute", repair="refit")
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert error(run(model, (x, mask)), run(merged, (x, mask))) < UNCHANGED
