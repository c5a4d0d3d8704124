"""Layers of torch that are one node and have spaces inside, with inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import SwinTransformer

from zipfx.trace.tracing import Tracer

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
