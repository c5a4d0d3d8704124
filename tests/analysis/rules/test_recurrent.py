"""Recurrent layers whose gates are one operation, and sentences of several lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zipfx
from tests.helpers.blocks import data, randomise
from tests.helpers.fused import example, own
from tests.helpers.laws import EXACT, error, heads_error, merge, run
from zipfx.analysis.analysis import run_analysis
from zipfx.trace.tracing import Tracer, trace

Batch = tuple[Tensor, Tensor]


class Packed(nn.Module):
    """Words, a recurrent layer on packed sentences, and what it says of each as a whole."""

    def __init__(self, kind: Any, first: bool, ordered: bool, total: bool, **settings: Any) -> None:
        super().__init__()
        self.first, self.ordered, self.total = first, ordered, total
        both = 2 if settings.get("bidirectional") else 1
        self.emb = nn.Embedding(20, 8)
        self.r = kind(8, 6, batch_first=first, **settings)
        self.h = nn.Linear(both * settings.get("proj_size", 6), 3)
        randomise(self, 0)
        self.double().eval()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        words = self.emb(ids) if self.first else self.emb(ids.T)
        packed = pack_padded_sequence(
            words, lengths.cpu(), batch_first=self.first, enforce_sorted=self.ordered
        )
        y, state = self.r(packed)
        state = state[0] if isinstance(self.r, nn.LSTM) else state
        y, _ = pad_packed_sequence(
            y, batch_first=self.first, total_length=ids.shape[1] if self.total else None
        )
        last = torch.cat([state[-2], state[-1]], -1) if self.r.bidirectional else state[-1]
        found: Tensor = self.h(y.amax(1 if self.first else 0)) + self.h(last)
        return found


def batch(count: int, longest: int, seed: int, ordered: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    lengths = lengths.sort(descending=True)[0] if ordered else lengths
    return torch.randint(20, (count, longest), generator=generator), lengths


TWO_WAYS = {"num_layers": 2, "bidirectional": True, "proj_size": 4}
LAYERS: dict[str, tuple[Any, bool, bool, bool, dict[str, Any], list[int]]] = {
    "lstm": (nn.LSTM, True, False, False, {}, [6, 8]),
    "lstm, sorted": (nn.LSTM, False, True, True, {}, [6, 8]),
    "gru, sorted": (nn.GRU, True, True, False, {}, [6, 8]),
    "gru": (nn.GRU, False, False, True, {}, [6, 8]),
    "rnn": (nn.RNN, True, False, False, {}, [6, 8]),
    "lstm, both ways": (nn.LSTM, True, False, True, {"bidirectional": True}, [6, 6, 8]),
    "gru, two layers": (nn.GRU, True, False, False, {"num_layers": 2}, [6, 6, 8]),
    "lstm, all of it": (nn.LSTM, True, True, False, TWO_WAYS, [4] * 4 + [6] * 4 + [8]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences(name: str) -> None:
    """Law 1, and law 3 in full and at every cut, for sentences in other numbers and lengths."""
    kind, first, ordered, total, settings, expected = LAYERS[name]
    model = Packed(kind, first, ordered, total, **settings)
    example = batch(2, 6, 3, ordered)
    spaces = zipfx.analyze(model, example)
    assert sorted(s.size for s in spaces) == expected
    assert {p.reason for p in spaces.pinned} == {"output of the network"}
    others = [example, *(batch(n, t, n, ordered) for n, t in ((5, 9), (1, 4), (4, 2)))]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    loader = [batch(8, 7, 100 + i, ordered) for i in range(6)]
    for x in others:
        assert error(model(*x), twin(*x)) < EXACT
    for repair in ("none", "refit"):
        merged = merge([model, twin], loader, matcher="permute", repair=repair)
        assert max(error(model(*x), merged(*x)) for x in others) < EXACT
    for cut in ("emb", "r", "h"):
        merged = merge([model, twin], loader, matcher="permute", partial=cut)
        assert max(heads_error(merged, [model(*x)] * 2, x) for x in others) < EXACT


def test_sentences_that_are_folded_into_the_batch_are_pinned() -> None:
    """Which of the features on the batch axis come first is said by their lengths."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.r, self.h = (
                nn.Linear(5, 6),
                nn.GRU(1, 4, batch_first=True),
                nn.Linear(4, 2),
            )
            randomise(self, 0)
            self.double().eval()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            one = self.a(x).mT.flatten(0, 1).unsqueeze(-1)
            packed = pack_padded_sequence(one, lengths, batch_first=True, enforce_sorted=False)
            found: Tensor = self.h(self.r(packed)[1][-1])
            return found

    model, x = Folded(), data(7, 5)
    lengths = torch.tensor([7, 3, 4, 4, 5, 6] * 2)
    spaces = zipfx.analyze(model, (x, lengths), verify=False)
    assert [s.size for s in spaces] == [4]
    reasons = {p.reason for p in spaces.pinned if p.parameter == "a.weight" and p.dim == 0}
    assert reasons <= {"lengths say which are there", "chosen by data"}


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
