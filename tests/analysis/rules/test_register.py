"""Operations that users teach: before, they pin; after, their spaces are found and are exact."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import Net as Blocks
from tests.helpers.blocks import data, join_heads, law1, law3, parameter, split_heads
from tests.helpers.blocks import sizes as spaces_of
from tests.helpers.laws import EXACT, error, merge, parameters, permuted, run
from tests.helpers.models import randomise
from zipfx import ZipError
from zipfx.analysis.rules import Call, Labels, join
from zipfx.analysis.rules.reductions import together
from zipfx.analysis.rules.register import TAUGHT

aten, ops = torch.ops.aten, torch.ops.zipfxtest
ANALYSIS = Path(__file__).resolve().parents[3] / "docs" / "analysis.md"


@torch.library.custom_op("zipfxtest::scale", mutates_args=())
def _scale(x: Tensor, by: Tensor) -> Tensor:
    return x * by


@torch.library.custom_op("zipfxtest::turn", mutates_args=())
def _turn(x: Tensor, steps: int) -> Tensor:
    return x.roll(steps, -1)


@torch.library.custom_op("zipfxtest::pick", mutates_args=())
def _pick(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(-1, index)


@torch.library.custom_op("zipfxtest::choose", mutates_args=())
def _choose(x: Tensor, order: Tensor) -> Tensor:
    return x.index_select(-1, order)


@torch.library.custom_op("zipfxtest::dense", mutates_args=())
def _dense(weight: Tensor, input: Tensor, fast: bool, bias: Tensor | None = None) -> Tensor:
    return nn.functional.linear(input, weight, bias)


@torch.library.custom_op("zipfxtest::both", mutates_args=())
def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu(), x.tanh()


@torch.library.custom_op("zipfxtest::swish_", mutates_args={"x"})
def _swish_(x: Tensor) -> None:
    x.mul_(x.sigmoid())


@torch.library.custom_op("zipfxtest::rolled", mutates_args=())
def _rolled(self: Tensor, shifts: list[int], dims: list[int]) -> Tensor:
    return self.roll(shifts, dims)


@torch.library.custom_op("zipfxtest::rms", mutates_args=())
def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


@torch.library.custom_op("zipfxtest::only_floats", mutates_args=())
def _only_floats(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError("only floats")
    return x.flip(-1)


@torch.library.custom_op("zipfxtest::conv", mutates_args=())
def _conv(
    input: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], groups: int, fast: bool
) -> Tensor:
    return nn.functional.conv2d(input, weight, bias, padding=padding, groups=groups)


@torch.library.custom_op("zipfxtest::swapped_conv", mutates_args=())
def _swapped_conv(input: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.conv2d(input, weight.transpose(0, 1))


@torch.library.custom_op("zipfxtest::layer_norm", mutates_args=())
def _layer_norm(input: Tensor, normalized_shape: list[int], weight: Tensor) -> Tensor:
    return nn.functional.layer_norm(input, normalized_shape, weight)


@torch.library.custom_op("zipfxtest::group_norm", mutates_args=())
def _group_norm(input: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.group_norm(input, num_groups, weight, bias)


@torch.library.custom_op("zipfxtest::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


@torch.library.custom_op("zipfxtest::soft", mutates_args=())
def _soft(self: Tensor, dim: int) -> Tensor:
    return self.softmax(dim)


@torch.library.custom_op("zipfxtest::pool", mutates_args=())
def _pool(self: Tensor, kernel_size: list[int], step: int) -> Tensor:
    return nn.functional.max_pool2d(self, kernel_size, step)


class Net(nn.Module):
    """first (5 -> 6), one operation, second (n -> 3)."""

    def __init__(self, middle: Callable[[Any, Any], Any], width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(width, 3)
        self.gain, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.order: Tensor
        self.register_buffer("order", torch.tensor([4, 2, 0, 1, 3, 5]))
        self.middle = middle

    def forward(self, x: Any) -> Any:
        return self.second(self.middle(self, self.first(x)))


def sum_of(pair: Any) -> Any:
    return pair[0] + pair[1]


def swished(h: Any) -> Any:
    ops.swish_(h)
    return h


X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).double()
NETS: dict[str, Callable[[Any, Any], Any]] = {
    "scale": lambda net, h: ops.scale(h, net.gain),
    "turn": lambda net, h: ops.turn(h, 2),
    "pick": lambda net, h: ops.pick(h, net.order),
    "choose": lambda net, h: ops.choose(h, net.order),
    "rolled": lambda net, h: ops.rolled(h, [2], [1]),
    "dense": lambda net, h: ops.dense(net.weight, h, True, net.bias),
    "rms": lambda net, h: ops.rms(h, net.gain),
    "both": lambda net, h: sum_of(ops.both(h)),
    "swish_": lambda net, h: swished(h),
    "only_floats": lambda net, h: ops.only_floats(h),
}


def build(name: str, seed: int = 0) -> nn.Module:
    return randomise(Net(NETS[name]), seed).double()


def sizes(model: nn.Module) -> list[int]:
    return [space.size for space in zipfx.analyze(model, X, verify=False)]


def rms(call: Call) -> Labels:
    """As a function: normalised over the last axis, then scaled feature by feature."""
    x = call.labels("x")
    together(call.constraints, x, {len(x.shape) - 1})
    return join(call.constraints, [x, call.labels("weight")], x.shape)


# ------------------------------------------------------------------ before
@pytest.mark.parametrize("name", NETS)
def test_an_unknown_op_is_one_opaque_call(name: str) -> None:
    spaces = zipfx.analyze(build(name), X, verify=False)
    assert len(spaces) == 0
    reasons = {p.reason for p in spaces.pinned if p.parameter == "first.weight" and p.dim == 0}
    assert reasons == {
        f"zipfxtest::{name} is not understood (node '{name}'); teach it with "
        "zipfx.register_rule, see docs/analysis.md"
    }


def test_the_report_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(5, 4), build("turn"))
    model[0] = nn.Linear(5, 5).double()
    reasons = {p.reason for p in zipfx.analyze(model, X, verify=False).pinned}
    assert any(
        "zipfxtest::turn is not understood (node 'turn' in module '1')" in r for r in reasons
    )


def by_one_number(h: Any) -> Any:
    return h * float(h[0, 0])


torch.fx.wrap("by_one_number")


def test_a_number_that_leaves_is_nothing_to_teach() -> None:
    model = randomise(Net(lambda net, h: by_one_number(h)), 0).double()
    reasons = {p.reason for p in zipfx.analyze(model, X, verify=False).pinned}
    assert "aten::_local_scalar_dense is not understood (node 'by_one_number')" in reasons


# ------------------------------------------------------------------ after
def pass_on(call: Call) -> Labels:
    """As a function: element by element."""
    return call.labels("x")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "rule", "found"),
    [
        ("scale", "pointwise", [6]),
        ("turn", "movement", [6]),
        ("pick", "movement", [6]),
        ("rolled", aten.roll.default, [6]),
        ("dense", aten.linear.default, [6, 6]),
        ("rms", rms, [6]),
        ("both", lambda call: (pass_on(call), pass_on(call)), [6]),
        ("both", "pointwise", [6]),
        ("swish_", "pointwise", [6]),
    ],
)
def test_laws_hold_for_what_is_taught(name: str, rule: Any, found: list[int]) -> None:
    zipfx.register_rule(getattr(ops, name).default, rule)
    model = build(name)
    assert sizes(model) == found
    twin = permuted(model, (X,))
    assert not torch.equal(twin.get_parameter("first.weight"), model.get_parameter("first.weight"))
    assert error(run(model, (X,)), run(twin, (X,))) < EXACT
    merged = merge([model, twin], [(X,)], matcher="permute")
    assert error(run(model, (X,)), run(merged, (X,))) < EXACT
    assert parameters(merged) == parameters(model)


def test_a_packet_means_all_its_overloads() -> None:
    zipfx.register_rule(ops.scale, "pointwise")
    assert list(TAUGHT) == [ops.scale.default]


def test_as_a_decorator() -> None:
    decorated = zipfx.register_rule(ops.rms.default)(rms)
    assert decorated is rms
    assert sizes(build("rms")) == [6]


def test_a_part_of_the_features_that_an_op_sees_is_told_from_the_rest() -> None:
    zipfx.register_rule(ops.swish_.default, "pointwise")
    model = randomise(Net(lambda net, h: half(h)), 0).double()
    twin = permuted(model, (X,))
    assert sizes(model) == [2, 4]
    assert error(run(model, (X,)), run(twin, (X,))) < EXACT


def half(h: Any) -> Any:
    ops.swish_(h[:, :2])
    return h


torch.fx.wrap("half")


def test_movement_by_an_index_from_the_input_pins() -> None:
    zipfx.register_rule(ops.pick.default, "movement")
    model = randomise(Net(lambda net, h: ops.pick(h, (h.sum(0) > 0).long())), 0).double()
    spaces = zipfx.analyze(model, X, verify=False)
    assert len(spaces) == 0
    reasons = {p.reason for p in spaces.pinned}
    assert "zipfxtest::pick moves by what depends on the input" in reasons


def test_what_is_taught_wrongly_is_pinned_by_the_numeric_check() -> None:
    zipfx.register_rule(ops.turn.default, "pointwise")
    assert sizes(build("turn")) == [6]
    checked = zipfx.analyze(build("turn"), X)
    assert len(checked) == 0
    assert any("numeric check" in p.reason for p in checked.pinned)


def test_a_rule_can_be_replaced() -> None:
    zipfx.register_rule(ops.turn.default, "pointwise")
    zipfx.register_rule(ops.turn.default, "movement", replace=True)
    assert [s.size for s in zipfx.analyze(build("turn"), X)] == [6]


def test_a_rule_of_the_user_comes_before_the_built_in_one() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    assert sizes(net) == [6]
    seen = []
    zipfx.register_rule(
        aten.relu.default, lambda call: seen.append(call) or call.labels("self"), replace=True
    )
    assert sizes(net) == [6]
    assert len(seen) == 1


# ------------------------------------------- behaviour of operators that are made of others
def conv_net() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = ops.conv(s.a(x).relu(), s.w, s.b, [1, 1], 2, True)
        return s.h(y.relu().mean((2, 3)))

    weights = {"w": parameter(8, 3, 3, 3), "b": parameter(8)}
    return Blocks(forward, a=nn.Conv2d(5, 6, 1), h=nn.Linear(8, 3), **weights)


def attention_net() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x)) for layer in (s.q, s.k, s.v))
        return s.o(join_heads(ops.attention(q, k, v, True)))

    return Blocks(forward, **{n: nn.Linear(5, 12) for n in "qkv"}, o=nn.Linear(12, 3))


def normed(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    parts = {"a": nn.Linear(5, 6), "h": nn.Linear(6, 3), "w": parameter(6), "b": parameter(6)}
    return Blocks(lambda s, x: s.h(function(s, s.a(x))), **parts)


MADE_OF_OTHERS: dict[str, tuple[Any, Callable[[], nn.Module], tuple[int, ...], list[Any]]] = {
    "conv": (aten.conv2d.default, conv_net, (5, 4, 4), [(2, ()), (6, (3, 3)), (8, (4, 4))]),
    "layer_norm": (
        aten.layer_norm.default, lambda: normed(lambda s, y: ops.layer_norm(y, [6], s.w)),
        (4, 5), [(6, ())],
    ),
    "group_norm": (
        aten.group_norm.default,
        lambda: normed(lambda s, y: ops.group_norm(y.mT, 3, s.w, s.b).mT),
        (4, 5), [(3, ()), (6, (2, 2, 2))],
    ),
    "attention": (
        aten.scaled_dot_product_attention.default, attention_net,
        (4, 5), [(3, ()), (12, (4, 4, 4)), (12, (4, 4, 4))],
    ),
    "soft": (aten.softmax.int, lambda: normed(lambda s, y: ops.soft(y, -1)), (4, 5), [(6, ())]),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_behaving_like_an_operator_that_is_made_of_others(name: str) -> None:
    like, make, shape, expected = MADE_OF_OTHERS[name]
    model, x = make(), data(*shape)
    assert spaces_of(model, x) != expected
    zipfx.register_rule(getattr(ops, name).default, like)
    assert spaces_of(model, x) == expected
    assert len(zipfx.analyze(model, x)) == len(expected)
    law1(model, *shape)
    law3(model, *shape, seeds=[0])


def test_what_an_operator_made_of_others_does_not_take() -> None:
    def pooled(s: Any, x: Tensor) -> Tensor:
        return s.h(ops.pool(s.a(x), [2, 2], 1).mean((2, 3)))

    def swapped(s: Any, x: Tensor) -> Tensor:
        return s.h(ops.swapped_conv(s.a(x), s.w).mean((2, 3)))

    zipfx.register_rule(ops.pool.default, aten.max_pool2d.default)
    zipfx.register_rule(ops.swapped_conv.default, aten.conv2d.default)
    ends = {"a": nn.Conv2d(5, 6, 1), "h": nn.Linear(6, 3)}
    with pytest.raises(ZipError, match=r"but that gives \[\(2, 6, 2, 2\)\] here, and .*3, 3\)"):
        zipfx.analyze(Blocks(pooled, **ends), data(5, 4, 4))
    model = Blocks(swapped, **{**ends, "a": nn.Conv2d(5, 7, 1)}, w=parameter(7, 6, 1, 1))
    with pytest.raises(ZipError, match=r"aten::conv2d .* does not take these arguments: "):
        zipfx.analyze(model, data(5, 4, 4))


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("op", "rule", "says"),
    [
        (
            ops.turn.default,
            "point",
            r"'point' is no rule for zipfxtest::turn: choose one of \['mov",
        ),
        (ops.turn.default, 3, "3 is no rule for zipfxtest::turn"),
        ("turn", "movement", "'turn' is not an operator: pass one such as torch.ops.mylib"),
        (torch.relu, "pointwise", "is not an operator"),
        (_turn, "movement", "CustomOpDef.* is not an operator"),
        (aten.mm.default, "pointwise", "aten::mm has a rule already; pass replace=True"),
        (aten.add.Tensor, "pointwise", r"aten::add.Tensor has a rule already"),
        (aten.cat.default, "movement", "aten::cat has a rule already"),
        (aten.t.default, "movement", "aten::t gives a view"),
        (aten.matmul.default, "pointwise", "aten::matmul is made of other operations"),
        (ops.turn.default, aten.roll.default, r"same; it has no \['self', 'shifts'\]"),
        (ops.dense.default, aten.take.default, "aten::take, which has no rule itself"),
        (ops.dense.default, aten.embedding.default, r"no \['indices'\], and \['input', 'bias'\]"),
    ],
)
def test_refused_when_registered(op: Any, rule: Any, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        zipfx.register_rule(op, rule)
    assert not TAUGHT


def test_refused_twice() -> None:
    zipfx.register_rule(ops.turn.default, "movement")
    with pytest.raises(ZipError, match="zipfxtest::turn has a rule already"):
        zipfx.register_rule(ops.turn.default, "movement")


@pytest.mark.parametrize(
    ("name", "rule", "says"),
    [
        ("dense", "pointwise", r"zipfxtest::dense is registered as 'pointwise', but operands of"),
        ("scale", "movement", r"zipfxtest::scale is registered as 'movement', but makes new va"),
        ("choose", "movement", r"but takes integers beside what it moves \(node 'choose'\)"),
        ("only_floats", "movement", r"can not be run on integer labels \(node .*\): only floats"),
        ("turn", lambda call: call.labels("y"), r"rule registered for zipfxtest::turn .* fails"),
        ("turn", lambda call: None, r"gives \['NoneType'\] for results of shapes \[\(8, 6\)\]"),
        ("both", pass_on, r"gives \[\(8, 6\)\] for results of shapes \[\(8, 6\), \(8, 6\)\]"),
    ],
)
def test_refused_when_it_does_not_fit(name: str, rule: Any, says: str) -> None:
    zipfx.register_rule(getattr(ops, name).default, rule)
    with pytest.raises(ZipError, match=says):
        zipfx.analyze(build(name), X)


# ------------------------------------------------------------------ documentation
def test_the_examples_of_the_documentation_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", ANALYSIS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks:
        exec(block, names)
