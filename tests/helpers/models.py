"""Tiny networks, each with one difficulty, and the sizes of their feature spaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zipfx.model.tensors import constant_names

IMAGE, VECTOR = (3, 4, 4), (5,)


@dataclass(frozen=True)
class Net:
    """make: the module; shapes: of its inputs, without batch; sizes: of its spaces, sorted."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """In eval mode, every parameter and statistic random."""
        return randomise(self.make(), seed).to(dtype)

    def inputs(self, batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
        """A tuple of arguments."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return tuple(
            torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in self.shapes
        )

    def batches(
        self, count: int = 3, batch: int = 64, dtype: torch.dtype = torch.float64
    ) -> list[Any]:
        """Calibration data, for `batch_to_args=tuple`."""
        return [self.inputs(batch, 1 + i, dtype) for i in range(count)]


NETS: dict[str, Net] = {}


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Weights of unit gain, and biases, affines and running statistics that differ by feature."""
    generator = torch.Generator().manual_seed(seed)
    constants = constant_names(model)
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            if not t.is_floating_point() or name in constants:
                continue
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            if "running_mean" in name or name.endswith("bias"):
                noise = 0.3 * noise
            elif t.ndim < 2 or "running_var" in name:
                noise = 0.5 + torch.rand(t.shape, generator=generator, dtype=torch.float64)
            else:
                noise = noise * 1.4 / (t.numel() / t.shape[0]) ** 0.5
            t.copy_(noise)
    return model.eval()


def net(
    sizes: tuple[int, ...], *shapes: tuple[int, ...]
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        NETS[cls.__name__] = Net(cls.__name__, cls, shapes or (IMAGE,), sizes)
        return cls

    return register


@net((6,))
class CatTwice(nn.Module):
    """One tensor concatenated with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.h(torch.cat([y, y], 1))


@net((6, 7), VECTOR)
class CatBranches(nn.Module):
    """Two branches read by one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.h = nn.Linear(5, 6), nn.Linear(5, 7), nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.cat([F.relu(self.p(x)), torch.tanh(self.q(x))], 1))


@net((5, 7))
class FlattenCHW(nn.Module):
    """A feature is a block of H * W columns of the Linear that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.h = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(80, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.f(F.relu(self.a(x)).flatten(1))))


@net((5,))
class OneChannel(nn.Module):
    """A convolution with one output channel: a space of one feature is none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Conv2d(3, 1, 3), nn.Conv2d(1, 5, 2), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.b(torch.tanh(self.a(x)))))


@net((6,))
class OneChannelMask(nn.Module):
    """A one-channel mask is broadcast over the features: it ties none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 1, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.a(x)) * torch.sigmoid(self.m(x)))


@net((4, 8))
class DepthwiseTwo(nn.Module):
    """Depthwise with multiplier 2: a feature moves two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.bn, self.h = nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.bn(self.d(F.relu(self.a(x))))))


@net((3, 6))
class SEGate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.fc1, self.fc2 = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        gate = torch.sigmoid(self.fc2(F.silu(self.fc1(y.mean((2, 3))))))
        return self.h(y * gate[:, :, None, None])


@net((6,), VECTOR)
class SharedWeight(nn.Module):
    """Two layers share one square weight, so both its axes are one space."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.b.weight
        self.h = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


@net((7,), VECTOR)
class TiedDecoder(nn.Module):
    """The decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(self.a(x)), self.a.weight.t(), self.bias)


@net((6,), VECTOR)
class CalledTwice(nn.Module):
    """One module is called twice on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.h = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = y + F.silu(self.f(y))
        y = y + F.silu(self.f(y))
        return self.h(y)


@net((4, 6))
class CatResidual(nn.Module):
    """A residual add across a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 6, 1)
        self.c, self.h = nn.Conv2d(10, 10, 3, padding=1), nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([F.relu(self.a(x)), torch.tanh(self.b(x))], 1)
        return self.h(F.relu(y + self.c(y)))


@net((6,))
class BufferScale(nn.Module):
    """A float buffer, one value per feature."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
        self.register_buffer("scale", torch.ones(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.a(x)) * self.scale)


@net((6,))
class BufferAlone(nn.Module):
    """A value computed from a buffer alone, which tracing would fold into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
        self.register_buffer("decay", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.exp(-self.decay)
        return self.h(F.relu(self.a(x)) * rate.view(-1, 1, 1))


@net((6,))
class BufferPosition(nn.Module):
    """A position code from a buffer, for every feature the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
        self.register_buffer("step", torch.tensor([0.3, -0.2, 0.7, 0.1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.a(x) + torch.sin(3 * self.step)))


@net((6,))
class Inplace(nn.Module):
    """In-place activation and +=; the first operation after every cut writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.act, self.h = nn.ReLU(inplace=True), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.a(x).mul_(2)).sigmoid_()
        z = self.b(y)
        z += y
        y *= 0.5
        return self.h(self.act(z).add_(y))


@net((6,))
class InplaceInput(nn.Module):
    """The very first operation writes into the input of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return self.h(F.relu(self.a(x))).add_(x.mean((1, 2, 3), keepdim=True))


@net((6,), VECTOR)
class DictOutput(nn.Module):
    """A dict with a tuple inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.q = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = F.relu(self.a(x))
        return {"p": self.p(y), "rest": (self.q(y), y.sum(1))}


@net((6,), VECTOR)
class TupleOutput(nn.Module):
    """Two tensors in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.q = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.a(x))
        return self.p(y), self.q(y)


@net((6,), IMAGE, VECTOR)
class TwoInputs(nn.Module):
    """An image whose features are modulated by a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.h = nn.Conv2d(3, 6, 1), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.h((F.relu(self.a(image)) * self.m(vector)[:, :, None, None]).mean((2, 3)))


@net((4, 4, 8))
class OptionA(nn.Module):
    """Shortcut without parameters: every second pixel, zeros for the new channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.c = nn.Conv2d(4, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn(self.a(x)))
        y = self.c(F.silu(self.b(y))) + F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return self.h(F.silu(y).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n, n + 1), nn.ReLU(), nn.Linear(n + 1, n))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


@net((6, 7, 7, 7, 8, 8), VECTOR)
class Hierarchy(nn.Module):
    """Sequentials and lists inside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Sequential(nn.Linear(5, 6)), nn.Identity())
        self.stages = nn.ModuleList(
            [
                nn.ModuleList([Block(6), Block(6)]),
                nn.Sequential(nn.ModuleDict({"up": nn.Linear(6, 7)})["up"], Block(7)),
            ]
        )
        self.head = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for block in self.stages[0]:
            y = block(y)
        return self.head(self.stages[1](y))


@net((6, 8))
class BatchNorm(nn.Module):
    """BatchNorm before and after the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b, self.bn2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.a(x)))
        return self.h(self.bn2(F.relu(self.b(y))).mean((2, 3)))


@net((6, 9))
class LayerNormLast(nn.Module):
    """LayerNorm and Linears on the last axis, between two permutes; a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.ln, self.h = nn.Conv2d(3, 6, 1), nn.LayerNorm(6), nn.Conv2d(6, 4, 1)
        self.p, self.q, self.g = nn.Linear(6, 9), nn.Linear(9, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.g * self.q(F.gelu(self.p(self.ln(y.permute(0, 2, 3, 1)))))
        return self.h(y + z.permute(0, 3, 1, 2))


@net((6,), VECTOR)
class AuxHead(nn.Module):
    """Parameters and buffers that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 6), nn.Linear(6, 3)
        self.aux = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.spare = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.a(x)))


@net((6,), VECTOR)
class AliasAcrossCut(nn.Module):
    """Dropout in eval mode returns its input itself, and then one of the two is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(5, 6), nn.Dropout()
        self.p, self.q = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.drop(y)
        z.relu_()
        return self.p(z) + self.q(y)


@net((6,))
class UpsampleNearest(nn.Module):
    """A small image is enlarged again and joins its original."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.h(y * torch.sigmoid(self.b(F.interpolate(F.max_pool2d(y, 2), scale_factor=2))))


@net((2, 2), VECTOR)
class SourceConstant(nn.Module):
    """A constant written in forward tells features apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.silu(self.a(x)) * torch.tensor([1.0, 1.0, 2.0, 2.0]))


@net((6,), VECTOR)
class InfiniteOutput(nn.Module):
    """Logits that are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("closed", torch.tensor([False, True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.a(x))).masked_fill(self.closed, -torch.inf)


@net((6,), VECTOR)
class CalledAcrossCut(nn.Module):
    """A module is called before and after `mid`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.mid = nn.Linear(5, 6), nn.Linear(6, 6), nn.Identity()
        self.h = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mid(F.silu(self.f(F.silu(self.a(x)))))
        return self.h(F.silu(self.f(y)))


# ------------------------------------------------------------------ blocks
TOKENS = (5, 6)


@net((2, 4, 4, 8, 8))
class Grouped(nn.Module):
    """Two grouped convolutions in a row, with other groups; the second one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.g = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.bn, self.t = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, 2, groups=2)
        self.h = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.relu(self.t(F.relu(self.bn(self.g(F.relu(self.a(x))))))))


@net((2, 8))
class GroupNorms(nn.Module):
    """Groups of a norm on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.n, self.m, self.h = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n(self.a(x)))
        return self.h(F.relu(y + self.m(self.b(y))))


class _Heads(nn.Module):
    """Attention by hand, with a bias table and a scale for every head."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(heads, tokens, tokens))
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        w = (q @ k.transpose(-2, -1) * self.scale + self.table).softmax(-1)
        return self.out((w @ v).transpose(1, 2).reshape(b, n, c))


@net((2, 8, 8, 8, 12), TOKENS)
class Transformer(nn.Module):
    """A stem, one block with attention and a hidden layer, a norm, a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn = nn.Linear(6, 8), _Heads(8, 2, 5)
        self.n1, self.n2, self.n3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.attn(self.n1(y))
        y = y + self.down(F.gelu(self.up(self.n2(y))))
        return self.head(self.n3(y).mean(1))


@net((2, 4, 8, 8, 8), TOKENS)
class FewKeys(nn.Module):
    """Four query heads on two key and value heads, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.q, self.o = nn.Linear(6, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        b, n, _ = y.shape
        q = self.q(y).view(b, n, 4, 4).transpose(1, 2)
        k, v = (
            m(y).view(b, n, 2, 4).transpose(1, 2).repeat_interleave(2, 1) for m in (self.k, self.v)
        )
        y = y + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 16))
        return self.head(F.relu(y))


@net((2, 4, 8), TOKENS)
class HeadNorms(nn.Module):
    """Queries and keys are normalised inside each head, with weights that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(6, 24), nn.Linear(8, 3)
        self.nq, self.nk = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        w = (self.nq(q) @ self.nk(k).transpose(-2, -1)).softmax(-1)
        return self.head((w @ v).transpose(1, 2).reshape(b, n, 8))


@net((2, 3, 8, 18), TOKENS)
class Experts(nn.Module):
    """Stacked weights: experts, each with hidden units of its own; heads made by one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 4, 6))
        self.o = nn.Parameter(torch.zeros(3, 2, 4))
        self.gate = nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.zeros(3, 6, 6)), nn.Parameter(torch.zeros(3, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnc,hdc->bnhd", x, self.w)
        y = torch.einsum("bnhd,ohd->bno", (y / y.norm(dim=-1, keepdim=True)).tanh(), self.o)
        m = x.mean(1)
        z = F.gelu(torch.einsum("bi,eih->ebh", m, self.up)) @ self.down
        return y.mean(1) + (self.gate(m).softmax(-1).T.unsqueeze(-1) * z).sum(0)
