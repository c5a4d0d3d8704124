"""Which rule applies to an aten call: by what it reads, by its name, and by its tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zipfx.analysis.labels.constraints import Constraints
from zipfx.analysis.labels.labels import Kind, Labels
from zipfx.analysis.rules.call import Call, aten
from zipfx.analysis.rules.register import TAUGHT
from zipfx.analysis.transfer import transfer

WIDTH = 4


class Known:
    """Labels of tensors: data with features along dimension 1, unless said to be constant."""

    def __init__(self) -> None:
        self.constraints = Constraints()
        self.slot = self.constraints.fresh(WIDTH)[None]
        self.constants: list[Tensor] = []

    def of(self, t: Tensor) -> Labels:
        if any(t is c for c in self.constants):
            return Labels(tuple(t.shape), kind=Kind.CONSTANT)
        if t.ndim < 2:
            return Labels(tuple(t.shape), (), (), Kind.DATA)
        return Labels(tuple(t.shape), (self.slot,), (), Kind.DATA)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Labels:
        operands = [t for t in args if isinstance(t, Tensor)]
        result = op(*args, **kwargs)
        call = Call(op, args, kwargs, result, self.constraints, self.of, print)
        (found,) = transfer(call, operands, [result])
        return found


def features(found: Labels) -> list[list[int]]:
    return [slot.flatten().tolist() for slot in found.features]


X = torch.arange(3.0 * WIDTH).reshape(3, WIDTH)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.relu.default, [X]),
        (aten.relu_.default, [X.clone()]),  # writes what relu gives
        (aten.clone.default, [X]),
        (aten.tanh.default, [X]),
        (aten.mul.Tensor, [X, X]),
    ],
    ids=str,
)
def test_features_stay_where_elements_do(op: Any, args: list[Tensor]) -> None:
    known = Known()
    found = known(op, *args)
    assert features(found) == [known.slot.flatten().tolist()]
    assert found.kind == Kind.DATA


def test_what_moves_elements_moves_their_labels() -> None:
    known = Known()
    found = known(aten.flip.default, X, [1])
    assert features(found) == [known.slot.flip(1).flatten().tolist()]


def test_an_index_that_depends_on_data_says_nothing_of_which_feature_it_takes() -> None:
    index = torch.tensor([0, 2])
    known = Known()
    known.constants = [index]
    steady = known(aten.index_select.default, X, 1, index)
    assert features(steady) == [known.slot[:, [0, 2]].flatten().tolist()]
    known = Known()
    found = known(aten.index_select.default, X, 1, index)
    assert features(found) != features(steady)


def test_what_is_filled_is_known_by_its_values() -> None:
    known = Known()
    found = known(aten.fill_.Scalar, X.clone(), 1.0)
    assert (features(found), found.kind) == ([], Kind.CONSTANT)
    known.constants = [X]
    found = known(aten.sin.default, X)
    assert (features(found), found.kind) == ([], Kind.CONSTANT)


def test_random_numbers_are_others_in_every_place() -> None:
    known = Known()
    known.constants = [X]
    found = known(aten.bernoulli.default, X / X.max())
    assert len(found.fixed) == X.ndim
    assert features(found) == []


def test_an_operation_without_a_rule_pins_what_it_reads() -> None:
    known = Known()
    found = known(aten._fft_r2c.default, X, [1], 0, True)
    assert features(found) == []
    assert any(c.reason for c in known.constraints.colours)


def test_what_was_taught_comes_before_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def mine(call: Call, targets: Any) -> list[Labels]:
        asked.append(call.op)
        return [call.of(X)] * len(targets)

    monkeypatch.setitem(TAUGHT, aten.sort.default, None)  # type: ignore[misc]
    monkeypatch.setattr("zipfx.analysis.transfer.taught", mine)
    known = Known()
    call = Call(aten.sort.default, (X,), {}, None, known.constraints, known.of, print)
    found = transfer(call, [X], [X, X])
    assert asked == [aten.sort.default]
    assert [features(f) for f in found] == [[known.slot.flatten().tolist()]] * 2
