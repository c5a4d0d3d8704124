"""Operations that users teach: before, they pin; after, their spaces are found and are exact."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import EXACT, error, merge, parameters, permuted, run
from models import randomise
from torch import Tensor, nn

import zipfx
from zipfx import ZipError
from zipfx.rules import TAUGHT, Call, Labels, join
from zipfx.rules.together import together

aten, ops = torch.ops.aten, torch.ops.zipfxtest
ANALYSIS = Path(__file__).resolve().parents[1] / "docs" / "analysis.md"


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
    together(call.ledger, x, {len(x.shape) - 1})
    return join(call.ledger, [x, call.labels("weight")], x.shape)


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
        (ops.dense.default, aten.linalg_qr.default, "aten::linalg_qr, which has no rule itself"),
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
