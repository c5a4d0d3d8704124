"""Random networks: a plan is drawn, source code is written from it, and a module is made of that.

A plan is a short list of steps.  Every list of steps is a network: operands are counted back from
the latest value that fits, a value of another layout is converted first, and a step that fits
nowhere is left out.  So shrinking may drop any step and lower any number; 0 is always simplest.
A failing example prints as the source code of a module that stands alone (`Plan.code`).

Layouts, without batch: vector (C,), tokens (T, C), image (C, H, W).  Values stay moderate and norms
have a large eps, so that rounding is never amplified: what differs by more than 1e-12 is wrong.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random

import torch
from hypothesis import strategies as st
from torch import nn

from tests.helpers.models import Net

INPUTS = {"vector": (4,), "image": (3, 4, 4), "tokens": (4, 5)}
MOST_CHANNELS, MOST_NUMBERS, MOST_PIXELS = 12, 400, 8


@dataclass(frozen=True, repr=False)
class Step:
    """One operation. at, other: which values it takes, of those that fit, counted from the latest;
    size: of what it makes; option: its variant (each modulo what there is)."""

    op: str
    at: int = 0
    other: int = 0
    size: int = 0
    option: int = 0

    def __repr__(self) -> str:
        numbers = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        return f"Step({', '.join([repr(self.op), *(f'{k}={v}' for k, v in numbers if v)])})"


@dataclass(frozen=True)
class Plan:
    """inputs: their layouts; stem: 0, or features that a layer makes of each input first; ending:
    what is returned, see `ENDINGS`; seed: of the weights."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    stem: int = 0
    ending: str = "head"
    seed: int = 0

    def code(self) -> str:
        """Source code of the module `Network`."""
        return written(self).code()

    def net(self) -> Net:
        """As `models.Net`: `.build(seed)` in float64 and eval mode, `.inputs(batch, seed)`."""
        shapes = tuple(INPUTS[layout] for layout in self.inputs)
        return Net("Network", functools.partial(_instance, self.code()), shapes, ())


@functools.lru_cache(maxsize=8)
def _class(code: str) -> type[nn.Module]:
    space: dict[str, type[nn.Module]] = {}
    exec(compile(code, "<plan>", "exec"), space)
    return space["Network"]


def _instance(code: str) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        return _class(code)()


@functools.lru_cache(maxsize=8)
def written(plan: Plan) -> Writer:
    return Writer(plan)


# ------------------------------------------------------------------ writing the source
@dataclass(frozen=True)
class Value:
    name: str
    shape: tuple[int, ...]

    @property
    def channels(self) -> int:
        return self.shape[self.axis - 1]

    @property
    def axis(self) -> int:
        """The dimension of the features, batch included."""
        return 2 if len(self.shape) == 2 else 1

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions that are neither batch nor features."""
        return tuple(d for d in range(1, len(self.shape) + 1) if d != self.axis)

    def resized(self, n: int) -> tuple[int, ...]:
        return tuple(n if d == self.axis - 1 else s for d, s in enumerate(self.shape))

    def cut(self, what: str) -> str:
        """A slice of the features."""
        return f"{self.name}[{':, ' * self.axis}{what}]"

    def per_feature(self) -> str:
        """The shape of a parameter with one number per feature."""
        return str((self.channels, *[1] * (len(self.shape) - self.axis)))


@dataclass(frozen=True)
class Layer:
    """A module that may be called again: on values of which shapes, and what it makes of them."""

    name: str
    kind: str
    sizes: tuple[int, ...]
    fits: Callable[[Value], bool]
    gives: Callable[[Value], tuple[int, ...]]


class Writer:
    """Writes `__init__` and `forward`, and keeps the pool of live values."""

    def __init__(self, plan: Plan) -> None:
        self.init: list[str] = []
        self.body: list[str] = []
        self.values = [Value(f"x{i}", INPUTS[layout]) for i, layout in enumerate(plan.inputs)]
        self.inputs = [v.name for v in self.values]
        self.layers: list[Layer] = []
        self.used: set[str] = set()
        self.made = 0
        self.steps: list[str] = []  # operations that were written
        self.step = "stem"
        for v in list(self.values) if plan.stem else ():
            kind, end = ("Conv2d", ", 1") if len(v.shape) == 3 else ("Linear", "")
            name = self.layer(f"nn.{kind}({v.channels}, {plan.stem}{end})")
            self.make(f"{name}({v.name})", v.resized(plan.stem), v)
        for i, step in enumerate(plan.steps):
            self.step = f"{step.op}{i}"
            before = len(self.body)
            OPS[step.op](self, step)
            if len(self.body) > before:
                self.steps.append(step.op)
        self.step = "head"
        self.result = ENDINGS[plan.ending](self)

    def code(self) -> str:
        nested = any("Residual(" in line for line in self.init)
        gap = "\n        "
        return (
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
            + (RESIDUAL if nested else "")
            + "class Network(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            + "".join(f"        {line}\n" for line in self.init)
            + f"\n    def forward(self, {', '.join(self.inputs)}):"
            + gap
            + gap.join([*self.body, f"return {self.result}"])
            + "\n"
        )

    # -------------------------------------------------------------- the pool
    def pick(self, at: int, fits: Callable[[Value], bool]) -> Value | None:
        found = [v for v in reversed(self.values) if fits(v)]
        return found[at % len(found)] if found else None

    def any(self, step: Step) -> Value:
        found = self.pick(step.at, lambda v: True)
        assert found is not None
        return found

    def vector(self, step: Step) -> Value:
        v = self.pick(step.at, lambda v: len(v.shape) == 1)
        if v is not None:
            return v
        v = self.values[-1]
        return self.make(f"{v.name}.mean({v.positions})", (v.channels,), v)

    def tokens(self, step: Step) -> Value:
        v = self.pick(step.at, lambda v: len(v.shape) == 2)
        if v is not None:
            return v
        v = self.values[-1]
        if len(v.shape) == 3:
            c, h, w = v.shape
            return self.make(f"{v.name}.flatten(2).transpose(1, 2)", (h * w, c), v)
        name = self.layer(f"nn.Linear({v.channels}, 12)")
        return self.make(f"{name}({v.name}).view(-1, 3, 4)", (3, 4), v)

    def image(self, step: Step) -> Value:
        v = self.pick(step.at, lambda v: len(v.shape) == 3)
        if v is not None:
            return v
        v = self.values[-1]
        if len(v.shape) == 2:
            t, c = v.shape
            h = 2 if t % 2 == 0 else 1
            moved = f"{v.name}.transpose(1, 2).reshape(-1, {c}, {h}, {t // h})"
            return self.make(moved, (c, h, t // h), v)
        name = self.layer(f"nn.Linear({v.channels}, 27)")
        return self.make(f"{name}({v.name}).view(-1, 3, 3, 3)", (3, 3, 3), v)

    def pair(self, step: Step) -> tuple[Value, Value] | None:
        """Two values of one shape."""
        a = self.any(step)
        b = self.pick(step.other, lambda v: v.shape == a.shape and v.name != a.name)
        return None if b is None else (a, b)

    # -------------------------------------------------------------- lines
    def attribute(self, text: str, suffix: str = "") -> str:
        taken = sum(line.startswith(f"self.{self.step}{suffix}") for line in self.init)
        name = f"self.{self.step}{suffix}" + (f"_{taken}" if taken else "")
        self.init.append(f"{name} = {text}")
        return name

    def layer(self, text: str, suffix: str = "") -> str:
        return self.attribute(text, suffix)

    def parameter(self, shape: object, suffix: str = "") -> str:
        return self.attribute(f"nn.Parameter(torch.ones({shape}))", suffix)

    def buffer(self, text: str, suffix: str = "") -> str:
        name = f"{self.step}{suffix}"
        self.init.append(f"self.register_buffer({name!r}, {text})")
        return f"self.{name}"

    def make(self, text: str, shape: tuple[int, ...], *operands: Value) -> Value:
        value = Value(f"v{self.made}", shape)
        self.made += 1
        self.body.append(f"{value.name} = {text}")
        self.used.update(v.name for v in operands)
        self.values.append(value)
        return value

    def write(self, text: str, *operands: Value) -> None:
        """A line that writes into the first operand; that is the latest value then."""
        self.body.append(text)
        self.used.update(v.name for v in operands[1:])
        self.values.remove(operands[0])
        self.values.append(operands[0])

    def linear(self, v: Value, n: int, suffix: str = "", bias: bool = True) -> str:
        """A Linear on the last axis."""
        into = v.shape[-1]
        text = f"nn.Linear({into}, {n}{'' if bias else ', bias=False'})"
        name = self.layer(text, suffix)
        self.layers.append(
            Layer(
                name,
                "Linear",
                (into, n),
                lambda u: u.shape[-1] == into,
                lambda u: (*u.shape[:-1], n),
            )
        )
        return name


RESIDUAL = '''class Residual(nn.Module):
    """Adds what its layers make."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


'''

OPS: dict[str, Callable[[Writer, Step], None]] = {}
ENDINGS: dict[str, Callable[[Writer], str]] = {}


def op(function: Callable[[Writer, Step], None]) -> Callable[[Writer, Step], None]:
    OPS[function.__name__.rstrip("_")] = function
    return function


def ending(function: Callable[[Writer], str]) -> Callable[[Writer], str]:
    ENDINGS[function.__name__] = function
    return function


def choose(options: Sequence[str], step: Step) -> str:
    return options[step.option % len(options)]


def size(step: Step, least: int = 2, most: int = 6) -> int:
    return least + step.size % (most - least + 1)


def divisor(n: int, step: Step, least: int = 1) -> int | None:
    found = [d for d in range(least, n + 1) if n % d == 0]
    return found[step.size % len(found)] if found else None


# ------------------------------------------------------------------ steps, the simplest first
POINTWISE = (
    "F.relu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "F.gelu({0})", "F.silu({0})",
    "F.hardswish({0})", "F.leaky_relu({0}, 0.2)", "F.softplus({0})", "{0}.abs() + 0.1 * {0}",
    "torch.where({0} > 0, {0}, 0.1)", "{0}.clamp(-1, 1) - {0}", "F.dropout({0}, 0.5)",
)  # fmt: skip


@op
def pointwise(net: Writer, step: Step) -> None:
    v = net.any(step)
    text = choose(POINTWISE, step)
    if "dropout" in text:  # as a module: the function stays on
        net.make(f"{net.layer('nn.Dropout(0.5)')}({v.name})", v.shape, v)
    else:
        net.make(text.format(v.name), v.shape, v)


@op
def linear(net: Writer, step: Step) -> None:
    """On the last axis: for an image, that is its columns."""
    v = net.any(step)
    name = net.linear(v, size(step), bias=step.option % 2 == 0)
    net.make(f"{name}({v.name})", (*v.shape[:-1], size(step)), v)


@op
def conv(net: Writer, step: Step) -> None:
    v = net.image(step)
    _conv(net, step, v, size(step), groups=1)


def _conv(net: Writer, step: Step, v: Value, n: int, groups: int) -> None:
    c, h, w = v.shape
    kernel, stride, pad = [(3, 1, 1), (1, 1, 0), (3, 2, 1), (2, 1, 1), (2, 1, 0)][step.option % 5]
    if min(h, w) < kernel - 2 * pad:
        kernel, stride, pad = 1, 1, 0
    settings = [str(c), str(n), str(kernel)]
    settings += ["stride=2"] if stride == 2 else []
    settings += ["padding=1"] if pad else []
    settings += [f"groups={groups}"] if groups > 1 else []
    settings += ["bias=False"] if step.option % 3 == 2 else []

    def gives(u: Value) -> tuple[int, ...]:
        return (n, *((s + 2 * pad - kernel) // stride + 1 for s in u.shape[1:]))

    if max(gives(v)) > MOST_CHANNELS:
        return
    name = net.layer(f"nn.Conv2d({', '.join(settings)})")
    low = kernel - 2 * pad

    def fits(u: Value) -> bool:
        return len(u.shape) == 3 and u.shape[0] == c and min(u.shape[1:]) >= low

    net.layers.append(Layer(name, "Conv2d", (c, n, kernel, groups), fits, gives))
    net.make(f"{name}({v.name})", gives(v), v)


@op
def add(net: Writer, step: Step) -> None:
    """Of two values of one shape, the second possibly made here."""
    found = net.pair(step)
    if found is None:
        v = net.any(step)
        name = net.linear(v, v.shape[-1])
        net.make(f"{v.name} + {name}(torch.tanh({v.name}))", v.shape, v)
        return
    a, b = found
    text = choose(("{0} + {1}", "{0} - 0.5 * {1}", "torch.add({0}, {1}, alpha=2)",
                   "torch.maximum({0}, {1})", "({0} + {1}) / 2"), step)  # fmt: skip
    net.make(text.format(a.name, b.name), a.shape, a, b)


@op
def residual(net: Writer, step: Step) -> None:
    """Nested modules; one of them may be run twice."""
    v, n = net.any(step), size(step)
    if len(v.shape) == 3:
        c = v.channels
        inner = f"nn.Conv2d({c}, {n}, 1), nn.ReLU(), nn.Conv2d({n}, {c}, 3, padding=1)"
        if step.option % 2:
            inner = f"nn.Sequential(nn.BatchNorm2d({c}, eps=0.1), nn.SiLU()), {inner}"
    else:
        c = v.shape[-1]
        inner = f"nn.Linear({c}, {n}), nn.GELU(), nn.Linear({n}, {c})"
        if step.option % 2:
            inner = f"nn.LayerNorm({c}, eps=0.1), nn.Sequential({inner})"
    name = net.layer(f"Residual({inner})")
    text = f"{name}({v.name})"
    net.make(f"{name}({text})" if step.option % 4 > 1 else text, v.shape, v)


@op
def batch_norm(net: Writer, step: Step) -> None:
    v = net.any(step)
    kind = "2d" if len(v.shape) == 3 else "1d"
    if len(v.shape) == 2 and step.option % 2:  # the tokens are the channels
        name = net.layer(f"nn.BatchNorm1d({v.shape[0]}, eps=0.1)")
        net.make(f"{name}({v.name})", v.shape, v)
        return
    affine = ", affine=False" if step.option % 4 > 1 else ""
    name = net.layer(f"nn.BatchNorm{kind}({v.channels}, eps=0.1{affine})")
    _channels_first(net, v, name)


def _channels_first(net: Writer, v: Value, name: str) -> None:
    text = f"{name}({v.name})"
    if len(v.shape) == 2:
        text = f"{name}({v.name}.transpose(1, 2)).transpose(1, 2)"
    net.make(text, v.shape, v)


@op
def layer_norm(net: Writer, step: Step) -> None:
    v = net.any(step)
    if len(v.shape) == 3 and step.option % 3 == 0:
        name = net.layer(f"nn.LayerNorm({v.channels}, eps=0.1)")
        text = f"{name}({v.name}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"
    else:
        over = v.shape if step.option % 3 == 1 else v.shape[-1:]
        kind = "RMSNorm" if step.option % 2 else "LayerNorm"
        name = net.layer(f"nn.{kind}({list(over)}, eps=0.1)")
        text = f"{name}({v.name})"
        if step.option % 4 == 2:  # alone, its mean would be 0 to rounding
            net.init[-1] = net.init[-1].replace("eps=0.1", "eps=0.1, elementwise_affine=False")
            text = f"{text} + {v.name}"
    net.make(text, v.shape, v)


@op
def group_norm(net: Writer, step: Step) -> None:
    v = net.any(step)
    groups = divisor(v.channels, step) or 1
    name = net.layer(f"nn.GroupNorm({groups}, {v.channels}, eps=0.1)")
    _channels_first(net, v, name)


@op
def instance_norm(net: Writer, step: Step) -> None:
    v = net.pick(step.at, lambda v: math.prod(v.shape) > v.channels)
    if v is None:
        v = net.image(step)
        if math.prod(v.shape) == v.channels:
            return
    kind = "2d" if len(v.shape) == 3 else "1d"
    track = ", track_running_stats=True" if step.option % 2 else ""
    name = net.layer(f"nn.InstanceNorm{kind}({v.channels}, eps=0.1, affine=True{track})")
    _channels_first(net, v, name)


@op
def rms(net: Writer, step: Step) -> None:
    """RMS norm by hand, with a scale."""
    v = net.any(step)
    scale = net.parameter(v.per_feature())
    square = choose((f"{v.name}.pow(2)", f"({v.name} * {v.name})"), step)
    root = f"torch.rsqrt({square}.mean({v.axis}, keepdim=True) + 0.1)"
    net.make(f"{v.name} * {root} * {scale}", v.shape, v)


@op
def normalize(net: Writer, step: Step) -> None:
    v = net.any(step)
    p = ", p=1" if step.option % 2 else ""
    net.make(f"F.normalize({v.name}{p}, dim={v.axis}, eps=0.1)", v.shape, v)


@op
def softmax(net: Writer, step: Step) -> None:
    """Over the channels, or over the positions."""
    v = net.any(step)
    name = choose(("softmax", "log_softmax"), step)
    dim = v.positions[-1] if step.option % 4 > 1 and v.positions else v.axis
    net.make(f"F.{name}({v.name}, dim={dim})", v.shape, v)


@op
def reduce(net: Writer, step: Step) -> None:
    """Over the channels, broadcast against them again."""
    v = net.any(step)
    text = choose(("{0} - 0.5 * {0}.mean({1}, keepdim=True)", "{0} + {0}.amax({1}, keepdim=True)",
                   "{0} * torch.tanh({0}.sum({1}, keepdim=True))",
                   "{0} * torch.sigmoid({0}.max({1}, keepdim=True)[0])",
                   "{0} / (1 + {0}.var({1}, keepdim=True, unbiased=False))"), step)  # fmt: skip
    net.make(text.format(v.name, v.axis), v.shape, v)


@op
def gate(net: Writer, step: Step) -> None:
    """One value times another's bounded one; squeeze and excitation."""
    found = net.pair(step)
    if found is not None:
        text = choose(("{0} * torch.sigmoid({1})", "{0} * torch.tanh({1})"), step)
        net.make(text.format(*(v.name for v in found)), found[0].shape, *found)
        return
    v = net.any(step)
    one, two = (net.layer(f"nn.Linear({a}, {b})", s) for a, b, s in (
        (v.channels, size(step), "_down"), (size(step), v.channels, "_up")))  # fmt: skip
    pooled = f"{v.name}.mean({v.positions})" if v.positions else v.name
    weights = net.make(f"torch.sigmoid({two}(F.silu({one}({pooled}))))", (v.channels,), v)
    shaped = {1: "{}", 2: "{}[:, None]", 3: "{}[:, :, None, None]"}[len(v.shape)]
    net.make(f"{v.name} * {shaped.format(weights.name)}", v.shape, v, weights)


@op
def mask(net: Writer, step: Step) -> None:
    """A value with one channel, against all channels of another; a vector against its tokens."""
    v = net.any(step)
    if len(v.shape) == 3:
        name = net.layer(f"nn.Conv2d({v.channels}, 1, 1)")
    else:
        name = net.layer(f"nn.Linear({v.channels}, 1)")
    net.make(f"{v.name} * torch.sigmoid({name}({v.name}))", v.shape, v)


@op
def cat(net: Writer, step: Step) -> None:
    a = net.any(step)
    b = net.pick(
        step.other,
        lambda v: (
            len(v.shape) == len(a.shape)
            and v.resized(1) == a.resized(1)
            and v.channels + a.channels <= MOST_CHANNELS
        ),
    )
    if b is None:
        return
    text = f"torch.cat([{a.name}, {b.name}], {a.axis})"
    net.make(text, a.resized(a.channels + b.channels), a, b)


@op
def cat_positions(net: Writer, step: Step) -> None:
    """Two sequences one after the other; two images side by side."""
    a = net.tokens(step) if step.option % 2 == 0 else net.image(step)
    if a.shape[-2] * 2 > MOST_PIXELS:
        return
    b = net.pick(step.other, lambda v: v.shape == a.shape)
    assert b is not None
    dim = len(a.shape) - 1
    shape = (*a.shape[:-2], a.shape[-2] * 2, a.shape[-1])
    net.make(f"torch.cat([{a.name}, {b.name}], {dim})", shape, a, b)


@op
def split(net: Writer, step: Step) -> None:
    v = net.any(step)
    if v.channels < 2:
        return
    half = v.channels // 2
    if v.channels % 2 == 0 and step.option % 2 == 0:
        text = f"{v.name}.chunk(2, {v.axis})"
        sizes = (half, half)
    else:
        sizes = (half, v.channels - half)
        text = f"torch.split({v.name}, {list(sizes)}, {v.axis})"
    parts = net.make(text, v.shape, v)
    net.values.remove(parts)
    for i, n in enumerate(sizes):
        net.make(f"{parts.name}[{i}]", v.resized(n), v)


@op
def glu(net: Writer, step: Step) -> None:
    v = net.pick(step.at, lambda v: v.channels % 2 == 0)
    if v is not None:
        net.make(f"F.glu({v.name}, {v.axis})", v.resized(v.channels // 2), v)


@op
def slice_(net: Writer, step: Step) -> None:
    """Of the channels; both ends, strided, or two that overlap."""
    v, n = net.any(step), net.any(step).channels
    if n < 2:
        return
    k = 1 + step.size % (n - 1)
    kind = step.option % 5
    if kind == 0:
        net.make(v.cut(f":{k}"), v.resized(k), v)
    elif kind == 1:
        net.make(v.cut("::2"), v.resized((n + 1) // 2), v)
    elif kind == 2:
        net.make(f"{v.cut(':-1')} + torch.tanh({v.cut('1:')})", v.resized(n - 1), v)
    elif kind == 3:
        net.make(f"{v.cut(f':{k}')} - 0.5 * {v.cut(f'{n - k}:')}", v.resized(k), v)
    else:  # some channels only
        text = f"torch.cat([F.relu({v.cut(f':{k}')}), {v.cut(f'{k}:')}], {v.axis})"
        net.make(text, v.shape, v)


@op
def subsample(net: Writer, step: Step) -> None:
    """Some positions."""
    v = net.image(step) if step.option % 2 == 0 else net.tokens(step)
    if len(v.shape) == 3:
        c, h, w = v.shape
        net.make(f"{v.name}[:, :, ::2, ::2]", (c, (h + 1) // 2, (w + 1) // 2), v)
    elif step.option % 4 == 1:
        net.make(f"{v.name}[:, {step.size % v.shape[0]}]", v.shape[1:], v)
    elif v.shape[0] > 1:
        net.make(f"{v.name}[:, 1:]", (v.shape[0] - 1, v.shape[1]), v)


@op
def reorder(net: Writer, step: Step) -> None:
    """The channels in another order; with the original, that ties them in pairs or cycles."""
    v = net.any(step)
    n = v.channels
    kind = step.option % 4
    if kind == 3:
        order = [(i * 2 + 1) % n if n % 2 else n - 1 - i for i in range(n)]
        index = net.buffer(f"torch.tensor({order})")
        moved = v.cut(index)
    else:
        moved = (f"{v.name}.flip({v.axis})", f"{v.name}.roll(1, {v.axis})",
                 f"torch.roll({v.name}, 2, {v.axis})")[kind]  # fmt: skip
    both = f"{moved} + 0.5 * {v.name}" if step.option % 8 > 3 else moved
    net.make(both, v.shape, v)


@op
def shuffle(net: Writer, step: Step) -> None:
    """Channel shuffle."""
    v = net.pick(step.at, lambda v: v.channels in (4, 6, 8, 9, 10, 12))
    if v is None:
        return
    groups = divisor(v.channels, step, 2)
    if groups is None or groups == v.channels:
        groups = 3 if v.channels == 9 else 2
    per = v.channels // groups
    if len(v.shape) == 3:
        _, h, w = v.shape
        if step.option % 3 == 0:
            text = f"F.channel_shuffle({v.name}, {groups})"
        else:
            n = f"{v.name}.shape[0]" if step.option % 3 == 1 else "-1"
            text = (
                f"{v.name}.view({n}, {groups}, {per}, {h}, {w}).transpose(1, 2)"
                f".reshape({n}, {v.channels}, {h}, {w})"
            )
            text = text.replace(".view(", ".reshape(")
    else:
        a = v.axis
        text = f"{v.name}.unflatten({a}, ({groups}, {per})).transpose({a}, {a + 1}).flatten({a})"
    net.make(text, v.shape, v)


@op
def flatten(net: Writer, step: Step) -> None:
    """To a vector, with positions; an image to tokens; a vector to tokens; tokens turned over."""
    v = net.any(step)
    if len(v.shape) == 1:
        if v.channels % 2 == 0:
            k = v.channels // 2
            shape = (2, k) if step.option % 2 == 0 else (k, 2)
            net.make(f"{v.name}.view(-1, {shape[0]}, {shape[1]})", shape, v)
    elif len(v.shape) == 2 and step.option % 2:
        net.make(f"{v.name}.transpose(1, 2)", v.shape[::-1], v)
    elif len(v.shape) == 3 and step.option % 2:
        c, h, w = v.shape
        net.make(f"{v.name}.flatten(2).transpose(1, 2)", (h * w, c), v)
    elif math.prod(v.shape) <= 64:
        text = choose(
            ("{0}.flatten(1)", "{0}.reshape({0}.shape[0], -1)"), Step("", option=step.size)
        )
        net.make(text.format(v.name), (math.prod(v.shape),), v)


@op
def pad(net: Writer, step: Step) -> None:
    """Pixels, or channels."""
    kind = step.option % 5
    if kind == 4:
        v = net.any(step)
        if v.channels + 2 <= MOST_CHANNELS:
            sides = "0, 0, " * (len(v.shape) - v.axis) + "1, 1"
            net.make(f"F.pad({v.name}, ({sides}))", v.resized(v.channels + 2), v)
        return
    v = net.image(step)
    c, h, w = v.shape
    if max(h, w) + 2 > MOST_PIXELS or min(h, w) < 2:
        return
    how = ("", ", value=0.5", ", mode='reflect'", ", mode='replicate'")[kind]
    net.make(f"F.pad({v.name}, (1, 1, 1, 1){how})", (c, h + 2, w + 2), v)


@op
def pixel_shuffle(net: Writer, step: Step) -> None:
    v = net.image(step)
    c, h, w = v.shape
    if c % 4 == 0 and max(h, w) * 2 <= MOST_PIXELS and step.option % 2 == 0:
        net.make(f"F.pixel_shuffle({v.name}, 2)", (c // 4, h * 2, w * 2), v)
    elif h % 2 == 0 and w % 2 == 0 and c * 4 <= 2 * MOST_CHANNELS:
        net.make(f"F.pixel_unshuffle({v.name}, 2)", (c * 4, h // 2, w // 2), v)


@op
def pool(net: Writer, step: Step) -> None:
    v = net.image(step) if step.option % 2 == 0 else net.any(step)
    if len(v.shape) < 3:
        if v.positions:
            text = choose(("{0}.mean(1)", "{0}.amax(1)", "{0}.max(1)[0]"), step)
            net.make(text.format(v.name), (v.channels,), v)
        return
    c, h, w = v.shape
    kind = step.option % 6
    if kind < 3 and min(h, w) >= 2:
        text = ("F.avg_pool2d({0}, 2)", "F.max_pool2d({0}, 2)", "F.max_pool2d({0}, 3, 1, 1)")[kind]
        shape = (c, h, w) if kind == 2 else (c, h // 2, w // 2)
    elif kind < 5 and min(h, w) >= 2:
        text = ("F.adaptive_avg_pool2d({0}, 2)", "F.adaptive_max_pool2d({0}, 1)")[kind - 3]
        shape = (c, 2, 2) if kind == 3 else (c, 1, 1)
    else:
        text, shape = "{0}.mean((2, 3))", (c,)
    net.make(text.format(v.name), shape, v)


@op
def upsample(net: Writer, step: Step) -> None:
    v = net.image(step)
    c, h, w = v.shape
    if max(h, w) * 2 > MOST_PIXELS:
        return
    mode = choose(("nearest", "bilinear"), step)
    net.make(f"F.interpolate({v.name}, scale_factor=2, mode={mode!r})", (c, h * 2, w * 2), v)


@op
def depthwise(net: Writer, step: Step) -> None:
    v = net.image(step)
    multiplier = 1 + step.size % 2
    if v.channels > 1 and v.channels * multiplier <= MOST_CHANNELS:
        _conv(net, step, v, v.channels * multiplier, groups=v.channels)


@op
def grouped(net: Writer, step: Step) -> None:
    v = net.image(step)
    groups = divisor(v.channels, step, 2)
    if groups is not None:
        _conv(net, step, v, groups * (1 + step.other % 3), groups)


@op
def transposed(net: Writer, step: Step) -> None:
    """Transposed convolution, in groups or not."""
    v = net.image(step)
    c, h, w = v.shape
    groups = (divisor(c, step, 2) or 1) if step.option % 2 else 1
    n = groups * (1 + step.other % 3) if groups > 1 else size(step)
    stride = 2 if step.option % 4 > 1 and max(h, w) * 2 <= MOST_PIXELS else 1
    if n > MOST_CHANNELS or (stride == 1 and max(h, w) + 1 > MOST_PIXELS):
        return
    in_groups = f", groups={groups}" if groups > 1 else ""
    name = net.layer(f"nn.ConvTranspose2d({c}, {n}, 2, stride={stride}{in_groups})")
    net.make(f"{name}({v.name})", (n, (h - 1) * stride + 2, (w - 1) * stride + 2), v)


@op
def layer_scale(net: Writer, step: Step) -> None:
    v = net.any(step)
    name = net.parameter(v.per_feature())
    net.make(choose((f"{v.name} * {name}", f"{name} * torch.tanh({v.name}) + {v.name}"), step),
             v.shape, v)  # fmt: skip


@op
def prelu(net: Writer, step: Step) -> None:
    v = net.any(step)
    name = net.layer(f"nn.PReLU({v.channels})")
    _channels_first(net, v, name)


@op
def class_token(net: Writer, step: Step) -> None:
    v = net.tokens(step)
    t, c = v.shape
    if t > MOST_PIXELS:
        return
    name = net.parameter((1, 1, c))
    text = f"torch.cat([{name}.expand({v.name}.shape[0], -1, -1), {v.name}], 1)"
    net.make(text, (t + 1, c), v)


@op
def position(net: Writer, step: Step) -> None:
    """Positional parameters: for all positions and features, or for one of the two."""
    v = net.any(step)
    shape = (1, *v.shape)
    if step.option % 3 == 1:
        shape = tuple(1 if d == v.axis else n for d, n in enumerate(shape))
    name = net.parameter(shape)
    net.make(f"{v.name} + {name}", v.shape, v)


@op
def constant(net: Writer, step: Step) -> None:
    """Numbers that vary along the features: a float buffer, or written down in the source."""
    v = net.any(step)
    view = ".view(-1, 1, 1)" if len(v.shape) == 3 else ""
    if step.option % 3 == 0:
        name = net.buffer(f"torch.ones({v.per_feature()})")
        net.make(f"{v.name} * {name}", v.shape, v)
        return
    two = step.option % 3 == 1  # two different numbers, or all different
    numbers = [0.5 + (i % 2 if two else i / 4) for i in range(v.channels)]
    net.make(f"{v.name} * torch.tensor({numbers}){view}", v.shape, v)


@op
def again(net: Writer, step: Step) -> None:
    """A layer that was there before is called once more."""
    for layer in _from(net.layers, step.other):
        v = net.pick(step.at, layer.fits)
        if v is not None and max(layer.gives(v)) <= MOST_CHANNELS:
            net.make(f"{layer.name}({v.name})", layer.gives(v), v)
            return
    v = net.any(step)
    name = net.linear(v, v.shape[-1])
    net.make(f"{name}(torch.tanh({name}({v.name})))", v.shape, v)


def _from(layers: list[Layer], at: int) -> list[Layer]:
    start = at % len(layers) if layers else 0
    turned = layers[::-1]
    return turned[start:] + turned[:start]


@op
def tie(net: Writer, step: Step) -> None:
    """A new layer shares the weight of an earlier one, as it is or transposed."""
    for layer in _from(net.layers, step.other):
        if layer.kind == "Linear" and step.option % 2:
            n, into = layer.sizes
            v = net.pick(step.at, lambda u, into=into: u.shape[-1] == into)
            if v is not None:
                bias = net.parameter(n, "_bias")
                text = f"F.linear({v.name}, {layer.name}.weight.t(), {bias})"
                net.make(text, (*v.shape[:-1], n), v)
                return
            continue
        v = net.pick(step.at, layer.fits)
        if v is None or max(layer.gives(v)) > MOST_CHANNELS:
            continue
        made = next(line for line in net.init if line.startswith(f"{layer.name} = "))
        name = net.layer(made.split(" = ", 1)[1])
        net.init.append(f"{name}.weight = {layer.name}.weight")
        net.make(f"{name}({v.name})", layer.gives(v), v)
        return
    v = net.any(step)
    one, two = (net.linear(v, v.shape[-1], s) for s in ("_a", "_b"))
    net.init.append(f"{two}.weight = {one}.weight")
    net.make(f"{two}(torch.tanh({one}({v.name})))", v.shape, v)


@op
def functional(net: Writer, step: Step) -> None:
    """Weights that are bare parameters, used as they are or standardised first."""
    kind = step.option % 4
    if kind == 0:
        v = net.any(step)
        name = net.parameter((v.shape[-1], size(step)))
        net.make(f"{v.name} @ {name}", (*v.shape[:-1], size(step)), v)
    elif kind == 1:
        v = net.tokens(step)
        name = net.parameter((size(step), v.shape[1]))
        text = f"torch.einsum('btc,dc->btd', {v.name}, {name})"
        net.make(text, (v.shape[0], size(step)), v)
    elif kind == 2:  # over the tokens
        v = net.tokens(step)
        name = net.parameter((size(step), v.shape[0]))
        net.make(f"{name} @ {v.name}", (size(step), v.shape[1]), v)
    else:
        v = net.image(step)
        name = net.parameter((size(step), v.channels, 1, 1))
        text = f"{name} - 0.5 * {name}.mean((1, 2, 3), keepdim=True)"
        net.make(f"F.conv2d({v.name}, {text})", v.resized(size(step)), v)


@op
def maxout(net: Writer, step: Step) -> None:
    v = net.pick(step.at, lambda v: v.channels % 2 == 0)
    if v is None:
        return
    half, a = v.channels // 2, v.axis
    shape, dim = ((half, 2), a + 1) if step.option % 2 == 0 else ((2, half), a)
    name = choose(("amax", "amax", "mean", "sum"), step)
    net.make(f"{v.name}.unflatten({a}, {shape}).{name}({dim})", v.resized(half), v)


@op
def inplace(net: Writer, step: Step) -> None:
    v = net.any(step)
    kind = step.option % 7
    other = net.pick(step.other, lambda u: u.shape == v.shape and u.name != v.name)
    if kind == 0 or (other is None and kind < 4):
        net.write(f"{v.name}.relu_()", v)
    elif kind < 4:
        assert other is not None
        text = ("{0} += {1}", "{0}.add_({1})", "{0} *= torch.tanh({1})")[kind - 1]
        net.write(text.format(v.name, other.name), v, other)
    elif kind == 4:
        net.write(f"{v.cut(f':{1 + step.size % v.channels}')}.mul_(0.5)", v)
    elif kind == 5:
        net.make(f"{net.layer('nn.ReLU(inplace=True)')}({v.name})", v.shape, v)
    else:
        net.write(f"{v.name}.mul_(0.5).add_(0.1)", v)


@op
def gram(net: Writer, step: Step) -> None:
    """Features against features of two sequences of one length."""
    a = net.tokens(step)
    b = net.pick(step.other, lambda v: len(v.shape) == 2 and v.shape[0] == a.shape[0])
    assert b is not None
    shape = (a.shape[1], b.shape[1])
    text = choose(("{0}.transpose(1, 2) @ torch.tanh({1})",
                   "torch.einsum('btc,btd->bcd', {0}, torch.tanh({1}))"), step)  # fmt: skip
    net.make(text.format(a.name, b.name), shape, a, b)


@op
def attention(net: Writer, step: Step) -> None:
    """Multi-head self-attention, of many kinds."""
    v = net.tokens(step)
    t, c = v.shape
    if t > MOST_PIXELS + 1:
        return
    packed, by_hand, bias, scaled, grouped_query, cosine = (bool(step.option >> i & 1)
                                                            for i in range(6))  # fmt: skip
    heads, d = (2, 1, 3)[step.size % 3], 2 + step.size // 3 % 2
    kv = heads
    if grouped_query and heads == 2:
        kv = 1
    n = heads * d
    if packed and kv == heads:
        name = net.linear(v, 3 * n, "_qkv")
        text = f"{name}({v.name}).reshape(-1, {t}, 3, {heads}, {d}).permute(2, 0, 3, 1, 4)"
        qkv = _hidden(net, text, v)
        q, k, w = (f"{qkv.name}[{i}]" for i in range(3))
    else:
        q, k, w = (
            f"{net.linear(v, m * d, s)}({v.name}).view(-1, {t}, {m}, {d}).transpose(1, 2)"
            for s, m in (("_q", heads), ("_k", kv), ("_v", kv))
        )
        if kv < heads:
            k, w = (f"{x}.repeat_interleave({heads // kv}, 1)" for x in (k, w))
    if cosine:
        q, k = (f"F.normalize({x}, dim=-1, eps=0.1)" for x in (q, k))
    if scaled:
        q = f"{q} * {net.parameter((heads, 1, 1), '_scale')}"
    table = ""
    if bias:
        name = net.parameter((2 * t - 1, heads), "_table")
        index = net.buffer(f"torch.arange({t})[:, None] - torch.arange({t}) + {t - 1}", "_index")
        table = f"{name}[{index}].permute(2, 0, 1).unsqueeze(0)"
    if by_hand:
        scores = f"({q}) @ ({k}).transpose(-2, -1) * {d**-0.5:.4f}"
        y = f"(({scores}{f' + {table}' if table else ''}).softmax(-1) @ {w})"
    else:
        in_mask = f", attn_mask={table}" if table else ""
        y = f"F.scaled_dot_product_attention({q}, {k}, {w}{in_mask})"
    merged = _hidden(net, f"{y}.transpose(1, 2).reshape(-1, {t}, {n})", v)
    out = net.layer(f"nn.Linear({n}, {c})", "_out")
    net.make(f"{out}({merged.name})", v.shape, v)


def _hidden(net: Writer, text: str, *operands: Value) -> Value:
    """A value that does not go into the pool."""
    value = net.make(text, (), *operands)
    net.values.remove(value)
    return value


# ------------------------------------------------------------------ what is returned
def _head(net: Writer, v: Value) -> str:
    if len(v.shape) == 3:
        return f"{net.layer(f'nn.Conv2d({v.channels}, 2, 1)')}({v.name})"
    return f"{net.layer(f'nn.Linear({v.shape[-1]}, 2)')}({v.name})"


@ending
def head(net: Writer) -> str:
    return _head(net, net.values[-1])


@ending
def pooled(net: Writer) -> str:
    v = net.values[-1]
    if v.positions:
        v = net.make(f"{v.name}.mean({v.positions})", (v.channels,), v)
    return _head(net, v)


@ending
def leaves(net: Writer) -> str:
    """A tuple: one head for everything that nothing has read."""
    unread = [v for v in net.values if v.name not in net.used] or net.values[-1:]
    return f"({', '.join(_head(net, v) for v in unread)},)"


@ending
def mapping(net: Writer) -> str:
    """A dict: a head, and the value before it as it is."""
    last = net.values[-1]
    return f'{{"head": {_head(net, last)}, "more": ({net.values[-2 % len(net.values)].name},)}}'


@ending
def raw(net: Writer) -> str:
    return net.values[-1].name


# ------------------------------------------------------------------ drawing
def operation(parameter: str) -> str:
    """The step that made a parameter, by its name."""
    found = re.match(r"[a-z_]+", parameter.partition(".")[0])
    assert found is not None
    return found[0].rstrip("_")


def steps() -> st.SearchStrategy[Step]:
    few = st.integers(0, 3)
    return st.builds(Step, st.sampled_from(sorted(OPS, key=list(OPS).index)), few, few,
                     st.integers(0, 5), st.integers(0, 63))  # fmt: skip


def plans(most: int = 8) -> st.SearchStrategy[Plan]:
    """Plans of up to `most` steps."""
    inputs = st.lists(st.sampled_from(list(INPUTS)), min_size=1, max_size=2).map(tuple)
    return st.builds(
        Plan,
        inputs,
        st.lists(steps(), min_size=1, max_size=most).map(tuple),
        st.sampled_from((0, 4, 5, 6, 8)),
        st.sampled_from(list(ENDINGS)),
        st.integers(0, 99),
    )


def drawn(random: Random, most: int = 8) -> Plan:
    """A plan drawn independently of others: hypothesis goes on from what it drew before, which
    finds less in the same time."""
    step = lambda: Step(random.choice(list(OPS)), *(random.randrange(n) for n in (4, 4, 6, 64)))  # noqa: E731
    return Plan(
        tuple(random.choice(list(INPUTS)) for _ in range(random.choice((1, 1, 2)))),
        tuple(step() for _ in range(random.randint(1, most))),
        random.choice((0, 4, 5, 6, 8)),
        random.choice(list(ENDINGS)),
        random.randrange(100),
    )
