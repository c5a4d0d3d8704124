"""Sentences of several lengths, packed before a recurrent layer and padded behind it; padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zipfx
from tests.helpers.blocks import Net, data, law1, law3, parameter, randomise, sizes
from tests.helpers.laws import EXACT, error, heads_error, merge
from zipfx.analysis.spaces.values import Place
from zipfx.observe.observer import Observer

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


# ------------------------------------------------------------------ padding
def test_images_of_several_sizes_that_forward_pads() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(s.b(F.pad(F.relu(s.a(x)), (1, 1, 1, 1)))).mean((2, 3)))

    model = Net(forward, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 5, 3), h=nn.Linear(5, 3))
    x = data(3, 8, 8)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    loader = [(data(3, 8 + i, 10 - i, seed=100 + i, batch=8),) for i in range(4)]
    assert error(model(x), merge([model, twin], loader, matcher="permute")(x)) < EXACT
    merged = merge([model, twin], loader, matcher="permute", partial="a")
    other = data(3, 11, 9, batch=5)
    assert heads_error(merged, [model(other)] * 2, (other,)) < EXACT


def test_features_that_are_missing_in_other_places_are_told_apart() -> None:
    """Of one image, the only sizes that tell are those of the triangle."""

    def forward(s: Any, x: Tensor) -> Tensor:
        rows = s.a(x)[:, None].expand(-1, 8, 8).tril()
        return s.h(s.c(rows.mT).flatten(1))

    model = Net(forward, a=nn.Linear(5, 8), c=nn.Conv1d(8, 4, 3), h=nn.Linear(24, 3))
    x = data(5, batch=1)
    spaces = zipfx.analyze(model, x, verify=False)
    assert [s.size for s in spaces] == [4]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(model(x), twin(x)) < EXACT


def padded(s: Any, x: Tensor) -> Tensor:
    return torch.cat([F.pad(s.a(x), (0, 0, 1, 0)), F.pad(s.b(x), (0, 0, 0, 2))], 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, x: padded(s, x).mean(1), [8]),
        (lambda s, x: padded(s, x).softmax(2).amax(1), [8]),
        (lambda s, x: torch.cat([s.p.expand(x.shape[0], -1, -1), s.a(x)], 1).logsumexp(1), [8]),
        (
            lambda s, x: torch.cat([F.pad(s.a(x), (0, 0, 1, 0)), x.repeat(1, 1, 2)], 1).mean(1),
            [2] * 4,
        ),
    ],
    ids=["beside one another", "softmax", "a class token", "beside the input"],
)
def test_what_is_taken_together_with_padding(function: Any, expected: list[int]) -> None:
    """Features of a tensor that lie beside those of another meet them in a sum over both."""
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(4, 8), "h": nn.Linear(8, 3)}
    model = Net(lambda s, x: s.h(function(s, x)), **layers, p=parameter(1, 1, 8))
    assert [n for n, _ in sizes(model, data(6, 4))] == expected
    law1(model, 6, 4)
    law3(model, 6, 4, seeds=[0])


def test_softmax_over_parts_of_a_cat_ties_nothing() -> None:
    """Its two halves are normalised each by themselves, and read by weights of their own."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = torch.cat([F.pad(s.a(x), (0, 0, 0, 6)), F.pad(s.b(x), (0, 0, 6, 0))], 1).softmax(2)
        return s.h(y[:, :6]) + s.g(y[:, -6:])

    heads = {"h": nn.Linear(8, 3), "g": nn.Linear(8, 3)}
    model = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(4, 8), **heads)
    assert sizes(model, data(6, 4)) == [(8, ()), (8, ())]
    law1(model, 6, 4)


def test_a_place_is_known_by_coordinates() -> None:
    """Features before positions, which are fewer or more than on the example inputs."""
    index = torch.arange(6).reshape(3, 2)  # three features at two positions
    observer = Observer(Place("n", (1, 2), index, read=True, sizes=(3, 2)), 1)
    x = torch.arange(12.0).reshape(1, 3, 4)
    assert observer._samples(x).tolist() == [[0, 4, 8], [1, 5, 9]]
    assert observer._samples(x[..., :1]).tolist() == [[0, 4, 8]]
    assert observer._samples(x[..., :2]).tolist() == [[0, 4, 8], [1, 5, 9]]


@pytest.mark.parametrize("half", [torch.tril, torch.triu])
def test_triangular_weights_keep_their_order(half: Any) -> None:
    """Row k reads k columns: none is like another, though each is, for all rows but one."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.a(x) @ half(s.w))

    model = Net(forward, a=nn.Linear(5, 8), h=nn.Linear(8, 3), w=parameter(8, 8))
    assert sizes(model, data(6, 5)) == []
    law1(model, 6, 5)
