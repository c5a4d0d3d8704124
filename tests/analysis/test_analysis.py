"""What an analysis finds where little can be exchanged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import unharmed
from zipfx import ZipError


class Forward(nn.Module):
    """A module whose forward is a function of (module, input)."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def spaces_of(model: nn.Module, inputs: Any) -> list[int]:
    found: list[int] = []
    raised = unharmed([model], lambda: found.extend(s.size for s in zipfx.analyze(model, inputs)))
    if isinstance(raised, Exception):
        raise raised
    return found


@pytest.mark.parametrize(
    ("forward", "inputs"),
    [
        (lambda m, x: x, torch.randn(2, 3)),
        (lambda m, x: (x, {"same": x}), torch.randn(2, 3)),
        (lambda m, x: torch.relu(x) * 2, torch.randn(2, 3)),
        (lambda m, x: (x * 2) // 3, torch.arange(6).reshape(2, 3)),
        (lambda m, x: x.bool() & (x > 1), torch.arange(6).reshape(2, 3)),
        (lambda m, x: x + 1, torch.tensor(2.0)),
        (lambda m, x: x.expand(3).sum(), torch.tensor(2.0)),
        (lambda m, x: sum(x) / len(x), [torch.randn(2, 3), torch.randn(2, 3)]),
        (lambda m, x: x.relu(), torch.randn(0, 3)),
        (lambda m, x: 3, torch.randn(2, 3)),
        (lambda m, x: x.shape, torch.randn(2, 3)),
    ],
    ids="""input inputs bare integers booleans scalar expanded list empty number
        shape""".split(),
)
def test_nothing_to_exchange_is_an_empty_map(forward: Any, inputs: Any) -> None:
    assert spaces_of(Forward(forward), inputs) == []


@dataclass(frozen=True)
class Pair:
    """Of tensors, as an input or an output."""

    first: Tensor
    second: Tensor | None = None


@dataclass
class Named(OrderedDict[str, Any]):
    """An output as in transformers: a dataclass that is also a dict of what is not None."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda y, z: Pair(y, z), lambda out: out.second),
        (lambda y, z: {"deep": [Pair(y), Pair(z)]}, lambda out: out["deep"][1].first),
        (lambda y, z: OrderedDict(y=y, z=z), lambda out: out["z"]),
        (lambda y, z: Named(loss=y, logits=z), lambda out: out.logits),
    ],
    ids=["dataclass", "deep", "ordered", "named"],
)
@pytest.mark.parametrize("partial", [None, "net.0"])
def test_outputs_keep_their_type_and_are_pinned(wrap: Any, get: Any, partial: str | None) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.net(x)
        return wrap(y, m.out(y.relu()))

    model = Forward(forward, net=mlp(), out=nn.Linear(2, 3)).eval()
    x = torch.randn(8, 3)
    assert spaces_of(model, x) == [8]
    merged = zipfx.zip([model, model], [x], partial=partial, repair="none", progress=False)
    found = merged(x) if partial is None else zipfx.head(merged, 1)(x)
    assert type(found) is type(model(x))
    assert torch.allclose(get(found), get(model(x)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def test_inputs_of_other_kinds_are_fine_where_the_model_takes_them() -> None:
    embedded = nn.Sequential(nn.Embedding(5, 8), nn.ReLU(), nn.Linear(8, 2))
    assert spaces_of(embedded, torch.arange(4)) == [8]
    assert spaces_of(embedded, torch.tensor(3)) == [8]  # a scalar
    assert spaces_of(mlp(), torch.randn(3)) == [8]  # no batch
    assert spaces_of(mlp(), torch.randn(0, 3)) == [8]  # an empty one


def test_a_dataclass_as_input() -> None:
    def forward(m: Any, pair: Pair) -> Tensor:
        return m.net(pair.first.add_(pair.second))

    model, pair = Forward(forward, net=mlp()).eval(), Pair(torch.randn(8, 3), torch.randn(8, 3))
    x, kept = pair.first, pair.first.clone()
    assert spaces_of(model, pair) == [8]
    batches, options = [pair], {"batch_to_args": lambda pair: pair, "progress": False}
    merged = zipfx.zip([model, model], batches, matcher="permute", repair="none", **options)
    assert torch.equal(x, kept)
    assert torch.allclose(merged(Pair(x.clone(), pair.second)), model(Pair(x.clone(), pair.second)))


class ByName(nn.Module):
    """Arguments that must be named, with defaults and without, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float) -> Tensor:
        return self.net(x if mask is None else x * mask) * scale


def test_arguments_that_must_be_named() -> None:
    model, batch = ByName().eval(), {"x": torch.randn(8, 3), "scale": 2.0}
    merged = zipfx.zip([model, model], [batch], repair="none", progress=False)
    assert torch.allclose(merged(**batch), model(**batch))


def single(m: nn.Module, x: Tensor) -> Tensor:
    if len(x) != 1:
        raise ValueError("one sample at a time, please")
    return m.net(x[0])


def test_a_model_for_single_samples() -> None:
    model = Forward(single, net=mlp())
    assert spaces_of(model, torch.randn(1, 3)) == [8]
    with pytest.raises(ZipError, match=r"one sample at a time, please\. Move"):
        zipfx.analyze(model, torch.randn(2, 3))
    says = (
        r"can not trace Forward at .*test_analysis\.py:\d+ \(raise ValueError.*one sample at a time"
    )
    with pytest.raises(ZipError, match=says):
        zipfx.zip([model, Forward(single, net=mlp())], [torch.randn(4, 3)], progress=False)


@pytest.mark.parametrize("data", [[torch.randn(0, 3)], [torch.randn(0, 3), torch.randn(0, 3)]])
def test_batches_that_are_all_empty(data: list[Tensor]) -> None:
    with pytest.raises(ZipError, match="the calibration data holds no sample"):
        zipfx.zip([mlp(), mlp()], data, progress=False, repair="none")


def test_an_empty_batch_among_others_does_not_matter() -> None:
    data = [torch.randn(8, 3), torch.randn(0, 3)]
    models = [mlp(), mlp()]
    merged = zipfx.zip(models, data, progress=False, repair="none")
    same = zipfx.zip(models, data[:1], progress=False, repair="none")
    assert torch.equal(merged(data[0]), same(data[0]))


def test_models_without_parameters_zip_to_one_of_them() -> None:
    x = torch.randn(4, 3)
    merged = zipfx.zip([Forward(lambda m, x: x * 2) for _ in range(2)], [x], progress=False)
    assert torch.equal(merged(x), x * 2)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (torch.randn(2, 4), r"fails on example_inputs.*Pass inputs that the model"),
        ("text", r"fails on example_inputs|can not trace"),
        ((), r"do not fit the model's forward: missing a required argument"),
        ((torch.randn(2, 3), 1, 2), r"do not fit the model's forward: too many positional"),
        (None, r"fails on example_inputs|can not trace"),
    ],
    ids=["width", "text", "none", "many", "None"],
)
def test_inputs_that_the_model_does_not_take(inputs: Any, says: str) -> None:
    with pytest.raises(ZipError, match=f"(?s){says}"):
        zipfx.analyze(mlp(), inputs)


@pytest.mark.parametrize(
    ("forward", "node"),
    [
        (lambda m, x: m.net(x if x.sum() > 0 else -x), "value of node 'gt'"),
        (lambda m, x: m.net(x * (1 if bool((x > 0).any()) else 2)), "value of node 'any_1'"),
        (lambda m, x: m.net(x * range(9)[int(x.argmax())]), "value of node 'argmax'"),
        (lambda m, x: [m.net(x) for _ in range(x.argmax().item())], "value of node 'item'"),
        (lambda m, x: m.net(x) if (x > 0).nonzero().shape[0] else x, "value of node 'getitem'"),
        (lambda m, x: m.net(x) if len(x[x > 0]) else x, "length of node 'getitem'"),
        (lambda m, x: m.net(x) if x.tolist()[0][0] > 0 else x, "value of node 'gt'"),
        (lambda m, x: m.net(x * float(x.max())), "value of node 'max_1'"),
        (lambda m, x: m.net(x) if 1.0 in x else x, "value of node 'x'"),
        (lambda m, x: m.net(x) if m.net[0].bias.sum() > 9 else x, "value of node 'gt'"),
    ],
    ids="compared any index range nonzero mask list float contains weight".split(),
)
def test_what_depends_on_data_is_refused_by_name(forward: Any, node: str) -> None:
    model = Forward(forward, net=mlp())
    says = (
        rf"can not trace Forward at .*test_analysis\.py:\d+ \(.*\): Python needs the {node}, which"
    )
    with pytest.raises(ZipError, match=says + " depends on the data of a tensor"):
        spaces_of(model, torch.randn(2, 3))


class Optional(nn.Module):
    """Takes a mask, or none, and whatever else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Any = None, labels: Any = None, **others: Any) -> Any:
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        if "scale" in others:
            x = x * others["scale"]
        return self.h(torch.relu(self.a(x)))


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "bn", "affine", "refit"])
@pytest.mark.parametrize("turned", [False, True])
def test_all_batches_give_the_same_arguments(repair: str, turned: bool) -> None:
    """What only some have would be ignored on others, without a word."""
    x, mask = torch.randn(8, 6), torch.ones(8)
    batches: list[dict[str, Any]] = [{"x": x}, {"x": x, "mask": mask}]
    models = [Optional().eval(), Optional().eval()]
    with pytest.raises(zipfx.ZipError, match=r"some calibration batches hold 'mask' and others"):
        zipfx.zip(models, batches[::-1] if turned else batches, repair=repair, progress=False)
    # None is none, and labels are never read
    more = [{"x": x, "mask": None, "labels": mask}, {"x": x}, {"x": x, "labels": mask}]
    zipfx.zip(models, more, repair=repair, progress=False)


def test_what_forward_takes_and_does_not_read_is_left_out() -> None:
    x, scale = torch.randn(8, 6), torch.full((8, 1), 2.0)
    models = [Optional().eval(), Optional().eval()]
    batches = [{"x": x, "scale": scale, "junk": scale, "more": {"a": 1}}] * 2
    merged: Any = zipfx.zip(models, batches, progress=False)
    note = "batches hold 'junk', 'more', which forward takes and does not read: left out"
    assert note in merged.meta["zipfx"].notes
    assert [n.target for n in merged.graph.nodes if n.op == "placeholder"][-1] == "scale"
    merged(x, scale=scale)
