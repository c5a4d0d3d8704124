"""Sequences of one step: what a state becomes is not seen, and must not be got wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zipfx
from tests.helpers.blocks import Net, data, parameter
from tests.helpers.laws import EXACT, error, heads_error, merge

N = 6


def layer(kind: Any, **settings: Any) -> Net:
    width = settings.get("proj_size", N) * (2 if settings.get("bidirectional") else 1)
    leaf = kind(8, N, batch_first=True, **settings)
    return Net(
        lambda s, x: s.o(s.g(torch.relu(s.a(x)))[0]).mean(1),
        a=nn.Linear(4, 8), g=leaf, o=nn.Linear(width, 3),
    )  # fmt: skip


def packed(kind: Any, **settings: Any) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        lengths = (x[..., 0] > 0).sum(1).clamp(min=1).cpu()
        given = pack_padded_sequence(
            torch.relu(s.a(x)), lengths, batch_first=True, enforce_sorted=False
        )
        return s.o(pad_packed_sequence(s.g(given)[0], batch_first=True)[0]).sum(1)

    model = layer(kind, **settings)
    model.function[0] = forward
    return model


def started(kind: Any, **settings: Any) -> Net:
    """With a learned start."""
    model = layer(kind, **settings)
    model.start = parameter(1, 1, N)
    model.double()

    def forward(s: Any, x: Tensor) -> Tensor:
        first = s.start.expand(1, x.shape[0], N).contiguous()
        return s.o(s.g(torch.relu(s.a(x)), first)[0]).mean(1)

    model.function[0] = forward
    torch.nn.init.normal_(model.start)
    return model


LAYERS: dict[str, Callable[[], Net]] = {
    "rnn": lambda: layer(nn.RNN),
    "gru": lambda: layer(nn.GRU),
    "lstm": lambda: layer(nn.LSTM),
    "two ways": lambda: layer(nn.GRU, num_layers=2, bidirectional=True),
    "projected": lambda: layer(nn.LSTM, proj_size=4),
    "packed gru": lambda: packed(nn.GRU),
    "packed lstm": lambda: packed(nn.LSTM, num_layers=2, bidirectional=True),
    "a learned start": lambda: started(nn.RNN),
}


def one_step(name: str, count: int) -> Tensor:
    """Inputs of one step, or of which one is valid."""
    if not name.startswith("packed"):
        return data(1, 4, batch=count)
    x = data(5, 4, batch=count)
    return torch.cat([x[:, :1].abs(), -x[:, 1:].abs()], 1)


def axes(spaces: zipfx.SpaceMap) -> list[Any]:
    """Of every space; the places of a feature on one axis may be in another order."""
    return [
        (
            s.name,
            s.size,
            [(a.parameter, a.dim, a.role, a.index.sort(1)[0].tolist()) for a in s.axes],
        )
        for s in spaces
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_have_the_spaces_of_longer_sequences(name: str) -> None:
    model, long = LAYERS[name](), data(5, 4, seed=1, batch=8)
    found, expected = (zipfx.analyze(model, x) for x in (one_step(name, 8), long))
    assert axes(found) == axes(expected)
    assert len(found) > 1
    assert found.notes == expected.notes
    twin = found.permuted(model, found.random_permutations(1))
    assert error(model(long), twin(long)) < EXACT


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "partial"),
    [(name, cut) for name in LAYERS for cut in (None, "a", *([] if "packed" in name else ["g"]))],
)
def test_the_first_batch_has_sequences_of_one_step(name: str, partial: str | None) -> None:
    model, long = LAYERS[name](), data(5, 4, seed=1, batch=200)
    spaces = zipfx.analyze(model, long)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    batches = [(one_step(name, 8),), (long,)]
    merged = merge([model, twin], batches, matcher="permute", partial=partial)
    if partial is None:
        assert error(model(long), merged(long)) < EXACT
    else:
        assert heads_error(merged, [model(long)] * 2, (long,)) < EXACT


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", ["rnn", "gru", "two ways"])
def test_an_exported_model_calls_functions(name: str) -> None:
    model, short = LAYERS[name](), one_step(name, 8)
    exported = torch.export.export(model, (short,)).module()
    assert axes(zipfx.analyze(exported, short)) == axes(zipfx.analyze(model, short))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.g, self.o = nn.Linear(4, 8), nn.RNNCell(8, N), nn.Linear(N, 3)
        self.double().eval()

    def forward(self, x: Tensor, h: Tensor) -> Any:
        for t in range(x.shape[1]):
            h = self.g(torch.relu(self.a(x[:, t])), h)
        return self.o(h)


@pytest.mark.filterwarnings("ignore")
def test_a_start_that_is_an_input() -> None:
    """Its features are as they come, and so are those of the states after it."""
    model = TwoInputs()
    short, long = data(1, 4, batch=8), data(5, 4, seed=1, batch=8)
    for start in (data(N, batch=8), torch.zeros(8, N).double()):
        spaces = zipfx.analyze(model, (short, start))
        twin = spaces.permuted(model, spaces.random_permutations(1))
        assert error(model(long, start), twin(long, start)) < EXACT
        assert [s.size for s in spaces] == [8]


# ------------------------------------------------------------------ cells
def cell(kind: Any) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = s.g(torch.relu(s.a(x[:, t])), state)
        return s.o(state[0] if isinstance(s.g, nn.LSTMCell) else state)

    return Net(forward, a=nn.Linear(4, 8), g=kind(8, N), o=nn.Linear(N, 3))


def by_hand(step: Callable[[Any, Tensor, Tensor], Tensor], **parts: Any) -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], N)
        for t in range(x.shape[1]):
            h = step(s, torch.relu(s.a(x[:, t])), h)
        return s.o(h)

    return Net(forward, a=nn.Linear(4, 8), o=nn.Linear(N, 3), **parts)


def convolved() -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], N, 4)
        for t in range(x.shape[1]):
            h = torch.tanh(s.i(x[:, t, None]) + s.r(h))
        return s.o(h.mean(2))

    kernels = {"i": nn.Conv1d(1, N, 3, padding=1), "r": nn.Conv1d(N, N, 3, padding=1)}
    return Net(forward, o=nn.Linear(N, 3), **kernels)


TORCH_CELLS = {kind.__name__: kind for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)}
CELLS: dict[str, Callable[[], Net]] = {
    "linear": lambda: by_hand(
        lambda s, x, h: torch.tanh(s.i(x) + s.r(h)), i=nn.Linear(8, N), r=nn.Linear(N, N)
    ),
    "product and sum": lambda: by_hand(
        lambda s, x, h: torch.tanh(s.i(x) + (s.r * h[:, None]).sum(-1)),
        i=nn.Linear(8, N), r=parameter(N, N),
    ),
    "joined": lambda: by_hand(
        lambda s, x, h: torch.tanh(s.i(torch.cat([x, h], 1))), i=nn.Linear(8 + N, N)
    ),
    "joined before": lambda: by_hand(
        lambda s, x, h: torch.tanh(s.i(torch.cat([h, x], 1))), i=nn.Linear(8 + N, N)
    ),
    "gated": lambda: by_hand(
        lambda s, x, h: h + torch.sigmoid(s.f(x) + s.r(h)) * torch.tanh(s.i(x)),
        i=nn.Linear(8, N), f=nn.Linear(8, N), r=nn.Linear(N, N),
    ),
    "convolution": convolved,
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*TORCH_CELLS, *CELLS])
@pytest.mark.filterwarnings("ignore")
def test_cells_in_a_loop(name: str) -> None:
    """Cells of torch are known; what reads the state of others is pinned, and a note says so."""
    model = cell(TORCH_CELLS[name]) if name in TORCH_CELLS else CELLS[name]()
    short, long = data(1, 4, batch=8), data(5, 4, seed=1, batch=8)
    spaces = zipfx.analyze(model, short)
    for seed in range(3):
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        assert error(model(long), twin(long)) < EXACT
    hidden = {s.name for s in zipfx.analyze(model, long)} - {s.name for s in spaces}
    told = [note for note in spaces.notes if "meets only zeros" in note]
    reasons = [p for p in spaces.pinned if "meets only zeros" in p.reason]
    assert bool(hidden) == bool(told) == bool(reasons) == (name not in TORCH_CELLS)


def test_elementwise_weights_of_a_state_are_tied_on_one_step() -> None:
    model = by_hand(lambda s, x, h: torch.relu(s.i(x) + s.r * h), i=nn.Linear(8, N), r=parameter(N))
    short, long = data(1, 4, batch=8), data(5, 4, seed=1, batch=8)
    spaces = zipfx.analyze(model, short)
    assert {a.parameter for s in spaces for a in s.axes} >= {"r", "i.weight", "o.weight"}
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(model(long), twin(long)) < EXACT


def test_a_cell_between_two_values_ties_only_what_it_must() -> None:
    """A cell that is handed data for its state is no loop."""
    model = Net(
        lambda s, x: s.o(s.g(torch.relu(s.a(x)), torch.relu(s.b(x)))),
        a=nn.Linear(4, 8), b=nn.Linear(4, N), g=nn.RNNCell(8, N), o=nn.Linear(N, 3),
    )  # fmt: skip
    spaces = zipfx.analyze(model, data(4))
    assert [(s.name, s.size) for s in spaces] == [("a", 8), ("b", N), ("g.weight_ih", N)]


def test_channels_padded_with_zeros_are_no_state() -> None:
    model = Net(
        lambda s, x: s.o(torch.relu(s.a(torch.nn.functional.pad(x, (0, 4))))),
        a=nn.Linear(8, N), o=nn.Linear(N, 3),
    )  # fmt: skip
    spaces = zipfx.analyze(model, data(4))
    assert [s.size for s in spaces] == [N]
    assert spaces.notes == ()
