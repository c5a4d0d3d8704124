"""Which nodes of a head work on merged features, and which weights take U for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.helpers.analysed import analysed
from tests.helpers.blocks import Net, data
from zipfx import Matching
from zipfx.merge.absorb import Absorber
from zipfx.merge.moved import Moved

SIZE = 6


def absorber(
    head: Callable[[Any, Tensor], Tensor], x: Tensor | None = None, **layers: Any
) -> Absorber:
    """Behind the cut at layer a, whose 6 features are in reverse in the merge."""
    model = Net(lambda s, x: head(s, s.a(x)), **layers)
    found = analysed(model, data(3) if x is None else x)
    nodes = [n.name for n in found.module.graph.nodes]
    found = found.cut(nodes.index("a"))
    flipped = torch.arange(SIZE - 1, -1, -1)
    reverse = Matching(torch.cat([torch.arange(SIZE), flipped]), (SIZE, SIZE), SIZE)
    return Absorber(found.module, found.facts, Moved(found.grouping, {0: reverse}, 1))


def maps(of: Absorber, name: str, *sources: str) -> dict[int, Any] | None:
    at = {n.name: i for n, i in of.at.items()}
    return of.maps(at[name], [at[s] for s in sources], set())


def linear(out: int = 2, size: int = SIZE) -> nn.Linear:
    return nn.Linear(size, out)


def test_a_weight_that_reads_merged_features_takes_their_unmerge() -> None:
    of = absorber(lambda s, y: s.h(y.relu()), a=linear(SIZE, 3), h=linear())
    assert maps(of, "relu", "a") == {}
    found = maps(of, "h", "relu")
    assert found is not None
    ((key, (move,)),) = found.items()
    assert key == of.named["h.weight"]
    weight = torch.arange(2.0 * SIZE).reshape(2, SIZE).double()
    assert torch.equal(move.apply(weight), weight.flip(1))


def test_nothing_is_to_do_for_what_reads_no_merged_features() -> None:
    of = absorber(lambda s, y: s.h(y.relu()), a=linear(SIZE, 3), h=linear())
    assert maps(of, "relu") is None


def test_a_weight_that_may_take_no_unmerge_is_left() -> None:
    of = absorber(lambda s, y: s.h(y), a=linear(SIZE, 3), h=linear())
    at = {n.name: i for n, i in of.at.items()}
    assert of.maps(at["h"], [at["a"]], {of.named["h.weight"]}) is None


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("relu", lambda s, y: s.h(y.relu())),
        ("mul", lambda s, y: s.h(y * 2)),
        ("mul", lambda s, y: s.h(y * torch.ones(SIZE).double())),
    ],
)
def test_what_treats_all_features_alike_stays_merged(name: str, head: Any) -> None:
    of = absorber(head, a=linear(SIZE, 3), h=linear())
    assert maps(of, name, "a") == {}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("output", lambda s, y: y),
        ("n", lambda s, y: s.h(s.n(y))),  # a norm with an affine of its own
        # sums over the features of a model, which may be none or several in the merge
        ("softmax", lambda s, y: s.h(F.softmax(y, 1))),
        ("layer_norm", lambda s, y: s.h(F.layer_norm(y, (SIZE,)))),
        ("mul", lambda s, y: s.h(y * torch.arange(SIZE))),  # not the same for all features
        ("flip", lambda s, y: s.h(y + y.flip(1))),  # or its sum with them
        ("add", lambda s, y: s.h(y + s.own)),  # learned
    ],
)
def test_what_does_not_is_given_the_features_of_its_model(name: str, head: Any) -> None:
    own = nn.Parameter(torch.zeros(SIZE))
    of = absorber(head, a=linear(SIZE, 3), h=linear(), n=nn.LayerNorm(SIZE), own=own)
    assert maps(of, name, "a") is None or maps(of, "add", "a", name) is None


@fx.wrap  # type: ignore[misc]
def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) @ w


def test_a_weight_that_is_read_both_ways_takes_no_unmerge() -> None:
    """Its columns read features, and give some: these would come out in another order."""
    of = absorber(lambda s, y: s.h(there_and_back(y, s.w)), a=linear(SIZE, 3), h=linear(),
                  w=nn.Parameter(torch.zeros(4, SIZE)))  # fmt: skip
    assert maps(of, "there_and_back", "a") is None


def test_what_a_node_hands_on() -> None:
    of = absorber(lambda s, y: s.h(y.relu()), a=linear(SIZE, 3), h=linear())
    at = {n.name: i for n, i in of.at.items()}
    assert of.passes_on(at["relu"]) == (True, False)
    assert of.passes_on(at["a"]) == (False, True)
    assert of.passes_on(at["h"]) == (False, False)


def test_columns_of_a_flattened_map_move_in_runs() -> None:
    of = absorber(lambda s, y: s.h(y.flatten(1)), data(3, 2, 2),
                  a=nn.Conv2d(3, SIZE, 1), h=nn.Linear(4 * SIZE, 2))  # fmt: skip
    found = maps(of, "h", "flatten")
    assert found is not None
    (moves,) = found.values()
    weight = torch.arange(4.0 * SIZE).double()[None]
    for move in moves:
        weight = move.apply(weight)
    assert torch.equal(weight.view(SIZE, 4), torch.arange(4.0 * SIZE).view(SIZE, 4).flip(0))
