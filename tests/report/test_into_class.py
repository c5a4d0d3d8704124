"""A merge back in the class of a model: its weights, its ties, and what it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import zipfx
from tests.helpers.laws import error, unharmed
from tests.helpers.models import NETS, Net
from zipfx import ZipError

X = torch.randn(32, 4, dtype=torch.float64)


class Small(nn.Module):
    """With something that no graph has, a constant of the class, and a count that is kept."""

    def __init__(self, seed: int = 0, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, outputs)
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=False)
        self.register_buffer("count", torch.tensor(seed))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.h(self.b(self.a(x).relu()).relu()) * self.factor
        return z

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def pair() -> list[nn.Module]:
    return [Small(0), Small(1)]


def merge(models: list[nn.Module], **options: Any) -> Any:
    return zipfx.zip(models, [X], progress=False, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_a_full_zip_of_every_net(net: Net) -> None:
    models = [net.build(0), net.build(1)]
    merged = zipfx.zip(models, net.batches(2), batch_to_args=tuple, progress=False)
    model = unharmed([*models, merged], lambda: zipfx.to_model(merged, like=models[0]))
    assert type(model) is type(models[0])
    x = net.inputs(5)
    with torch.no_grad():
        assert error(merged(*copy.deepcopy(x)), model(*copy.deepcopy(x))) < 1e-12
    assert list(model.state_dict()) == list(models[0].state_dict())


@pytest.mark.parametrize("front", ["symbolic", "export"])
def test_it_has_what_the_class_has(front: str) -> None:
    models = pair()
    models[0].b.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    models[0].train()
    merged = merge(models, front=front)
    model: Any = zipfx.to_model(merged, like=models[0])
    assert torch.equal(model.generate(X), merged(X).argmax(-1))
    assert model.training
    assert len(model.b._forward_hooks) == 1
    assert model.a.weight is not merged.a.weight
    assert not any(p is q for p in model.parameters() for m in models for q in m.parameters())


def test_of_a_partial_zip_one_for_each_head_with_the_trunk_shared() -> None:
    models: list[nn.Module] = [Small(0), Small(1, outputs=5)]
    merged = merge(models, partial="b")
    found: list[Any] = [zipfx.to_model(merged, like=m, head=k) for k, m in enumerate(models)]
    for model, y in zip(found, merged(X), strict=True):
        assert error(y, model(X)) < 1e-12
    assert found[0].a.weight is found[1].a.weight is merged.a.weight
    assert found[0].h.weight is not found[1].h.weight


def test_where_the_class_has_no_place_it_says_so() -> None:
    class Stream(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).relu()
            z: Tensor = self.h(y + self.b(y))
            return z

    models: list[nn.Module] = [Stream(0), Stream(1)]
    merged = merge(models, partial="a", matcher="permute")
    assert zipfx.to_model(merged, like=models[0], head=0)
    says = (
        r"head 1 puts the features of node head1_relu in its own order .* choose a cut after which"
    )
    with pytest.raises(ZipError, match=says):
        zipfx.to_model(merged, like=models[1], head=1)


class Tied(Small):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.b.weight = nn.Parameter(torch.randn(8, 8).double())
        self.c = nn.Linear(8, 8).double()
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.h(self.c(self.b(self.a(x)).relu()).relu())
        return z


def test_ties_stay_or_are_an_error() -> None:
    models: list[nn.Module] = [Tied(0), Tied(1)]
    model: Any = zipfx.to_model(merge(models), like=models[0])
    assert model.b.weight is model.c.weight
    merged = merge(models, partial="b", matcher="identity")
    with pytest.raises(ZipError, match=r"'b.weight' and 'c.weight' are one weight in Tied, "):
        zipfx.to_model(merged, like=models[0], head=0)


def test_computed_weights_are_computed_again() -> None:
    models = pair()
    for model in models:
        parametrizations.weight_norm(model.b)  # type: ignore[arg-type]
    merged = merge(models)
    assert error(merged(X), zipfx.to_model(merged, like=models[0])(X)) < 1e-12


def test_settings_that_no_input_need_show_are_compared() -> None:
    def net(bound: float = 10, eps: float = 1e-5) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8, eps=eps), nn.Hardtanh(-bound, bound), nn.Linear(8, 3),
        ).double()  # fmt: skip

    merged = merge([net(), net()], matcher="identity")
    assert zipfx.to_model(merged, like=net())
    with pytest.raises(ZipError, match=r"module '2' has max_val=100.*, and max_val=10"):
        zipfx.to_model(merged, like=net(100))
    with pytest.raises(ZipError, match=r"module '1' has eps=1e-06, and eps=1e-05 in the merge"):
        zipfx.to_model(merged, like=net(eps=1e-6))


def test_it_is_compared_with_the_merge() -> None:
    models = pair()
    merged = merge(models)
    other: Any = Small(0)
    other.factor.fill_(0.25)
    with pytest.raises(ZipError, match="does not compute what the merge computes"):
        zipfx.to_model(merged, like=other)
    merged.meta.pop("zipfx")
    with pytest.raises(ZipError, match="does not say what it was traced with: give example_inputs"):
        zipfx.to_model(merged, like=models[0])
    assert zipfx.to_model(merged, like=models[0], example_inputs=X)
    with pytest.raises(ZipError, match=r"the model can not be run to compare them: "):
        zipfx.to_model(merged, like=models[0], example_inputs=X[:, :2])


def test_what_does_not_fit_is_an_error() -> None:
    models = pair()
    full, partial = merge(models), merge(models, partial="b")
    for like, head, merged, says in [
        (models[0], 0, full, "there is no head 0: a full zip is one model"),
        (models[0], None, partial, r"head is None: a partial zip is one model for each of 2 heads"),
        (models[0], 2, partial, r"head is 2: .*give one of 0 to 1"),
        (nn.Linear(4, 3).double(), None, full, "the merge has no bias, weight, which Linear has"),
        (
            Small(0, outputs=4),
            None,
            full,
            r"'h.weight' is torch.float64 \(3, 8\) in the",
        ),
        (Small(0).float(), None, full, r"in the merge and torch.float32"),
        (3, None, full, "like is a int, not a torch.nn.Module"),
        (models[0], None, models[0], "merged is a Small, and no result of zipfx.zip"),
    ]:
        with pytest.raises(ZipError, match=says):
            zipfx.to_model(merged, like=like, head=head)
    assert isinstance(full, fx.GraphModule)
