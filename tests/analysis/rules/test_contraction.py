"""Products that sum over features: which parts of a weight are read by which features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.blocks import (
    ATTENTION,
    Net,
    data,
    join_heads,
    law1,
    parameter,
    projections,
    sizes,
    split_heads,
)
from tests.helpers.laws import EXACT, error


# ------------------------------------------------- completeness: parameters of heads times features
def test_stacked_experts_with_biases() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(torch.einsum("bi,ehi->beh", x, s.w1) + s.b1)
        z = torch.einsum("beh,eoh->beo", y, s.w2) + s.b2
        return torch.einsum("be,beo->bo", s.g(x).softmax(-1), z)

    first = {"w1": parameter(3, 7, 6), "b1": parameter(3, 7)}
    second = {"w2": parameter(3, 4, 7), "b2": parameter(3, 4)}
    model = Net(forward, g=nn.Linear(6, 3), **first, **second)
    assert sizes(model, data(6)) == [(3, ()), (21, (7, 7, 7))]


def test_bias_of_heads_times_dimensions() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        w = ((q + s.u[:, None]) @ k.mT).softmax(-1)
        return s.o(join_heads(w @ v))

    assert sizes(Net(forward, u=parameter(3, 4), **projections()), data(5, 8)) == ATTENTION


def test_affine_of_groups_times_channels() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.group_norm(s.a(x), 3).view(-1, 3, 2, 5, 5)
        return s.h((y * s.w).flatten(1, 2))

    model = Net(forward, a=nn.Conv2d(3, 6, 1), w=parameter(3, 2, 1, 1), h=nn.Conv2d(6, 3, 1))
    assert sizes(model, data(3, 5, 5)) == [(3, ()), (6, (2, 2, 2))]


@pytest.mark.xfail(
    strict=True, reason="dimensions of a head move only together with those of the other heads"
)
def test_memory_keys_and_values_of_every_head() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        k = torch.cat([s.keys.expand(len(x), -1, -1, -1), k], 2)
        v = torch.cat([s.values.expand(len(x), -1, -1, -1), v], 2)
        return s.o(join_heads((q @ k.mT).softmax(-1) @ v))

    memory = {"keys": parameter(3, 2, 4), "values": parameter(3, 2, 4)}
    assert set(ATTENTION) <= set(sizes(Net(forward, **memory, **projections()), data(5, 8)))


@pytest.mark.xfail(
    strict=True, reason="states of a channel move only together with those of the other channels"
)
def test_state_space_with_a_matrix_of_parameters() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        u = s.i(x)
        state = torch.zeros(x.shape[0], 5, 2, dtype=x.dtype)
        outputs = []
        for t in range(3):
            state = state * s.decay.sigmoid() + u[:, t, :, None] * s.write
            outputs.append((state * s.read).sum(-1))
        return s.o(torch.stack(outputs, 1))

    matrices = {name: parameter(5, 2) for name in ("decay", "write", "read")}
    model = Net(forward, i=nn.Linear(4, 5), **matrices, o=nn.Linear(5, 3))
    assert sizes(model, data(3, 4)) == [(5, ()), (10, (2,) * 5)]


@pytest.mark.xfail(strict=True, reason="weights alone do not make a space")
def test_low_rank_weights() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(F.linear(x, s.w + s.b @ s.a)))

    weights = {"w": parameter(7, 5), "b": parameter(7, 2), "a": parameter(2, 5)}
    assert (2, ()) in sizes(Net(forward, **weights, h=nn.Linear(7, 3)), data(5))


@pytest.mark.xfail(
    strict=True, reason="columns of a packed weight move together, though its rows read two spaces"
)
def test_cross_attention_with_packed_weights() -> None:
    """Rows 0:8 of the packed weight read the queries, rows 8:24 the keys and values."""

    def forward(s: Any, x: Tensor) -> Tensor:
        k = s.k(x)
        return s.h(s.t(s.e(x), k, k)[0])

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    ends = {"e": nn.Linear(5, 8), "k": nn.Linear(5, 8), "h": nn.Linear(8, 3)}
    assert sizes(Net(forward, **ends, t=attention), data(4, 5)).count((8, ())) == 3


def test_bilinear_module() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(s.b(F.relu(s.a(x)), F.relu(s.c(x)))))

    ends = {"a": nn.Linear(5, 4), "c": nn.Linear(5, 6), "h": nn.Linear(7, 2)}
    model = Net(forward, **ends, b=nn.Bilinear(4, 6, 7))
    assert sizes(model, data(5)) == [(4, ()), (6, ()), (7, ())]


@pytest.mark.parametrize("bag", [nn.EmbeddingBag(9, 6, mode=mode) for mode in ("mean", "max")])
def test_bags_of_embeddings(bag: nn.Module) -> None:
    model = nn.Sequential(bag, nn.Linear(6, 3)).double()
    ids = torch.randint(9, (2, 4), generator=torch.Generator().manual_seed(0))
    spaces = zipfx.analyze(model, ids, verify=False)
    assert [s.size for s in spaces] == [6]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(model(ids), twin(ids)) < EXACT


# ------------------------------------------------------------------------ features summed in pairs
TURNED = (torch.arange(6)[:, None] - torch.arange(6)[None]) % 6


@pytest.mark.parametrize(
    "product",
    [
        lambda s, y, z: F.linear(y, s.c[TURNED]),
        lambda s, y, z: (y[:, None] * s.c[TURNED]).sum(2),
        lambda s, y, z: (y[:, TURNED] * s.c).sum(2),
        lambda s, y, z: torch.einsum("bj,bij->bi", y, z[:, TURNED]),
        lambda s, y, z: F.linear(
            y, s.d[TURNED[:3, :3] % 3].transpose(1, 2).flatten(2).flatten(0, 1)
        ),
    ],
    ids="circulant summed turned bound blocks".split(),
)
def test_sums_over_pairs_keep_their_order(product: Any) -> None:
    """A circular convolution reads and makes the same features in every row, in another order."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(product(s, F.relu(s.a(x)), s.b(x))))

    weights = {"c": parameter(6), "d": parameter(3, 2, 2), "h": nn.Linear(6, 3)}
    law1(Net(forward, a=nn.Linear(5, 6), b=nn.Linear(5, 6), **weights), 5)
