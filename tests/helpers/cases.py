"""Small modules on which tools that merge or prune break or go wrong, and the spaces they have.

A space is written as its axes, `;` between them: `a` is dimension 0 of all tensors of module a,
`a<` dimension 1 of its weight, `k 2` dimension 2 of tensor k.  Behind `=` stands what lies along
the dimension: `[8]` are the 8 features, `4 [8]` four rows of them, `[8] 4` four neighbours for
each, `1/4 [8]` only the second row of the four; `8 + [8]` leaves 8 indices out before them.
`@ 1/4` says that this holds in the second quarter of the rows alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers.blocks import Net, join_heads, parameter, split_heads
from tests.helpers.models import randomise

#: parameter, dimension, (features, occurrences) indices, and the rows to which they are confined
Axis = tuple[str, int, Tensor, "tuple[int, int] | None"]


@dataclass(frozen=True)
class Case:
    """right: what must be found, in words; spaces: of it, those that are easily missed; traps:
    groupings that look like spaces and change the function."""

    right: str
    inputs: tuple[Any, ...]
    make: Callable[[], nn.Module]
    spaces: tuple[str, ...]
    traps: tuple[str, ...]


CASES: dict[str, Case] = {}


class Pair(Net):
    """A function of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function[0](self, x, y)  # type: ignore[call-arg]


def case(
    name: str,
    right: str,
    inputs: Any,
    spaces: list[str],
    *traps: str,
    parts: Callable[[], dict[str, Any]],
    finish: Callable[[Any], object] = lambda model: None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates forward; finish: what else makes the module what it should be."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> nn.Module:
            model = (Pair if len(inputs) > 1 else Net)(forward, **parts())
            randomise(model, 0)
            with torch.no_grad():
                finish(model)
            return model.eval()

        CASES[name] = Case(right, inputs, make, tuple(spaces), traps)
        return forward

    return register


# ------------------------------------------------------------------ the notation
def axes_of(model: nn.Module, space: str) -> tuple[int, list[Axis]]:
    """How many features a space has, and where they lie."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: list[Axis] = []
    for item in space.split(";"):
        text, _, confined = item.partition("@")
        where, _, pattern = text.partition("=")
        for name, dim in _named(where.strip(), tensors):
            length = tensors[name].shape[dim]
            rows = None
            if confined:
                part, parts = map(int, confined.split("/"))
                step = len(tensors[name]) // parts
                rows = part * step, (part + 1) * step
            found.append((name, dim, _table(pattern.strip() or f"[{length}]", length), rows))
    sizes = {len(index) for _, _, index, _ in found}
    assert len(sizes) == 1, (space, sizes)
    return sizes.pop(), found


def _named(where: str, tensors: dict[str, Tensor]) -> list[tuple[str, int]]:
    if where.endswith("<"):
        return [(f"{where[:-1]}.weight", 1)]
    if " " in where:
        name, dim = where.split()
        return [(name, int(dim))]
    own = [n for n, t in tensors.items() if n.rpartition(".")[0] == where and t.ndim]
    assert own, where
    return [(name, 0) for name in own]


def _table(pattern: str, length: int) -> Tensor:
    found, start = [], 0
    for term in pattern.split("+"):
        tokens = term.split()
        shape = [int(re.sub(r".*/|[\[\]]", "", token)) for token in tokens]
        grid = start + torch.arange(math.prod(shape)).reshape(shape)
        start += math.prod(shape)
        if "[" not in term:
            continue
        for d, token in reversed(list(enumerate(tokens))):
            if "/" in token:
                grid = grid.select(d, int(token.partition("/")[0]))
        features = [t for t in tokens if "/" not in t]
        of = next(d for d, token in enumerate(features) if "[" in token)
        grid = grid.movedim(of, 0)
        found.append(grid.reshape(len(grid), -1))
    assert start == length, (pattern, start, length)
    return torch.cat(found, 1)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv(*args: Any, **options: Any) -> nn.Conv2d:
    """A 3 x 3 convolution that keeps the size."""
    return nn.Conv2d(*args, 3, padding=1, **options)


IMAGES, TOKENS = noise(2, 3, 8, 8), noise(2, 6, 16)
IDS = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(3))


# fmt: off
# ------------------------------------------------------------------ concatenation and slices
@case("twice", "both halves of a concatenation are the same features", IMAGES,
      ["a; n; b< = 2 [16]"], "b<", "b< = 16 + [16]",
      parts=lambda: {"a": conv(3, 16), "n": nn.BatchNorm2d(16), "b": nn.Conv2d(32, 5, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.n(s.a(x)).relu()
    return s.b(torch.cat([y, y], 1)).mean((2, 3))


@case("parts and a residual", "what is added to a concatenation has its parts", IMAGES,
      ["a; c< = [8] + 8; c = [8] + 8; h< = [8] + 8", "b; c< = 8 + [8]; c = 8 + [8]; h< = 8 + [8]"],
      "c<; c; h<", "c; h<",
      parts=lambda: {"a": conv(3, 8), "b": nn.Conv2d(3, 8, 1), "c": conv(16, 16),
                     "h": nn.Conv2d(16, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = torch.cat([s.a(x).relu(), s.b(x).tanh()], 1)
    return s.h((y + s.c(y)).relu()).mean((2, 3))


@case("input beside features", "input channels stay where they are", IMAGES, ["a; b< = 3 + [8]"],
      "b<", "b< = [3] + 8", parts=lambda: {"a": conv(3, 8), "b": nn.Conv2d(11, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.b(torch.cat([x, s.a(x).relu()], 1))


@case("inception", "a norm behind branches is split as they are", IMAGES,
      ["p; n = [4] + 9; h< = [4] + 9", "q; n = 4 + [6] + 3; h< = 4 + [6] + 3",
       "r; n = 10 + [3]; h< = 10 + [3]"], "n; h<",
      parts=lambda: {"p": nn.Conv2d(3, 4, 1), "q": conv(3, 6), "r": nn.Conv2d(3, 3, 5, padding=2),
                     "n": nn.BatchNorm2d(13), "h": nn.Conv2d(13, 5, 1)})
def _(s: Any, x: Tensor) -> Any:
    branches = [s.p(x), s.q(x), s.r(F.max_pool2d(x, 3, 1, 1))]
    return s.h(s.n(torch.cat(branches, 1)).relu())


@case("split and grown", "half of the channels runs on, and is joined with what it becomes",
      noise(1, 8, 8, 8),
      ["c = [8] + 8; n = [8] + 8; d< = [8] + 16",
       "c = 8 + [8]; n = 8 + [8]; m; m<; d< = 8 + [8] + 8; d< = 16 + [8]"],
      "c; n", "m; d< = 16 + [8]",
      parts=lambda: {"c": nn.Conv2d(8, 16, 1, bias=False), "n": nn.BatchNorm2d(16),
                     "m": conv(8, 8), "d": nn.Conv2d(24, 8, 1)})
def _(s: Any, x: Tensor) -> Any:
    parts = list(F.silu(s.n(s.c(x))).chunk(2, 1))
    parts.append(parts[-1] + s.m(parts[-1]))
    return s.d(torch.cat(parts, 1))


@case("overlapping slices", "two readers that overlap make three spaces", IMAGES,
      ["a = [2] + 6; p< = [2] + 4", "a = 2 + [4] + 2; p< = 2 + [4]; q< = [4] + 2",
       "a = 6 + [2]; q< = 4 + [2]"], "a = [6] + 2; p<", "a",
      parts=lambda: {"a": conv(3, 8), "p": nn.Conv2d(6, 4, 1), "q": nn.Conv2d(6, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x).relu()
    return s.p(y[:, :6]) + s.q(y[:, 2:])


@case("a slice is an output", "what leaves the model keeps its order, the rest need not", IMAGES,
      ["a = 2 + [4]; b< = 2 + [4]"], "a; b<",
      parts=lambda: {"a": conv(3, 6), "b": nn.Conv2d(6, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x).tanh()
    return s.b(y), y[:, :2]


@case("partial convolution", "a quarter is convolved, and added to itself", IMAGES,
      ["a = [3] + 9; c; c<; h< = [3] + 9", "a = 3 + [9]; h< = 3 + [9]"], "a; h<",
      parts=lambda: {"a": nn.Conv2d(3, 12, 1), "c": conv(3, 3), "h": nn.Conv2d(12, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    first, rest = s.a(x).relu().split([3, 9], 1)
    return s.h(torch.cat([first + s.c(first), rest], 1))


@case("maxout", "pairs move, and inside a pair either may be first", noise(4, 6),
      ["a = [5] 2; h<", *(f"a = {k}/5 [2]" for k in range(5))], "a",
      parts=lambda: {"a": nn.Linear(6, 10), "h": nn.Linear(5, 3)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.a(x).view(-1, 5, 2).amax(2))


@case("space to depth", "strided views of one map are its features four times", IMAGES,
      ["a; b< = 4 [6]"], "b<", parts=lambda: {"a": conv(3, 6), "b": nn.Conv2d(24, 5, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x).relu()
    return s.b(torch.cat([y[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1))


@case("part is overwritten", "an assignment to some channels sets them apart", IMAGES,
      ["a = [4] + 4; h< = [4] + 4", "a = 4 + [4]; h< = 4 + [4]"], "a; h<",
      parts=lambda: {"a": conv(3, 8), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y[:, :4] = y[:, :4].sigmoid()
    return s.h(y)


# ------------------------------------------------------------------ groups and transposed weights
@case("groups", "groups move as a whole, channels inside their group", IMAGES,
      ["a = [4] 2; g = [4] 2; b< = [4] 2", *(f"g = {k}/4 [2]; b< = {k}/4 [2]" for k in range(4)),
       *(f"a = {k}/4 [2]; g< @ {k}/4" for k in range(4))], "a; g; b<", "g; b<",
      parts=lambda: {"a": nn.Conv2d(3, 8, 1), "g": conv(8, 8, groups=4),
                     "b": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.b(s.g(s.a(x).relu()).relu())


@case("channel shuffle", "a shuffle between two groupings leaves channels that share both",
      noise(2, 4, 8, 8),
      [*(f"a = {i}/2 {h}/2 [2]; d = {h}/2 [2] {i}/2; b< = [2] {i}/2 @ {h}/2"
         for i in (0, 1) for h in (0, 1)), *(f"b = {h}/2 [4]; c< = {h}/2 [4]" for h in (0, 1))],
      "a; d", "a = 0/2 [4]; d = [4] 0/2",
      parts=lambda: {"a": nn.Conv2d(4, 8, 1, groups=2), "d": conv(8, 8, groups=8),
                     "b": nn.Conv2d(8, 8, 1, groups=2), "c": nn.Conv2d(8, 3, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x).relu().unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return s.c(s.b(s.d(y)).relu())


@case("transposed", "a transposed convolution has its inputs first", IMAGES,
      ["a; t.weight 0", "t.weight 1; t.bias 0; h<"], "a; t<", "t; h<",
      parts=lambda: {"a": conv(3, 8, stride=2), "t": nn.ConvTranspose2d(8, 8, 4, 2, 1),
                     "h": nn.Conv2d(8, 3, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.t(s.a(x).relu()).relu())


@case("transposed in groups", "the groups of its inputs are those of its outputs", IMAGES,
      ["a = [2] 4; t.weight 0 = [2] 4; t.bias 0 = [2] 6; h< = [2] 6",
       *(f"a = {k}/2 [4]; t.weight 0 = {k}/2 [4]" for k in (0, 1)),
       *(f"t.weight 1 @ {k}/2; t.bias 0 = {k}/2 [6]; h< = {k}/2 [6]" for k in (0, 1))],
      "a; t.weight 0", "t.bias 0; h<",
      parts=lambda: {"a": conv(3, 8, stride=2), "t": nn.ConvTranspose2d(8, 12, 2, 2, groups=2),
                     "h": nn.Conv2d(12, 3, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.t(s.a(x).relu()).relu())


@case("pixel shuffle", "four filters make one channel", IMAGES, ["a = [4] 4; b<"],
      "a", "a = 0/4 [4]; b<", parts=lambda: {"a": conv(3, 16), "b": conv(4, 3)})
def _(s: Any, x: Tensor) -> Any:
    return s.b(F.pixel_shuffle(s.a(x), 2).relu())


# ------------------------------------------------------------------ from maps to vectors
@case("flattened", "a channel is a block of columns", IMAGES, ["a; n; f< = [8] 16", "f; h<"],
      "f<", "a; n; f< = 16 [8]",
      parts=lambda: {"a": conv(3, 8, stride=2), "n": nn.BatchNorm2d(8), "f": nn.Linear(128, 10),
                     "h": nn.Linear(10, 3)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.f(s.n(s.a(x)).relu().flatten(1)).relu())


@case("flattened, channels last", "a channel is every eighth column", IMAGES, ["a; f< = 16 [8]"],
      "a; f< = [8] 16", parts=lambda: {"a": conv(3, 8, stride=2), "f": nn.Linear(128, 5)})
def _(s: Any, x: Tensor) -> Any:
    return s.f(s.a(x).relu().movedim(1, 3).flatten(1))


@case("mask", "a mask of one channel ties none to another", IMAGES, ["a; h<"], "h<",
      parts=lambda: {"a": conv(3, 8), "m": conv(3, 1), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.m(x).sigmoid() * s.a(x).relu())


@case("statistics of channels", "their mean, maximum and norm do not know an order", IMAGES,
      ["a; h<"], parts=lambda: {"a": conv(3, 8), "m": conv(2, 1), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = F.normalize(s.a(x).relu(), dim=1)
    seen = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
    return s.h(y * s.m(seen).sigmoid())


@case("convnext", "the stream runs through layers of either layout", IMAGES,
      ["s; d; n; p<; q; g 0; h<", "p; q<"], "s; d",
      parts=lambda: {"s": nn.Conv2d(3, 6, 1), "d": conv(6, 6, groups=6), "n": nn.LayerNorm(6),
                     "p": nn.Linear(6, 12), "q": nn.Linear(12, 6), "g": parameter(6),
                     "h": nn.Conv2d(6, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.s(x)
    z = s.q(F.gelu(s.p(s.n(s.d(y).movedim(1, 3)))))
    return s.h(y + (s.g * z).movedim(3, 1))


@case("group norm", "groups of a norm move as a whole, channels inside them", IMAGES,
      ["a = [4] 2; n = [4] 2; h< = [4] 2",
       *(f"a = {k}/4 [2]; n = {k}/4 [2]; h< = {k}/4 [2]" for k in range(4))], "a; n; h<",
      parts=lambda: {"a": conv(3, 8), "n": nn.GroupNorm(4, 8), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.n(s.a(x)).relu())


@case("merged patches", "four neighbours are normalised together: each feature four times", IMAGES,
      ["p; n = 4 [6]; r< = 4 [6]", "r; h<"], "n; r<",
      parts=lambda: {"p": nn.Conv2d(3, 6, 2, 2), "n": nn.LayerNorm(24),
                     "r": nn.Linear(24, 9, bias=False), "h": nn.Linear(9, 3)})
def _(s: Any, x: Tensor) -> Any:
    y = s.p(x).movedim(1, 3)
    y = torch.cat([y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    return s.h(F.gelu(s.r(s.n(y))).mean((1, 2)))


@case("mixed tokens", "hidden features of tokens and of channels; positions keep their order",
      IMAGES, ["p; n; h<", "t; u<"], "t<; u",
      parts=lambda: {"p": nn.Conv2d(3, 8, 2, 2), "n": nn.LayerNorm(8), "h": nn.Linear(8, 3),
                     "t": nn.Linear(16, 12), "u": nn.Linear(12, 16)})
def _(s: Any, x: Tensor) -> Any:
    y = s.p(x).flatten(2).mT
    return s.h((y + s.u(F.gelu(s.t(s.n(y).mT))).mT).amax(1))


# ------------------------------------------------------------------ weights that are shared or made
@case("one head for two levels", "whoever a shared layer reads is tied", IMAGES,
      ["p; q; q<; s<", "s; t<"], "q",
      parts=lambda: {"p": conv(3, 8, stride=2), "q": conv(8, 8, stride=2), "s": conv(8, 6),
                     "t": nn.Conv2d(6, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.p(x).relu()
    return [s.t(s.s(level).relu()) for level in (y, s.q(y).relu())]


def _tie(model: Any) -> None:
    model.o.weight = model.e.weight


@case("tied embedding", "a weight of two layers is moved once; words keep their numbers", IDS,
      ["e.weight 1; u<; d", "u; d<"], "e.weight 1; e.weight 1; u<; d", "e.weight 0", finish=_tie,
      parts=lambda: {"e": nn.Embedding(20, 16), "u": nn.Linear(16, 24), "d": nn.Linear(24, 16),
                     "o": nn.Linear(16, 20, bias=False)})
def _(s: Any, ids: Tensor) -> Any:
    y = s.e(ids)
    return s.o(y + s.d(F.gelu(s.u(y))))


@case("bare parameters", "weights that functions read are weights", IMAGES,
      ["k 0; c 0; l 1", "l 0; w 1"],
      parts=lambda: {"k": parameter(8, 3, 3, 3), "c": parameter(8), "l": parameter(6, 8, 1, 1),
                     "w": parameter(4, 6)})
def _(s: Any, x: Tensor) -> Any:
    y = F.conv2d(F.conv2d(x, s.k, s.c, padding=1).relu(), s.l)
    return F.linear(y.relu().mean((2, 3)), s.w)


MADE = "parametrizations.weight"


@case("weight norm", "length and direction of a weight both follow its features", IMAGES,
      [f"a.{MADE}.original0 0; a.{MADE}.original1 0; a.bias 0; h<"],
      f"a.{MADE}.original1 0; a.bias 0; h<",
      parts=lambda: {"a": weight_norm(conv(3, 8)), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.a(x).relu())


def _iterate(model: Any) -> None:
    """Singular vectors that fit the weights."""
    model.train()
    for _ in range(30):
        _ = model.a.weight, model.b.weight


@case("spectral norm", "singular vectors are moved with the axes of their weight", IMAGES,
      [f"a.{MADE}.original 0; a.bias 0; a.{MADE}.0._u 0; b.{MADE}.original 1; "
       f"b.{MADE}.0._v 0 = [8] 9", f"b.{MADE}.original 0; b.bias 0; b.{MADE}.0._u 0; h<"],
      f"a.{MADE}.original 0; a.bias 0; b.{MADE}.original 1", finish=_iterate,
      parts=lambda: {"a": spectral_norm(conv(3, 8)), "b": spectral_norm(conv(8, 6)),
                     "h": nn.Conv2d(6, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(F.leaky_relu(s.b(F.leaky_relu(s.a(x), 0.1)), 0.1)).mean((2, 3))


def _folded(kernel: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return kernel * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


@case("folded branches", "an identity in a kernel ties its two axes, and keeps no order", IMAGES,
      ["a; k 0; k 1; l 0; l 1; m; n; i; h<"], "a; k 1; l 1",
      parts=lambda: {"a": nn.Conv2d(3, 6, 1), "h": nn.Conv2d(6, 4, 1), "k": parameter(6, 6, 3, 3),
                     "l": parameter(6, 6, 1, 1), **{n: nn.BatchNorm2d(6) for n in "mni"}})
def _(s: Any, x: Tensor) -> Any:
    eye = torch.eye(6, dtype=x.dtype, device=x.device)[:, :, None, None]
    branches = [_folded(s.k, s.m), _folded(s.l, s.n), _folded(eye, s.i)]
    (wide, a), (point, b), (same, c) = branches
    kernel = wide + F.pad(point + same, (1, 1, 1, 1))
    return s.h(F.conv2d(s.a(x).relu(), kernel, a + b + c, padding=1).relu())


# ------------------------------------------------------------------ attention, recurrence, experts
@case("packed attention", "heads, and what queries share with keys, and values with the output",
      TOKENS,
      ["i; p<; o; h<", "p = 3 [4] 4; o< = [4] 4", *(f"p = 2 {k}/4 [4] + 16" for k in range(4)),
       *(f"p = 32 + {k}/4 [4]; o< = {k}/4 [4]" for k in range(4))], "p", "p = 3 [16]; o<",
      parts=lambda: {"i": nn.Linear(16, 16), "p": nn.Linear(16, 48), "o": nn.Linear(16, 16),
                     "h": nn.Linear(16, 3)})
def _(s: Any, x: Tensor) -> Any:
    y = s.i(x)
    q, k, v = s.p(y).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    return s.h(y + s.o(join_heads((q @ k.mT / 2).softmax(-1) @ v)))


@case("grouped queries", "two heads of keys, two queries inside each, dimensions inside those",
      TOKENS,
      ["q = [2] 8; k = [2] 4; v = [2] 4; o< = [2] 8",
       *(f"q = {g}/2 [2] 4; o< = {g}/2 [2] 4" for g in (0, 1)),
       *(f"q = {g}/2 2 [4]; k = {g}/2 [4]" for g in (0, 1)),
       *(f"v = {g}/2 [4]; o< = {g}/2 2 [4]" for g in (0, 1))], "q = [4] 4; o< = [4] 4", "v",
      parts=lambda: {"q": nn.Linear(16, 16), "k": nn.Linear(16, 8), "v": nn.Linear(16, 8),
                     "o": nn.Linear(16, 3)})
def _(s: Any, x: Tensor) -> Any:
    q = split_heads(s.q(x), 4)
    k, v = (split_heads(part(x), 2).repeat_interleave(2, 1) for part in (s.k, s.v))
    return s.o(join_heads((q @ k.mT).softmax(-1) @ v))


def _gates(layer: str, size: int) -> str:
    """The axes of the hidden features of a recurrent layer."""
    rows = [
        f"r.{t}_{layer} 0 = 4 [{size}]" for t in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    return "; ".join([*rows, f"r.weight_hh_{layer} 1"])


@case("two ways", "a space for every layer and direction; the next layer reads both", TOKENS,
      [_gates("l0", 5) + "; r.weight_ih_l1 1 = [5] + 5; r.weight_ih_l1_reverse 1 = [5] + 5",
       _gates("l0_reverse", 5) + "; r.weight_ih_l1 1 = 5 + [5]; r.weight_ih_l1_reverse 1 = 5 + [5]",
       _gates("l1", 5) + "; h< = [5] + 5", _gates("l1_reverse", 5) + "; h< = 5 + [5]"], "h<",
      parts=lambda: {"r": nn.LSTM(16, 5, num_layers=2, batch_first=True, bidirectional=True),
                     "h": nn.Linear(10, 3)})
def _(s: Any, x: Tensor) -> Any:
    return s.h(s.r(x)[0])


@case("packed sentences", "packing before a layer and padding behind it move no features",
      (IDS, torch.tensor([6, 4])),
      ["e.weight 1; r.weight_ih_l0 1", _gates("l0", 6) + "; h<"], "r.weight_ih_l0 0",
      parts=lambda: {"e": nn.Embedding(20, 8), "r": nn.LSTM(8, 6, batch_first=True),
                     "h": nn.Linear(6, 3)})
def _(s: Any, ids: Tensor, lengths: Tensor) -> Any:
    some = {"batch_first": True}
    y, (last, _) = s.r(pack_padded_sequence(s.e(ids), lengths, **some, enforce_sorted=False))
    return s.h(pad_packed_sequence(y, **some)[0].amax(1)) + s.h(last[-1])


@case("einsum", "letters are features", IMAGES, ["v 0; g 1; w 1"], "v 0; w 1",
      parts=lambda: {"v": parameter(8, 3), "g": parameter(3, 8), "w": parameter(5, 8)})
def _(s: Any, x: Tensor) -> Any:
    gate = torch.einsum("bchw,co->bo", x, s.g).tanh()
    return torch.einsum("bohw,bo,po->bphw", torch.einsum("bchw,oc->bohw", x, s.v).relu(), gate, s.w)


@case("experts in one tensor", "experts move, and hidden features in each", noise(4, 6),
      ["g; v 0; w 0", *(f"v 1 @ {e}/3; w 2 @ {e}/3" for e in range(3))], "v 0; w 0",
      parts=lambda: {"g": nn.Linear(6, 3), "v": parameter(3, 7, 6),
                     "w": parameter(3, 4, 7)})
def _(s: Any, x: Tensor) -> Any:
    y = torch.einsum("beh,eoh->beo", torch.einsum("bi,ehi->beh", x, s.v).relu(), s.w)
    return torch.einsum("be,beo->bo", s.g(x).softmax(-1), y)


@case("experts that are sent tokens", "how many tokens come to each is a matter of data",
      noise(6, 5),
      ["i; g<; " + "; ".join(f"u.{e}<; d.{e}" for e in range(3)) + "; h<",
       *(f"u.{e}; d.{e}<" for e in range(3))], "g", "u.0; d.1<",
      parts=lambda: {"i": nn.Linear(5, 8), "g": nn.Linear(8, 3), "h": nn.Linear(8, 3),
                     "u": nn.ModuleList(nn.Linear(8, 4) for _ in range(3)),
                     "d": nn.ModuleList(nn.Linear(4, 8) for _ in range(3))})
def _(s: Any, x: Tensor) -> Any:
    y = s.i(x)
    weights, chosen = s.g(y).softmax(-1).topk(2)
    sums = torch.zeros_like(y)
    for e, (up, down) in enumerate(zip(s.u, s.d, strict=True)):
        token, rank = torch.where(chosen == e)
        sums.index_add_(0, token, down(F.silu(up(y[token]))) * weights[token, rank, None])
    return s.h(y + sums)


def _complex(model: Any) -> None:
    parts = 0.3 * noise(2, 6, 6, 4, seed=100).double()
    model.w = nn.Parameter(torch.complex(*parts))


@case("fourier layer", "complex weights have features as real ones have", noise(2, 2, 12),
      ["a; w 0; s<", "w 1; s; h<"], "a; s<", "w 2", finish=_complex,
      parts=lambda: {"a": nn.Conv1d(2, 6, 1), "s": nn.Conv1d(6, 6, 1), "h": nn.Conv1d(6, 2, 1),
                     "w": parameter(6, 6, 4)})
def _(s: Any, x: Tensor) -> Any:
    y = F.gelu(s.a(x))
    waves = torch.fft.rfft(y)
    low = torch.zeros(x.shape[0], 6, waves.shape[-1], dtype=waves.dtype, device=x.device)
    low[:, :, :4] = torch.einsum("bix,iox->box", waves[:, :, :4], s.w)
    return s.h(F.gelu(torch.fft.irfft(low, n=y.shape[-1]) + s.s(y)))


# ------------------------------------------------------------------ ways to write forward
@case("position code", "a code made in forward keeps the order of the stream; hidden features move",
      IDS, ["u; d<"], "e.weight 1; u<; d",
      parts=lambda: {"e": nn.Embedding(20, 8), "u": nn.Linear(8, 12), "d": nn.Linear(12, 8),
                     "at": torch.arange(6)})
def _(s: Any, ids: Tensor) -> Any:
    rates = torch.exp(-0.7 * torch.arange(8, device=ids.device))
    y = s.e(ids) + torch.sin(s.at[:, None] * rates)
    return F.linear(y + s.d(F.gelu(s.u(y))), s.e.weight)


@case("in place", "writing in place changes nothing of the spaces", IMAGES, ["a; n; b; b<; h<"],
      parts=lambda: {"a": conv(3, 8), "n": nn.BatchNorm2d(8), "b": conv(8, 8),
                     "r": nn.ReLU(inplace=True), "h": nn.Conv2d(8, 4, 1)})
def _(s: Any, x: Tensor) -> Any:
    y = s.r(s.n(s.a(x)))
    z = s.b(y)
    z += y
    return s.h(z.relu_().mul_(0.5))


@case("two inputs", "an image is scaled by a vector; outputs lie in a dict", (IMAGES, noise(2, 5)),
      ["a; m; h<; s<"], "m",
      parts=lambda: {"a": conv(3, 8), "m": nn.Linear(5, 8), "h": nn.Linear(8, 4),
                     "s": nn.Conv2d(8, 1, 1)})
def _(s: Any, x: Tensor, y: Tensor) -> Any:
    z = s.a(x).relu() * s.m(y)[:, :, None, None]
    return {"classes": s.h(z.mean((2, 3))), "maps": (s.s(z), z.sum((1, 2, 3)))}


@case("batch in a dict", "an input may be a dict", {"ids": IDS, "mask": torch.ones(2, 6)},
      ["e.weight 1; h<"], "h<",
      parts=lambda: {"e": nn.Embedding(20, 8), "h": nn.Linear(8, 3)})
def _(s: Any, batch: Any) -> Any:
    y = s.e(batch["ids"]) * batch["mask"][..., None]
    return s.h(y.sum(1) / batch["mask"].sum(1, keepdim=True))


@case("images in a list", "an input may be a list, which forward goes through",
      [noise(2, 3, 8, 8, seed=1), noise(2, 3, 8, 8, seed=2)], ["a; h<"],
      parts=lambda: {"a": conv(3, 8), "h": nn.Linear(8, 4)})
def _(s: Any, images: Any) -> Any:
    return s.h(sum(s.a(image).relu().mean((2, 3)) for image in images) / len(images))


@case("several dtypes", "a change of dtype moves no features", noise(4, 6), ["a; n; b<", "b; h<"],
      parts=lambda: {"a": nn.Linear(6, 8), "n": nn.BatchNorm1d(8), "b": nn.Linear(8, 6),
                     "h": nn.Linear(6, 3)})
def _(s: Any, x: Tensor) -> Any:
    y = s.n(s.a(x)).relu()
    return s.h(s.b(y.to(s.b.weight.dtype)).relu().to(s.h.weight.dtype))


@case("asked for its size", "forward may ask for sizes", IMAGES, ["a; h<"],
      parts=lambda: {"a": conv(3, 8), "h": nn.Conv2d(8, 4, 2, 2)})
def _(s: Any, x: Tensor) -> Any:
    y = s.a(x).relu()
    return s.h(F.pad(y, (0, 1, 0, 1)) if y.shape[-1] % 2 else y)


@case("names of torch.fx", "a model may call its parts as torch.fx calls its own",
      (IMAGES, noise(2, 4)),
      ["c; h< = [7] + 5", "meta.0; meta.1; meta.3<", "meta.3; h< = 7 + [5]"], "h<",
      parts=lambda: {"c": conv(3, 7, stride=2), "h": nn.Linear(12, 3), "code": torch.tensor(0.5),
                     "meta": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(),
                                           nn.Linear(6, 5), nn.SiLU())})
def _(s: Any, x: Tensor, y: Tensor) -> Any:
    return s.h(torch.cat([s.c(x).relu().mean((2, 3)), s.meta(y)], 1)) * s.code
# fmt: on
