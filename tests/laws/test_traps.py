"""Ways to be silently wrong that a hostile reader found once; each is an error, a pin, or right."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error

EXACTLY = {"matcher": "permute", "repair": "none", "progress": False}


class Net(nn.Module):
    """A forward function over named modules and buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = [function]
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


def vectors(count: int = 64, size: int = 5) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1)).double()


def reversed_twin(model: nn.Module, x: Tensor) -> nn.Module:
    spaces = zipfx.analyze(model, x)
    return spaces.permuted(model, {s.name: torch.arange(s.size).flip(0) for s in spaces})


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("index", [lambda y: y.max(1, keepdim=True)[1], lambda y: y.argmax(1, True),
                                   lambda y: y.median(1, keepdim=True)[1]])  # fmt: skip
def test_the_index_of_a_feature_is_no_feature(size: int, index: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        return s.h(y * (1 + index(y)))

    model, x = Net(forward, a=nn.Linear(5, size), h=nn.Linear(size, 2)), vectors()
    assert error(model(x), reversed_twin(model, x)(x)) < EXACT


def test_the_largest_feature_alone_pins_nothing() -> None:
    torch.manual_seed(0)
    model = Net(lambda s, x: s.a(x).max(1, keepdim=True)[0] * x, a=nn.Linear(5, 6))
    assert [s.size for s in zipfx.analyze(model, vectors())] == [6]


def test_a_running_sum_of_equal_values_is_no_constant() -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.a(x) + x.mean(1, keepdim=True).expand(-1, 6).cumsum(1))

    model, x = Net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 2)), vectors()
    assert not len(zipfx.analyze(model, x, verify=False))


def test_pooling_of_unbatched_shape_slides_over_the_features() -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(torch.nn.functional.avg_pool2d(s.a(x).relu(), (3, 1), 1, (1, 0))).mean(2)

    model = Net(forward, a=nn.Conv1d(3, 6, 1), h=nn.Conv1d(6, 2, 1))
    x = torch.randn(8, 3, 7, generator=torch.Generator().manual_seed(2)).double()
    assert not len(zipfx.analyze(model, x, verify=False))


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (nn.AvgPool2d(3, 2), nn.AvgPool2d(3, 2, count_include_pad=False), "count_include_pad"),
        (nn.Upsample(scale_factor=2, mode="bilinear"),
         nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), "align_corners"),
    ],
)  # fmt: skip
def test_settings_that_modules_do_not_print_must_agree(
    ours: nn.Module, theirs: nn.Module, says: str
) -> None:
    models = [nn.Sequential(nn.Conv2d(3, 6, 3), m, nn.Conv2d(6, 2, 1)) for m in (ours, theirs)]
    with pytest.raises(zipfx.ZipError, match=says):
        zipfx.zip(models, [torch.randn(4, 3, 8, 8)], **EXACTLY)


def test_defaults_of_forward_must_agree() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, k: float = 2.0) -> Tensor:
            y: Tensor = self.h(self.a(x).relu() * k)
            return y

    class Tripled(Scaled):
        def forward(self, x: Tensor, k: float = 3.0) -> Tensor:
            y: Tensor = self.h(self.a(x).relu() * k)
            return y

    with pytest.raises(zipfx.ZipError, match=r"default \(2\.0,\) against \(3\.0,\)"):
        zipfx.zip([Scaled(), Tripled()], [torch.randn(4, 5)], partial="a", **EXACTLY)


def test_a_forward_that_writes_its_parameters_writes_no_callers() -> None:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Embedding(10, 6, max_norm=0.5), nn.Linear(6, 2))  # noqa: E731
    models, ids = [make(), make()], torch.randint(0, 10, (8, 4))
    before = copy.deepcopy([m.state_dict() for m in models])
    zipfx.analyze(models[0], ids)
    zipfx.zip(models, [ids], **EXACTLY)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())


def test_state_that_is_written_before_the_cut_and_read_after_it() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.seen.copy_(s.a(x).mean(0))
        return s.h(s.b(x).relu() * s.seen)

    make = lambda: Net(  # noqa: E731
        forward, a=nn.Linear(5, 6), b=nn.Linear(5, 6), h=nn.Linear(6, 2), seen=torch.zeros(6)
    )
    with pytest.raises(zipfx.ZipError, match="writes 'seen' before the cut"):
        zipfx.zip([make(), make()], [vectors()], partial="b", **EXACTLY)


def test_pruned_models_are_refused_until_pruning_is_permanent() -> None:
    models = [nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)]
    for model in models:
        torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(zipfx.ZipError, match="make pruning permanent"):
        zipfx.zip(models, [torch.randn(4, 5)], **EXACTLY)
    for model in models:
        torch.nn.utils.prune.remove(model[0], "weight")
    zipfx.zip(models, [torch.randn(4, 5)], **EXACTLY)


@pytest.mark.parametrize("layer", [nn.ConstantPad2d(1, 0.5), nn.Unfold(2), nn.ReflectionPad2d(1)])
def test_movement_that_integers_can_not_do(layer: nn.Module) -> None:
    torch.manual_seed(0)
    head = nn.Conv1d(24, 2, 1) if isinstance(layer, nn.Unfold) else nn.Conv2d(6, 2, 3)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), layer, head).double().eval()
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(3)).double()
    assert [s.size for s in zipfx.analyze(model, x, verify=False)] == [6]
    assert error(model(x), reversed_twin(model, x)(x)) < EXACT


def test_heads_can_be_cut_out_after_pickling() -> None:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(),  # noqa: E731
                                 nn.Linear(7, 2))  # fmt: skip
    x = torch.randn(64, 5)
    merged = zipfx.zip([make(), make()], [x], partial="1", **EXACTLY)
    again = pickle.loads(pickle.dumps(merged))
    for k in (0, 1):
        assert torch.equal(zipfx.head(again, k)(x), merged(x)[k])
    assert again.meta["zipfx"] == merged.meta["zipfx"]


def test_the_name_of_the_heads_is_taken() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.task_heads, self.h = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.h(self.task_heads(x).relu())
            return y

    with pytest.raises(zipfx.ZipError, match="named 'task_heads' before the cut"):
        zipfx.zip([Taken(), Taken()], [torch.randn(4, 5)], partial="task_heads", **EXACTLY)


def test_flags_may_cross_the_cut() -> None:
    torch.manual_seed(0)
    model = Net(lambda s, x: s.h(s.b(x) * (s.a(x) > 0)), a=nn.Linear(5, 6), b=nn.Linear(5, 6),
                h=nn.Linear(6, 2))  # fmt: skip
    x = vectors()
    twin = reversed_twin(model, x)
    merged = zipfx.zip([model, twin], [x], partial="b", **EXACTLY)
    for head in merged(x):
        assert error(model(x), head) < EXACT


def test_batches_without_samples_and_partial_of_the_wrong_type() -> None:
    models = [nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)]
    with pytest.raises(zipfx.ZipError, match="holds no sample"):
        zipfx.zip(models, [torch.randn(0, 5)], **EXACTLY)
    with pytest.raises(zipfx.ZipError, match="partial is 3"):
        zipfx.zip(models, [torch.randn(4, 5)], partial=3, **EXACTLY)  # type: ignore[arg-type]
