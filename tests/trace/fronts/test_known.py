"""What Python may learn of a node: shapes, with a note; never data, and never what was learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from zipfx.trace.fronts.known import Evaluation, Known, NodeCall, Questions

X = torch.arange(6.0).reshape(2, 3)
ROOT = nn.Linear(3, 3)
DATA = Known(X, given=True, free=False, about="a shape")


def known(target: Any, *args: Any, used: tuple[Known, ...] = (DATA,), kind: str = "call_function",
          inputs: tuple[Any, ...] = (X,)) -> Known:  # fmt: skip
    return Evaluation(inputs).known(ROOT, NodeCall(kind, target, args, {}), used)


# ------------------------------------------------------------------ evaluation
def test_placeholders_are_the_inputs_in_order_then_their_defaults() -> None:
    run = Evaluation([X, 3])
    calls = [NodeCall("placeholder", name, (7,), {}) for name in "xyz"]
    found = [run.known(ROOT, call, ()) for call in calls]
    assert found[0].value is X
    assert [k.value for k in found[1:]] == [3, 7]
    assert [k.given for k in found] == [True] * 3
    assert found[1].about == "argument 'y'"
    assert run.shapes == [(2, 3)]


@pytest.mark.parametrize(
    ("kind", "target", "args", "expected"),
    [
        ("call_function", torch.add, (X, 1), X + 1),
        ("call_method", "sum", (X, 1), X.sum(1)),
        ("call_module", "", (X,), ROOT(X).detach()),
        ("get_attr", "weight", (), ROOT.weight.detach()),
    ],
)
def test_every_kind_of_node_is_computed(
    kind: str, target: Any, args: Any, expected: Tensor
) -> None:
    found = known(target, *args, kind=kind, used=())
    assert torch.equal(found.value, expected)
    assert not found.given  # nothing that it reads comes from the inputs


@pytest.mark.parametrize(
    ("target", "args", "free"),
    [
        (torch.nonzero, (X,), True),  # as many rows as there are such numbers
        (Tensor.item, (X[0, 0],), True),
        (Tensor.tolist, (X,), True),
        (getattr, (X, "shape"), False),
        (torch.relu, (X,), False),
        (lambda x: x[torch.tensor([0, 1])], (X,), False),  # by position
        (lambda x: x[x > 1], (X,), True),
    ],
)
def test_what_data_decides_is_free(target: Any, args: tuple[Any, ...], free: bool) -> None:
    assert known(target, *args).free == free


def test_it_hands_down_that_data_decided() -> None:
    chosen = Known(3, given=True, free=True, about="a shape")
    assert known(torch.add, X, 3, used=(DATA, chosen)).free


def test_what_a_branch_is_about() -> None:
    assert known(getattr, X, "shape").about == "a shape"
    assert known(getattr, X, "dtype").about == "a dtype"
    argument = Known(3, given=True, free=False, about="argument 'n'")
    assert known(int, 3, used=(argument,)).about == "argument 'n'"
    assert known(int, 3, used=()).about == "the state of the model"


def test_of_inputs_without_values_only_shapes_are_computed() -> None:
    found = known(torch.zeros, 2, inputs=(X.to("meta"),))
    assert found.value.is_meta


# ------------------------------------------------------------------ questions
def node(kind: str = "call_function", target: Any = torch.relu, name: str = "relu") -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    if kind == "placeholder":
        return x
    return graph.create_node(kind, target, () if kind == "get_attr" else (x,), name=name)


def ask(questions: Questions, about: fx.Node, what: Known) -> Any:
    value = questions.value(about, what, ROOT)
    if value:
        pass  # here Python branches
    return value


def test_a_shape_is_told_and_noted_with_the_line_that_asks() -> None:
    questions, n = Questions([(2, 3)]), node()
    assert ask(questions, n, Known(3, True, False, "a shape")) == 3
    assert questions.asked == {n}
    (note,) = questions.notes
    assert note.startswith("forward branches on a shape at ")
    assert "test_known.py:" in note
    assert note.endswith("traced for inputs of shape [(2, 3)]")


def test_what_the_model_itself_decides_leaves_no_note() -> None:
    questions = Questions([])
    assert ask(questions, node(), Known(3, False, False, "the state of the model")) == 3
    assert questions.notes == []
    assert questions.asked == set()


def test_what_was_only_looked_at_by_torch_is_taken_back() -> None:
    questions, n = Questions([]), node()
    ask(questions, n, Known(3, True, False, "a shape"))
    questions.take_back({n})
    assert questions.notes == []
    ask(questions, n, Known(3, True, False, "a shape"))
    questions.keep()
    questions.take_back({n})
    assert len(questions.notes) == 1


def test_a_line_that_only_asserts_leaves_no_note() -> None:
    questions, n = Questions([]), node()
    assert questions.value(n, Known(3, True, False, "a shape"), ROOT) == 3
    assert questions.notes == []
    assert questions.asked == {n}


@pytest.mark.parametrize("what", [DATA, Known(3, True, True, "a shape")])
def test_data_is_never_told(what: Known) -> None:
    with pytest.raises(TraceError, match=r"value of node 'relu', which depends on the data of a t"):
        Questions([]).value(node(), what, ROOT)


def test_nor_what_was_learned_but_flags_are() -> None:
    weight = Known(ROOT.weight, False, False, "the state of the model")
    with pytest.raises(TraceError, match="for every input, or for every model"):
        Questions([]).value(node("get_attr", "weight", "weight"), weight, ROOT)
    flag = Known(torch.tensor(True), False, False, "the state of the model")
    questions = Questions([])
    assert bool(ask(questions, node("get_attr", "flag", "flag"), flag))
    assert len(questions.asked) == 1


def test_a_length_that_data_decides_is_not_told() -> None:
    with pytest.raises(TraceError, match="needs the length of node 'relu'"):
        Questions([]).length(node(), Known(X, True, True, "a shape"))


@pytest.mark.parametrize(
    ("target", "value", "noted"),
    [
        (torch.relu, X, True),  # as many as its input has rows
        (torch.split, (X, X), True),
        (torch.max, (X, X), False),  # always two
    ],
)
def test_a_length_is_noted_where_another_input_has_another(
    target: Any, value: Any, noted: bool
) -> None:
    questions = Questions([])
    found = questions.length(node(target=target), Known(value, True, False, "a shape"))
    assert found is value
    assert bool(questions.notes) == noted
