"""How a merged model is called: as the model is, whatever batches held beside its inputs."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, permuted
from zipfx import ZipError
from zipfx.model.calls.arguments import in_order, spelled


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def logits(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.relu(self.a(x))
        y = y if scale is None else y * scale[:, None]
        return self.h(torch.relu(self.b(y)))


class Loss(Base):
    """As the models of transformers: with labels there is one more output."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.logits(x)
        loss = {} if labels is None else {"loss": F.cross_entropy(y, labels)}
        return {**loss, "logits": y}


class OtherName(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        found = self.logits(x)
        return found if y is None else (F.mse_loss(found, y), found)


class OnlyTheLoss(Base):
    def forward(self, x: Tensor, next_sentence_label: Tensor | None = None) -> Tensor:
        y = self.logits(x)
        return y if next_sentence_label is None else F.cross_entropy(y, next_sentence_label)


class Keywords(Base):
    """Keyword-only arguments, a default, and anything else."""

    def forward(self, x: Tensor, *, scale: Tensor, twice: bool = False, **others: Any) -> Tensor:
        y = self.logits(x, scale)
        y = y * 2 if twice else y
        return y if "shift" not in others else y + others["shift"][:, None]


class Positions(Base):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.logits(inputs[0], inputs[1])


class Masked(Base):
    """A mask makes a difference, and there is none that stands for its absence."""

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = True) -> Tensor:
        y = self.logits(x)
        y = y if mask is None else y.masked_fill(mask[:, None], 0)
        return y if flag else -y


def pair(net: type[Base]) -> list[Base]:
    torch.manual_seed(0)
    return [net().double().eval(), net().double().eval()]


def batches(**entries: Callable[[], Any]) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{name: make() for name, make in entries.items()} for _ in range(3)]


def rows() -> Tensor:
    return torch.randn(16, 4).double()


def classes() -> Tensor:
    return torch.randint(0, 3, (16,))


def numbers() -> Tensor:
    return torch.rand(16).double() + 0.5


@pytest.mark.sweep
@pytest.mark.parametrize("partial", [None, "a"])
@pytest.mark.parametrize(
    ("net", "entries", "left_out"),
    [
        (Loss, {"x": rows, "labels": classes}, "labels"),
        (OtherName, {"x": rows, "y": lambda: torch.zeros(16, 3).double()}, "y"),
        (OnlyTheLoss, {"x": rows, "next_sentence_label": classes}, "next_sentence_label"),
        (Loss, {"x": rows, "idx": classes, "file": lambda: ["a"] * 16}, "file"),
        (Keywords, {"x": rows, "scale": numbers, "labels": classes}, "labels"),
    ],
)
def test_what_only_batches_hold_is_left_out(
    net: type[Base], entries: dict[str, Any], left_out: str, partial: str | None
) -> None:
    model = pair(net)[0]
    data = batches(**entries)
    inputs = {k: v for k, v in data[0].items() if k in ("x", "scale")}
    twin = permuted_by_name(model, inputs)
    merged = zipfx.zip(
        [model, twin], data, partial=partial, matcher="permute", repair="refit", progress=False
    )
    assert any(repr(left_out) in note and "left out" in note for note in merged.meta["zipfx"].notes)
    with torch.no_grad():
        found, expected = merged(**inputs), model(**inputs)
    for y in (found,) if partial is None else found:
        assert error(expected, y) < EXACT
    assert left_out not in inspect.signature(merged.forward).parameters or left_out in str(
        inspect.signature(net.forward)
    )


def permuted_by_name(model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    spaces = zipfx.analyze(model, inputs, verify=False)
    assert sorted(s.size for s in spaces) == [6, 8]
    return spaces.permuted(model, spaces.random_permutations(1))


def test_a_label_that_is_passed_to_the_merge_is_not_ignored() -> None:
    merged = zipfx.zip(pair(Loss), batches(x=rows, labels=classes), progress=False)
    with pytest.raises(ZipError, match="'labels' was None when the models were traced"):
        merged(x=rows(), labels=classes())


def test_a_required_label_stays_an_input() -> None:
    class Needs(Base):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.logits(x) * labels[:, None]

    models = pair(Needs)
    data = batches(x=rows, labels=classes)
    merged = zipfx.zip(models[:1] * 2, data, matcher="identity", repair="none", progress=False)
    with torch.no_grad():
        assert error(models[0](**data[0]), merged(**data[0])) < EXACT


@pytest.mark.parametrize("wrap", [dict, UserDict], ids=["dict", "other mapping"])
def test_keywords_of_every_kind(wrap: Any) -> None:
    models = pair(Keywords)
    data = [wrap(b) for b in batches(x=rows, scale=numbers, shift=numbers)]
    model, inputs = models[0], dict(data[0])
    twin = permuted_by_name(model, inputs)
    merged = zipfx.zip([model, twin], data, matcher="permute", repair="none", progress=False)
    with torch.no_grad():
        assert error(model(**inputs), merged(**inputs)) < EXACT
    with pytest.raises(ZipError, match=r"'shift' was given when .*call it with shift=\.\.\."):
        merged(x=inputs["x"], scale=inputs["scale"])
    with pytest.raises(ZipError, match="'twice' was False when the models were traced"):
        merged(**inputs, twice=True)


def test_positions_of_any_number() -> None:
    models, (x, scale) = pair(Positions), (rows(), numbers())
    options: dict[str, Any] = {"batch_to_args": tuple, "repair": "none", "progress": False}
    twin = permuted(models[0], (x, scale))
    merged = zipfx.zip([models[0], twin], [(x, scale)] * 4, matcher="permute", **options)
    with torch.no_grad():
        assert error(models[0](x, scale), merged(x, scale)) < EXACT


def test_a_mask_stays_an_input_that_is_asked_for() -> None:
    models = pair(Masked)
    data = batches(x=rows, mask=lambda: torch.rand(16) > 0.5)
    same = [models[0]] * 2
    merged = zipfx.zip(same, data, matcher="identity", repair="none", progress=False)
    with torch.no_grad():
        assert error(models[0](**data[0]), merged(**data[0])) < EXACT
    with pytest.raises(ZipError, match="'mask' was given when the models were traced"):
        merged(data[0]["x"])
    with pytest.raises(ZipError, match="'flag' was True when the models were traced"):
        merged(**data[0], flag=False)
    without = zipfx.zip(same, [b["x"] for b in data], matcher="identity", progress=False)
    with torch.no_grad():
        assert error(models[0](data[0]["x"]), without(data[0]["x"])) < EXACT
    with pytest.raises(ZipError, match="'mask' was None when the models were traced"):
        without(**data[0])


def test_what_makes_no_difference_is_not_asked_for() -> None:
    """The graph does without it as the model does."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.a(x)
            return self.h(F.scaled_dot_product_attention(y, y, y, mask))

    model = Attention()
    data = [{"x": torch.randn(2, 5, 4), "mask": torch.ones(5, 5).tril().bool()}] * 2
    merged = zipfx.zip([model] * 2, data, matcher="identity", repair="none", progress=False)
    with torch.no_grad():
        for given in (data[0], {"x": data[0]["x"]}):
            assert error(model(**given), merged(**given)) < 1e-6


@pytest.mark.parametrize("example", ["dict", "tuple"])
def test_examples_and_batches_must_agree(example: str) -> None:
    models, x, mask = pair(Masked), rows(), torch.rand(16) > 0.5
    given: Any = {"x": x} if example == "dict" else (x,)
    data = [{"x": x, "mask": mask}]
    with pytest.raises(ZipError, match="batches hold 'mask' and example_inputs do not"):
        zipfx.zip(models, data, example_inputs=given, progress=False)
    both: Any = data[0] if example == "dict" else (x, mask)
    merged = zipfx.zip(models, data, example_inputs=both, progress=False)
    assert merged(**data[0]).shape == (16, 3)


def test_batches_that_fit_nothing_name_what_they_hold() -> None:
    says = r"missing a required argument: 'x' \(it takes x, mask, flag; the batch has mask\)"
    with pytest.raises(ZipError, match=says):
        zipfx.zip(pair(Masked), batches(mask=classes, file=numbers), progress=False)


def test_analyze_takes_arguments_by_name() -> None:
    model, inputs = pair(Keywords)[0], {"x": rows(), "scale": numbers()}
    assert sorted(s.size for s in zipfx.analyze(model, inputs)) == [6, 8]
    with pytest.raises(ZipError, match=r"do not fit the model's forward: missing .*'scale'"):
        zipfx.analyze(model, {"x": rows()})


def test_values_and_names_belong_together() -> None:
    def forward(x: Any, *more: Any, y: Any, z: Any = 3, **others: Any) -> None:
        """Takes anything."""

    values, names = in_order(forward, [1, 2, 3], {"y": 4, "w": 5})
    assert (values, names) == ((1, 2, 3, 4, 3, 5), ("y", "z", "w"))
    found = [(a.name, a.default, a.by_name) for a in spelled(forward, values, names)]
    assert found == [
        ("x", (), False), ("more_0", (), False), ("more_1", (), False),
        ("y", (), True), ("z", (3,), True), ("w", (), True),
    ]  # fmt: skip
