"""What forward writes: nothing of a run on data reaches the result, and the merge goes on from
there as the models do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, permuted, unharmed


class Stateful(nn.Module):
    """Layers a (4 -> 8), b (8 -> 8), h (8 -> 3) and a buffer that forward writes to."""

    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("state", torch.full((8,), start))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


class Counter(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        self.steps += 1
        return self.h(y) * self.steps


class Memory(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        self.state.mul_(0.5).add_(0.5 * y.mean(0))
        return self.h(y + self.state)


class ReadByALayer(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        self.state.copy_(y.mean(0))
        return self.h(self.c(self.state) + y)


class Average(Stateful):
    """Nothing reads what it writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        self.state.lerp_(y.mean(0), 0.1)
        return self.h(y)


class BatchStatistics(Stateful):
    """F.batch_norm in training mode writes to its statistics, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.a(x), self.state, self.spread, training=True)
        return self.h(torch.relu(self.b(torch.relu(y))))


class Weights(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.mul_(0.9)
        return self.h(self.hidden(x))


class Replaced(Stateful):
    """A buffer gets another tensor in place of being written to: torch.export sees to that."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        self.state = 0.5 * self.state + y.mean(0)
        return self.h(y + self.state)


NETS: list[Callable[[], Stateful]] = [
    Counter, Memory, ReadByALayer, Average, BatchStatistics, Weights, Replaced
]  # fmt: skip
CUTS = {Weights: [None]}  # written before the cut, and used after it: an error that says so


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "bn", "affine", "refit"])
@pytest.mark.parametrize(
    ("net", "cut"), [(net, cut) for net in NETS for cut in CUTS.get(net, [None, "a", "b"])]
)
def test_the_merge_of_a_copy_begins_and_goes_on_as_the_model(
    net: Callable[[], Stateful], cut: str | None, repair: str
) -> None:
    torch.manual_seed(0)
    model = net().double().eval()
    data = [(torch.randn(16, 4).double(),) for _ in range(5)]
    twin = permuted(model, data[0])
    options = {"partial": cut, "matcher": "permute", "repair": repair}
    merged = unharmed([model, twin], lambda: merge([model, twin], data, **options))
    assert isinstance(merged, nn.Module), merged
    kept = dict(merged.named_buffers())
    for name, buffer in model.named_buffers():
        where = [n for n in kept if n == name or n.endswith(f".{name}")]
        assert where
        assert all(torch.equal(kept[n].sort()[0], buffer.sort()[0]) for n in where)
    with torch.no_grad():
        for (x,) in data:
            expected, found = model(x), merged(x)
            for y in (found,) if cut is None else found:
                assert error(expected, y) < EXACT


@pytest.mark.parametrize("repair", ["none", "bn", "refit"])
def test_the_order_of_batches_does_not_matter(repair: str) -> None:
    """Each begins with the state that the models have, so that none sees another."""
    torch.manual_seed(0)
    models = [Memory().double() for _ in range(2)]
    data = [(torch.randn(16, 4).double(),) for _ in range(5)]
    one, other = (merge(models, d, repair=repair) for d in (data, data[::-1]))
    with torch.no_grad():
        assert error(copy.deepcopy(one)(data[0][0]), copy.deepcopy(other)(data[0][0])) < 1e-10


def test_a_head_that_writes_to_its_weights_leaves_the_callers_alone() -> None:
    class Late(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            y = self.hidden(x)
            with torch.no_grad():
                self.h.weight.mul_(0.9)
            return self.h(y)

    class Plain(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            return self.h(self.hidden(x)).square()

    models = [Plain().double(), Late().double()]
    data = [(torch.randn(16, 4).double(),) for _ in range(3)]
    merged = unharmed(models, lambda: merge(models, data, partial="b", repair="refit"))
    assert isinstance(merged, nn.Module), merged
    assert torch.equal(merged.task_heads[1].h.weight, models[1].h.weight)


# ------------------------------------------------------------------ state of Python
class Called(Stateful):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.h(self.hidden(x))


class CallsMatter(Called):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.calls


class Cached(Stateful):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        y = y if self.last is None else y + self.last.mean()
        self.last = y
        return self.h(y)


@pytest.mark.parametrize(("net", "name"), [(CallsMatter, "calls"), (Cached, "last")])
def test_state_that_a_graph_can_not_hold_is_refused(net: type[Stateful], name: str) -> None:
    model, data = net(), [(torch.randn(16, 4),)]
    with pytest.raises(zipfx.ZipError, match=rf"when it is run again \(forward sets {name}\)"):
        merge([model, net()], data)
    with pytest.raises(zipfx.ZipError, match="in a buffer"):
        zipfx.analyze(model, data[0])


def test_attributes_that_make_no_difference_are_a_note() -> None:
    models, data = [Called(), Called()], [(torch.randn(16, 4),)]
    report = merge(models, data).meta["zipfx"]
    assert "forward sets calls, which the result does not" in report.notes
    assert all(vars(model).get("calls", 0) == 0 for model in models)
