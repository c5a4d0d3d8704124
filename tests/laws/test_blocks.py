"""Blocks: features that are used as a whole here and in parts there; each was once got wrong.

Law 1 where features of two blocks meet, law 3 where a merge restores blocks, and the spaces that
must be found although the blocks hide them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge
from tests.helpers.shared import shared_module

FOLDED = "restored features are counted at the example's batch size"
Size = tuple[int, tuple[int, ...]]  # of a space: its features, and the sizes of its blocks


class Net(nn.Module):
    """A forward function over named modules, parameters and buffers; random weights, float64."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = [function]
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)
        randomise(self, 0)
        self.eval().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() > 1:
            p.copy_(noise * 1.2 / math.sqrt(max(1, p[0].numel())))
        else:
            p.copy_(0.5 * noise + (0 if name.endswith("bias") else 0.8))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def data(*shape: int, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed)).double()


def split_heads(x: Tensor, count: int = 3) -> Tensor:
    """(batch, tokens, features) to (batch, heads, tokens, features of a head)."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def projections() -> dict[str, nn.Module]:
    """Of attention from 8 features with 3 heads of 4 dimensions to 3 features."""
    inner = {name: nn.Linear(8, 12) for name in "qkv"}
    return {**inner, "o": nn.Linear(12, 3)}


ATTENTION: list[Size] = [(3, ()), (12, (4, 4, 4)), (12, (4, 4, 4))]  # heads, q with k, v


def law1(model: nn.Module, *shape: int) -> None:
    """Permuting what was found changes nothing, on the example's batch size and on another."""
    example, other = data(*shape), data(*shape, seed=1, batch=5)
    spaces = zipfx.analyze(model, example, verify=False)
    for seed in range(6):
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        for x in (example, other):
            assert error(model(x), twin(x)) < EXACT, (seed, sizes(model, x))


def law3(
    model: nn.Module, *shape: int, seeds: Iterable[int] = range(6), partial: str | None = None
) -> None:
    """Merging a model with its permuted twin gives the model, on another batch size too."""
    spaces = zipfx.analyze(model, data(*shape), verify=False)
    x = data(*shape, seed=9, batch=5)
    batches = [(data(*shape, seed=100 + i, batch=32),) for i in range(6)]
    for seed in seeds:
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        merged = merge([model, twin], batches, matcher="permute", partial=partial)
        whole = error(model(x), merged(x)) if partial is None else 0.0
        heads = heads_error(merged, [model(x)] * 2, (x,)) if partial is not None else 0.0
        assert max(whole, heads) < 1e-11, seed


def sizes(model: nn.Module, x: Tensor) -> list[Size]:
    return sorted((s.size, s.blocks) for s in zipfx.analyze(model, x, verify=False))


# ------------------------------------------------- law 1: features of two blocks become one feature
def test_blocks_that_are_subtracted() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 3, 2, 4).tanh().sum(-1)
        return s.h(y[:, :, 0] - y[:, :, 1])

    law1(Net(forward, a=nn.Linear(5, 24), h=nn.Linear(3, 2)), 5)


def test_halves_of_blocks_are_multiplied() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 6, 4).tanh().sum(-1)
        return s.h(y[:, :3] * y[:, 3:])

    law1(Net(forward, a=nn.Linear(5, 24), h=nn.Linear(3, 2)), 5)


def test_differential_attention() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x), 6), split_heads(s.k(x), 6), split_heads(s.v(x), 3)
        w = (q @ k.mT).softmax(-1).unflatten(1, (3, 2))
        w = w[:, :, 0] - s.scale * w[:, :, 1]
        return s.o(join_heads(w @ v))

    parts = {**projections(), "q": nn.Linear(8, 24), "k": nn.Linear(8, 24)}
    law1(Net(forward, **parts, scale=parameter(1)), 5, 8)


def mirrored(x: Tensor) -> Tensor:
    """Every feature together with its mirror image, which so are one feature with two places."""
    return x.flip(1) + 0.5 * x


def padded_means(x: Tensor) -> Tensor:
    """Where the positions of a channel are features, its mean is a block of its own."""
    return F.pad(x, (1, 1, 1, 1)).mean((2, 3))


def shuffled(x: Tensor, groups: int) -> Tensor:
    return F.channel_shuffle(x, groups)


MIRRORED: dict[str, Callable[[Tensor], Tensor]] = {
    "means": lambda x: padded_means(shuffled(mirrored(x), 2)),
    "mirrored means": lambda x: mirrored(padded_means(x)),
    "a ring of means": lambda x: padded_means(x).roll(1, 1) + 0.5 * padded_means(x),
    "means by their neighbours": lambda x: (
        (y := padded_means(shuffled(mirrored(x), 2))) * y.roll(1, 1)
    ),
    "means by mirrored maxima": lambda x: (
        padded_means(y := shuffled(mirrored(x), 3)) * F.pad(y, (1, 1, 1, 1)).amax((2, 3)).flip(1)
    ),
    "shuffled and mirrored means": lambda x: (
        (y := padded_means(x)).flip(1) + 0.5 * shuffled(y[..., None], 2)[..., 0]
    ),
}


@pytest.mark.parametrize("partial", [None, "cut"])
@pytest.mark.parametrize("blocks", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize("name", MIRRORED)
def test_means_of_features_that_are_tied_with_others(
    name: str, blocks: bool, partial: str | None
) -> None:
    """Which of the places of a feature a mean belongs to: the same for all features."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 6, 2, 2) if blocks else s.a(x)
        return s.h(s.cut(MIRRORED[name](y)))

    a, shape = (nn.Linear(4, 24), (4,)) if blocks else (nn.Conv2d(3, 6, 1), (3, 4, 4))
    model = Net(forward, a=a, cut=nn.Identity(), h=nn.Linear(6, 2))
    law1(model, *shape)
    law3(model, *shape, seeds=range(2), partial=partial)


@pytest.mark.parametrize(
    ("groups", "shortcut"),
    [(2, lambda y: y.roll(4, 1)), (4, lambda y: y.flip(1))],
    ids=["roll", "flip"],
)
def test_a_reordered_residual_around_a_grouped_convolution(
    groups: int, shortcut: Callable[[Tensor], Tensor]
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(s.a(x))
        return s.c(F.relu(shortcut(y) + s.g(y)))

    grouped = nn.Conv2d(8, 8, 1, groups=groups)
    law1(Net(forward, a=nn.Conv2d(3, 8, 1), g=grouped, c=nn.Conv2d(8, 3, 1)), 3, 5, 5)


def test_residual_around_a_grouped_convolution_and_a_shuffle() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(s.a(x))
        return s.c(F.relu(y + F.channel_shuffle(s.g(y), 2)))

    grouped = nn.Conv2d(8, 8, 1, groups=2)
    law1(Net(forward, a=nn.Conv2d(3, 8, 1), g=grouped, c=nn.Conv2d(8, 3, 1)), 3, 5, 5)


@pytest.mark.parametrize("partial", [None, "b", "c"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("n", "groups", "norm", "others"),
    [(16, 2, 0, 2), (16, 2, 0, 4), (16, 4, 0, 2), (12, 6, 0, 4), (16, 2, 2, 2), (24, 3, 2, 2)],
)
def test_merge_of_groups_before_and_after_a_shuffle(
    n: int, groups: int, norm: int, others: int, count: int, partial: str | None
) -> None:
    """Features of a grid of blocks, of which one axis has the columns of a weight as a whole, and
    the other the parts of its rows; of three axes where a norm groups them in another way."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = shuffled(F.relu(s.b(F.relu(s.a(x)))), groups)
        y = shuffled(s.n(y), groups * norm) if norm else y
        return s.o(F.relu(s.c(y)).mean((2, 3)))

    convs = {"b": nn.Conv2d(n, n, 1, groups=groups), "c": nn.Conv2d(n, n, 1, groups=others)}
    normed = nn.GroupNorm(norm, n) if norm else nn.Identity()
    model = Net(forward, a=nn.Conv2d(4, n, 1), n=normed, o=nn.Linear(n, 3), **convs)
    law1(model, 4, 3, 3)
    spaces = zipfx.analyze(model, data(4, 3, 3), verify=False)
    assert {"a blocks", "b blocks"} <= {s.name for s in spaces}
    twins = [spaces.permuted(model, spaces.random_permutations(i)) for i in range(1, count)]
    x = data(4, 3, 3, batch=200)
    merged = merge([model, *twins], [(x,)], matcher="permute", partial=partial)
    if partial is None:
        assert error(model(x), merged(x)) < EXACT
    else:
        assert heads_error(merged, [model(x)] * count, (x,)) < EXACT


# -------------------------------------------- law 1: moving the rows of a grouped weight is not all
@pytest.mark.parametrize(
    "index", [[7, 0, 1, 2, 3, 4, 5, 6], [1, 0, 2, 3, 4, 5, 6, 7], [4, 2, 7, 0, 1, 6, 3, 5]]
)
@pytest.mark.parametrize("groups", [2, 4])
def test_channels_are_reordered_before_a_grouped_convolution(index: list[int], groups: int) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(s.a(x))[:, torch.tensor(index)]
        return s.c(F.relu(s.g(y)))

    grouped = nn.Conv2d(8, 8, 1, groups=groups)
    law1(Net(forward, a=nn.Conv2d(3, 8, 1), g=grouped, c=nn.Conv2d(8, 3, 1)), 3, 5, 5)


def test_two_grouped_convolutions_that_overlap() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 1),
        nn.Conv2d(12, 12, 1, groups=2),
        nn.ReLU(),
        nn.Conv2d(12, 12, 1, groups=3),
        nn.ReLU(),
        nn.Conv2d(12, 3, 1),
    )
    law1(Net(lambda s, x: s.layers(x), layers=model), 3, 5, 5)


# --------------------------------------------------- law 1: an axis that is used whole and in parts
def test_grouped_weight_standardisation_as_in_timm() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        rows, gain = s.w.reshape(1, 9, -1), s.gain.view(-1)
        w = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0)
        y = F.conv2d(F.relu(s.a(x)), w.reshape_as(s.w), groups=3, padding=1)
        return s.b(F.relu(y))

    own = {"w": parameter(9, 2, 3, 3), "gain": parameter(9, 1, 1, 1)}
    law1(Net(forward, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(9, 3, 1), **own), 3, 5, 5)


@pytest.mark.parametrize(
    "normalised", [lambda m: weight_norm(m, dim=1), spectral_norm], ids=["weight_norm", "spectral"]
)
def test_normalised_weight_of_a_grouped_convolution(
    normalised: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.b(F.relu(s.g(F.relu(s.a(x)))))

    grouped = normalised(nn.Conv2d(6, 9, 3, groups=3))
    law1(Net(forward, a=nn.Conv2d(3, 6, 1), g=grouped, b=nn.Conv2d(9, 3, 1)), 3, 5, 5)


@pytest.mark.parametrize("groups", [1, 2])
def test_one_weight_in_two_groupings(groups: int) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.conv2d(F.relu(s.a(x)), s.w, groups=4)
        z = F.conv2d(s.c(x), s.w, groups=groups)
        return s.b(F.relu(y)) + s.d(z)

    parts = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 3, 1), "d": nn.Conv2d(8, 3, 1)}
    law1(Net(forward, **parts, c=nn.Conv2d(3, 2 * groups, 1), w=parameter(8, 2, 1, 1)), 3, 5, 5)


# --------------------------------- law 1: a grid whose members lie in another order from row to row
def test_grid_of_softmaxes_over_shuffled_features() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)[:, torch.tensor([5, 2, 0, 1, 3, 4])].view(-1, 3, 2)
        return s.h((y.softmax(1) * y.softmax(2)).flatten(1))

    law1(Net(forward, a=nn.Linear(5, 6), h=nn.Linear(6, 3)), 5)


def test_grid_of_two_group_norms() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.m(s.a(x)).tanh()
        return s.h(s.n(y[:, torch.tensor([0, 3, 5, 1, 2, 4])]))

    norms = {"m": nn.GroupNorm(3, 6), "n": nn.GroupNorm(2, 6)}
    law1(Net(forward, a=nn.Conv2d(3, 6, 1), h=nn.Conv2d(6, 3, 1), **norms), 3, 5, 5)


# ----------------------------------------------------------- law 1: features behind complex numbers
def test_complex_rotary_embedding() -> None:
    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 10 ** (torch.arange(0, 4, 2) / 4)
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2)

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        return s.o(join_heads(F.scaled_dot_product_attention(rotated(q), rotated(k), v)))

    law1(Net(forward, **projections()), 5, 8)


# -------------------------------------- law 3: a value's copies lie in another order in every model
@pytest.mark.parametrize(
    "repeat",
    [lambda t: t.repeat_interleave(2, 1), lambda t: t.repeat(1, 2, 1, 1)],
    ids=["interleave", "repeat"],
)
def test_merge_of_grouped_queries(repeat: Callable[[Tensor], Tensor]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q = split_heads(s.q(x), 4)
        k, v = repeat(split_heads(s.k(x), 2)), repeat(split_heads(s.v(x), 2))
        return s.o(join_heads((q @ k.mT).softmax(-1) @ v))

    parts = {"q": nn.Linear(8, 16), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8)}
    law3(Net(forward, **parts, o=nn.Linear(16, 3)), 5, 8)


@pytest.mark.parametrize("seed", range(12))
def test_merge_of_the_shared_case_of_grouped_queries(seed: int) -> None:
    make, inputs = shared_module("cases/models.py").CASES["grouped_query_attention"]
    model, x = make().double(), inputs[0].double()
    spaces = zipfx.analyze(model, x)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(30, *x.shape, generator=generator, dtype=torch.float64)
    twin = spaces.permuted(model, spaces.random_permutations(seed))
    merged = merge([model, twin], [(batch,) for batch in noise], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


@pytest.mark.parametrize("weights", range(6))
def test_merge_of_a_convolution_shared_by_groups_that_are_folded_into_the_batch(
    weights: int,
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        b, _, h, w = y.shape
        return s.h(F.relu(s.g(y.view(b * 4, 2, h, w)).view(b, 12, h, w)))

    shared = nn.Conv2d(2, 3, 3, padding=1)
    model = Net(forward, a=nn.Conv2d(3, 8, 1), g=shared, h=nn.Conv2d(12, 3, 1))
    generator = torch.Generator().manual_seed(weights)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (0.4 if p.dim() > 1 else 0.5))
    law3(model, 3, 5, 5, seeds=range(3))


# ---------------------------------------------------------------- law 3: heads of a cut amid blocks
def test_cut_before_a_transposed_depthwise_convolution_with_multiplier() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.b(F.relu(s.g(F.relu(s.a(x)))))

    transposed = nn.ConvTranspose2d(4, 8, 2, 2, groups=4)
    model = Net(forward, a=nn.Conv2d(3, 4, 1), g=transposed, b=nn.Conv2d(8, 3, 1))
    law3(model, 3, 5, 5, partial="a")


@pytest.mark.xfail(strict=True, reason=FOLDED)
@pytest.mark.parametrize("cut", ["q", "k", "act"])
def test_cut_where_heads_are_folded_into_the_batch(cut: str) -> None:
    def fold(x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, 3, 4).transpose(1, 2).reshape(b * 3, n, 4)

    def forward(s: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = fold(s.q(x)), fold(s.k(x)), fold(s.v(x))
        w = s.act(torch.bmm(q, k.transpose(1, 2)))
        return s.o(torch.bmm(w, v).view(b, 3, n, 4).transpose(1, 2).reshape(b, n, 12))

    model = Net(forward, **projections(), act=nn.Softmax(-1))
    law3(model, 5, 8, partial=cut, seeds=range(2))


@pytest.mark.xfail(strict=True, reason=FOLDED)
def test_cut_where_groups_are_folded_into_the_batch() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        b, c, h, w = y.shape
        return s.h(F.relu(s.n(y.reshape(b * 4, 2, h, w)).reshape(b, c, h, w)))

    model = Net(forward, a=nn.Conv2d(3, 8, 1), n=nn.GroupNorm(1, 2), h=nn.Conv2d(8, 3, 1))
    law3(model, 3, 5, 5, partial="a", seeds=range(2))


# ---------------------------------------------- merges: a view of a parameter is handed to a module
@pytest.mark.parametrize(
    "view",
    [lambda p, x: p.expand(x.shape[0], -1, -1), lambda p, x: p[:, :1]],
    ids=["expand", "slice"],
)
def test_a_view_of_a_parameter_is_handed_to_a_module(
    view: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(view(s.p, x)) + s.a(x))

    parts = {"a": nn.Linear(4, 6), "b": nn.Linear(5, 6), "h": nn.Linear(6, 2)}
    model, x = Net(forward, p=parameter(1, 1, 5), **parts), data(3, 4, batch=8)
    merged = merge([model, copy.deepcopy(model)], [(x,)], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


def test_a_learned_start_of_a_recurrent_cell() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.c(x, s.p.expand(x.shape[0], 5)))

    model = Net(forward, p=parameter(5), c=nn.GRUCell(4, 5), h=nn.Linear(5, 2))
    x = data(4, batch=8)
    merged = merge([model, copy.deepcopy(model)], [(x,)], matcher="permute")
    assert error(model(x), merged(x)) < EXACT


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


def test_top_k_of_the_gate_is_symmetric() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        gate = s.g(x)
        smallest = gate.topk(2, -1).values[:, -1:]
        gate = gate.masked_fill(gate < smallest, float("-inf")).softmax(-1)
        y = torch.einsum("bi,ehi->beh", x, s.w1).relu()
        return torch.einsum("be,beh,eoh->bo", gate, y, s.w2)

    model = Net(forward, g=nn.Linear(6, 3), w1=parameter(3, 7, 6), w2=parameter(3, 4, 7))
    assert sizes(model, data(6)) == [(3, ()), (21, (7, 7, 7))]


@pytest.mark.xfail(strict=True, reason="the index of a feature is pinned where it is used")
def test_experts_that_are_chosen_by_their_indices() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        most, index = s.g(x).topk(2, -1)
        gate = x.new_zeros(len(x), 3).scatter(1, index, most.softmax(-1))
        return torch.einsum("be,eoi,bi->bo", gate, s.w, x)

    assert (3, ()) in sizes(Net(forward, g=nn.Linear(6, 3), w=parameter(3, 7, 6)), data(6))


@pytest.mark.xfail(strict=True, reason="an operation on some heads tells them from the others")
def test_heads_in_a_loop() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x).split(4, -1), s.k(x).split(4, -1), s.v(x).split(4, -1)
        return s.o(torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v)], -1))

    assert (3, ()) in sizes(Net(forward, **projections()), data(5, 8))


@pytest.mark.xfail(strict=True, reason="weights alone do not make a space")
def test_low_rank_weights() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(F.linear(x, s.w + s.b @ s.a)))

    weights = {"w": parameter(7, 5), "b": parameter(7, 2), "a": parameter(2, 5)}
    assert (2, ()) in sizes(Net(forward, **weights, h=nn.Linear(7, 3)), data(5))


# ------------------------------------------------------------------ completeness: blocks that cross
@pytest.mark.parametrize("groups", [2, 3])
def test_shufflenet_v1_unit(groups: int) -> None:
    """Features of one group before the shuffle and one group after it are free."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(s.a(x))
        z = F.channel_shuffle(F.relu(s.g(y)), groups)
        return s.h(F.relu(y + s.k(s.depthwise(z))))

    n = groups * groups * 2
    pointwise = {name: nn.Conv2d(n, n, 1, groups=groups) for name in "gk"}
    depthwise = nn.Conv2d(n, n, 3, padding=1, groups=n)
    ends = {"a": nn.Conv2d(3, n, 1), "h": nn.Conv2d(n, 3, 1)}
    spaces = zipfx.analyze(
        Net(forward, **ends, **pointwise, depthwise=depthwise), data(3, 5, 5), verify=False
    )
    assert "depthwise.weight" in {a.parameter for s in spaces for a in s.axes}


def test_two_group_norms_of_the_same_count_that_cross() -> None:
    """2 x 2 cells of 2 features, which are free inside a cell."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.m(s.a(x)).tanh()
        return s.h(s.n(y[:, torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])]))

    norms = {"m": nn.GroupNorm(2, 8), "n": nn.GroupNorm(2, 8)}
    model = Net(forward, a=nn.Conv2d(3, 8, 1), h=nn.Conv2d(8, 3, 1), **norms)
    assert len(zipfx.analyze(model, data(3, 5, 5), verify=False))


def test_grid_of_gates_that_alternate_on_one_axis() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        gates = s.g(x)
        y = s.a(x).view(-1, 3, 3).tanh()
        return s.h((y * gates[:, ::2, None] * gates[:, None, 1::2]).flatten(1))

    model = Net(forward, g=nn.Linear(5, 6), a=nn.Linear(5, 9), h=nn.Linear(9, 2))
    assert sizes(model, data(5)) == [(3, ()), (3, ())]


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


# ------------------------------------------------------ completeness: operations and their features
def test_spectral_norm() -> None:
    torch.manual_seed(0)
    parts = {"a": spectral_norm(nn.Conv2d(3, 6, 3)), "b": spectral_norm(nn.Conv2d(6, 3, 1))}
    model = Net(lambda s, x: s.b(F.relu(s.a(x))), **parts)
    assert sizes(model, data(3, 5, 5)) == [(6, ())]


def test_pointwise_convolution_over_tokens_does_not_slide() -> None:
    """The gate of gMLP."""

    def forward(s: Any, x: Tensor) -> Tensor:
        u, v = F.gelu(s.a(x)).chunk(2, -1)
        return s.o(u * s.tokens(s.n(v)))

    parts = {"a": nn.Linear(8, 12), "n": nn.LayerNorm(6), "o": nn.Linear(6, 3)}
    assert sizes(Net(forward, **parts, tokens=nn.Conv1d(5, 5, 1)), data(5, 8)) == [(6, ())]


def test_fold() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(F.unfold(x, 2, stride=2))
        return s.b(F.fold(y, (4, 4), 2, stride=2))

    model = Net(forward, a=nn.Conv1d(12, 20, 1), b=nn.Conv2d(5, 3, 1))
    assert sizes(model, data(3, 4, 4)) == [(5, ())]


def test_bilinear_module() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.relu(s.b(F.relu(s.a(x)), F.relu(s.c(x)))))

    ends = {"a": nn.Linear(5, 4), "c": nn.Linear(5, 6), "h": nn.Linear(7, 2)}
    model = Net(forward, **ends, b=nn.Bilinear(4, 6, 7))
    assert sizes(model, data(5)) == [(4, ()), (6, ()), (7, ())]


CHOSEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # y: (2, 6 tokens, 8 features); x: inputs
    "largest": lambda y, x: y.topk(3, 2)[0].sum(2, keepdim=True) * y,
    "sorted": lambda y, x: y - y.sort(2)[0][..., 3:4],
    "quantile": lambda y, x: y - y.quantile(0.5, dim=2, keepdim=True),
    "kthvalue": lambda y, x: y * (y > y.kthvalue(3, 2, keepdim=True)[0]),
    "moments": lambda y, x: torch.mul(*torch.std_mean(y, 2, keepdim=True)) * y,
    "range": lambda y, x: torch.mul(*y.aminmax(dim=2, keepdim=True)) * y,
    "largest tokens": lambda y, x: y.topk(3, 1)[0],
    "token of a feature": lambda y, x: y.gather(1, y.argmax(1, keepdim=True)),
    "token of a sample": lambda y, x: y[torch.arange(len(y)), x.sum(2).argmax(1)],
    "tokens in another order": lambda y, x: y[:, x[0].sum(1).argsort()],
    "masked tokens": lambda y, x: y[x.sum(2) > 0].sum(0, keepdim=True) + y,
    "scattered": lambda y, x: y.scatter_add(1, x.argmax(1)[:, :1, None].expand(-1, 1, 8), y[:, :1]),
    "added": lambda y, x: y.index_add(1, x[0, :, 0].argsort()[:2], y[:, :2]),
    "put": lambda y, x: y.index_put((x.sum(2) > 0,), y.new_ones(())),
    "put rows": lambda y, x: y.index_put((x[:, 0, 0].argsort(),), y[:1].flip(1)),
    "distances": lambda y, x: torch.cdist(y, 1 + y) @ y,
    "sampled": lambda y, x: (
        F.grid_sample(y.mT[..., None], x[:, None, :, :2], align_corners=False)[:, :, 0].mT
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_data_chooses_on_one_axis_leaves_the_others(name: str) -> None:
    model = Net(lambda s, x: s.h(CHOSEN[name](s.a(x), x)), a=nn.Linear(5, 8), h=nn.Linear(8, 3))
    assert sizes(model, data(6, 5)) == [(8, ())]
    law1(model, 6, 5)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda y, x: y.sort(2)[0],
        lambda y, x: y.gather(2, x[..., :1].argmax(1, keepdim=True).expand(-1, 6, 8)),
        lambda y, x: y[:, :, x[0, 0].argsort()[:1].expand(8)],
        lambda y, x: y * y.topk(3, 2)[1][..., :1],
        lambda y, x: y.index_put((x.argmax(0)[:2, :1] * 0,), y.new_ones(())),
        lambda y, x: y * torch.zeros_like(y).scatter(2, y.argmax(2, keepdim=True), 1.0),
    ],
    ids="ranks gathered listed index put scattered".split(),
)
def test_what_data_chooses_among_features_is_pinned_or_in_no_order(chosen: Any) -> None:
    law1(Net(lambda s, x: s.h(chosen(s.a(x), x)), a=nn.Linear(5, 8), h=nn.Linear(8, 3)), 6, 5)


@pytest.mark.parametrize("bag", [nn.EmbeddingBag(9, 6, mode=mode) for mode in ("mean", "max")])
def test_bags_of_embeddings(bag: nn.Module) -> None:
    model = nn.Sequential(bag, nn.Linear(6, 3)).double()
    ids = torch.randint(9, (2, 4), generator=torch.Generator().manual_seed(0))
    spaces = zipfx.analyze(model, ids, verify=False)
    assert [s.size for s in spaces] == [6]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    assert error(model(ids), twin(ids)) < EXACT


@pytest.mark.parametrize("mode", ["nearest-exact", "nearest", "trilinear"])
def test_sizes_change_in_every_mode(mode: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(F.interpolate(s.a(x), size=(3, 5, 2), mode=mode).flatten(2).mT)

    model = Net(forward, a=nn.Conv3d(3, 6, 1), h=nn.Linear(6, 3))
    assert sizes(model, data(3, 4, 4, 4)) == [(6, ())]


def test_unpooling() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y, where = s.pool(s.a(x))
        return s.h(F.max_unpool2d(s.b(y), where, 2))

    pool = nn.MaxPool2d(2, return_indices=True)
    layers = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 6, 1), "h": nn.Conv2d(6, 3, 1)}
    model = Net(forward, pool=pool, **layers)
    assert sizes(model, data(3, 4, 4)) == [(6, ())]
    law1(model, 3, 4, 4)


@pytest.mark.xfail(
    strict=True,
    reason="a float buffer counts as a weight, and weights alone do not make a space",
)
def test_weights_made_by_a_network_of_constants() -> None:
    """The continuous position bias of Swin v2."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = split_heads(s.q(x)), split_heads(s.k(x)), split_heads(s.v(x))
        bias = s.m2(F.relu(s.m1(s.places)))[s.index].permute(2, 0, 1)
        return s.o(join_heads((q @ k.mT + bias).softmax(-1) @ v))

    index = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
    network = {"m1": nn.Linear(2, 7), "m2": nn.Linear(7, 3, bias=False)}
    model = Net(forward, **network, **projections(), places=data(2, batch=9), index=index)
    assert (7, ()) in sizes(model, data(5, 8))


def test_dynamic_depthwise_kernels() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu(s.a(x))
        kernels = s.k(y.mean((2, 3))).view(-1, 1, 3, 3)
        one = y.reshape(1, -1, 4, 4)
        z = F.conv2d(one, kernels, padding=1, groups=y.shape[0] * 6)
        return s.h(z.view(-1, 6, 4, 4))

    model = Net(forward, a=nn.Conv2d(3, 6, 1), k=nn.Linear(6, 54), h=nn.Conv2d(6, 2, 1))
    assert sizes(model, data(3, 4, 4)) == [(6, ())]
    law1(model, 3, 4, 4)


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


# ----------------------------------------------------------- kernels that are shared, or computed
WAVELETS = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2.0


def kernels(k: Tensor, *repeats: int) -> Tensor:
    """One of 2 x 2 in every row, repeated."""
    return k.view(-1, 1, 2, 2).repeat(*repeats, 1, 1, 1)


SHARED: dict[str, tuple[Callable[[Any, Tensor], Tensor], int, Any, list[Size]]] = {
    "one constant": (
        lambda s, y: F.conv2d(y, s.k.expand(6, 1, 2, 2), groups=6),
        6, torch.rand(1, 1, 2, 2), [(6, ())],
    ),
    "one parameter": (
        lambda s, y: F.conv2d(y, s.k.expand(6, 1, 2, 2), groups=6),
        6, parameter(1, 1, 2, 2), [(6, ())],
    ),
    "wavelets": (
        lambda s, y: F.conv2d(y, kernels(s.k, 6), stride=2, groups=6),
        24, WAVELETS, [(4, ()), (6, ())],
    ),
    "written wavelets": (
        lambda s, y: F.conv2d(y, kernels(WAVELETS.double(), 6), stride=2, groups=6),
        24, None, [(6, ())],
    ),
    "inverse wavelets": (
        lambda s, y: F.conv_transpose2d(y.repeat_interleave(4, 1), kernels(s.k, 6), groups=6),
        6, WAVELETS, [(6, ())],
    ),
    "one for each head": (
        lambda s, y: F.conv2d(y, s.k.softmax(-1).repeat_interleave(3, 0), groups=6),
        6, parameter(2, 1, 2, 2), [(2, ()), (6, (3, 3))],
    ),
    "alternating": (
        lambda s, y: F.conv2d(y, s.k.repeat(3, 1, 1, 1), groups=6),
        6, parameter(2, 1, 2, 2), [(2, ()), (6, (3, 3))],
    ),
    "whole groups": (
        lambda s, y: F.conv2d(y, s.k.repeat(2, 1, 1, 1), groups=2),
        8, parameter(4, 3, 2, 2), [(2, ()), (3, ()), (4, ())],
    ),
    "whole groups, transposed": (
        lambda s, y: F.conv_transpose2d(y, s.k.repeat(2, 1, 1, 1), groups=2),
        8, parameter(3, 4, 2, 2), [(2, ()), (3, ()), (4, ())],
    ),
    "some rows": (
        lambda s, y: F.conv2d(y, s.k[:4], groups=2),
        4, parameter(6, 3, 2, 2), [(2, ()), (3, ()), (4, (2, 2))],
    ),
    "rows in another order": (
        lambda s, y: F.conv2d(y, s.k[torch.tensor([0, 2, 1, 3])], groups=2),
        4, parameter(4, 3, 2, 2), [(2, ()), (3, ()), (4, (2, 2))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_grouped_convolution_with_shared_kernels(name: str) -> None:
    """What tells its channels apart is not the weight alone."""
    convolve, channels, k, expected = SHARED[name]

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(convolve(s, F.relu(s.a(x))).tanh().flatten(2).sum(2))

    parts = {} if k is None else {"k": k}
    model = Net(forward, a=nn.Conv2d(3, 6, 1), **parts, h=nn.Linear(channels, 3))
    law1(model, 3, 4, 4)
    assert sizes(model, data(3, 4, 4)) == expected
    law3(model, 3, 4, 4, seeds=[0, 1])
    law3(model, 3, 4, 4, seeds=[0], partial="a")


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (8, 1), (1, 2), (1, 8)])
def test_a_kernel_made_by_a_network(rows: int, groups: int) -> None:
    """Its positions keep their order in every channel."""

    def forward(s: Any, x: Tensor) -> Tensor:
        kernel = s.k(s.z).view(8, 8 // groups, 2, 2)
        return s.h(F.conv2d(F.relu(s.a(x)), kernel, groups=groups).tanh().flatten(2).sum(2))

    ends = {"a": nn.Conv2d(3, 8, 1), "h": nn.Linear(8, 3)}
    network = {"z": parameter(rows, 5), "k": nn.Linear(5, 8 * 8 * 4 // rows // groups)}
    model = Net(forward, **network, **ends)
    law1(model, 3, 4, 4)
    found = [(8, ())] if groups == 8 else [(8, ())] * 2 if groups == 1 else [(8, (4, 4))] * 2
    assert sizes(model, data(3, 4, 4))[-len(found) :] == found


def test_an_operation_that_writes_and_returns() -> None:
    """rrelu writes down the slopes that it drew."""
    model = Net(lambda s, x: s.h(F.rrelu(s.a(x))), a=nn.Linear(5, 6), h=nn.Linear(6, 3))
    assert sizes(model, data(5)) == [(6, ())]
    law1(model, 5)


# ------------------------------------------------- law 1: the same features at several places
def test_mirrored_features_that_meet_alternating_constants() -> None:
    """Which of the two features that the mirror ties meets which constant is part of the tie."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        mirrored = (y.flip(1) + 0.5 * y) * torch.tensor([0.5, 1.5] * 4, dtype=y.dtype)
        return s.h(mirrored) + y @ s.w  # w comes first: it was numbered by position alone

    model = Net(forward, w=parameter(8, 3), a=nn.Linear(4, 8), h=nn.Linear(8, 3))
    law1(model, 4)
    assert sizes(model, data(4)) == [(4, ())]


def test_some_of_repeated_features_are_written_to() -> None:
    """All features took part in the writing, but not everywhere where they lie."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        y = torch.cat([y, y], 1)
        y[:, :2] *= 0.5
        return s.h(s.n(y))

    model = Net(forward, a=nn.Linear(4, 6), n=nn.GroupNorm(1, 12), h=nn.Linear(12, 2))
    law1(model, 4)


@pytest.mark.parametrize(
    ("values", "spaces"), [((2.0, 0.0), [(3, ()), (3, ())]), ((2.0, 2.0), [(6, ())])]
)
def test_a_mask_is_written_in_place(values: tuple[float, float], spaces: list[Size]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        mask = x.new_zeros(6)
        mask[:3], mask[3:] = values
        return s.h(s.a(x) * mask)

    model = Net(forward, a=nn.Linear(4, 6), h=nn.Linear(6, 2))
    law1(model, 4)
    assert sizes(model, data(4)) == spaces


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_mean_over_padded_features(mode: str) -> None:
    """What the padding repeats counts more."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.c(s.a(x).view(-1, 3, 3, 3)), (1, 1, 1, 1), mode=mode)
        return s.h(y.mean((2, 3)))

    law1(Net(forward, a=nn.Linear(4, 27), c=nn.Conv2d(3, 2, 1), h=nn.Linear(2, 2)), 4)


def test_mean_over_padded_products_of_features() -> None:
    """Each row and each channel counts as often as the others, but not each with each."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.w @ s.a(x).view(-1, 3, 4)
        y = (y + y.amax(2, keepdim=True)).transpose(1, 2).reshape(-1, 4, 2, 1)
        y = F.pad(F.pixel_shuffle(y, 2), (1, 1, 1, 1), mode="reflect")
        return s.h(y.mean((2, 3)))

    law1(Net(forward, a=nn.Linear(4, 12), w=parameter(2, 3), h=nn.Linear(1, 2)), 4)


def test_largest_of_reordered_products_of_features() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = (s.a(x)[:, :, None] * s.b(x)[:, None]).flatten(1)[:, [0, 1, 2, 3, 5, 4, 6, 7, 8]]
        return s.h(y.view(-1, 3, 3).amax(1))

    law1(Net(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3), h=nn.Linear(3, 2)), 4)


def test_copies_of_input_channels_in_several_groups() -> None:
    """Each of the two copies is normalised with other channels, unless the groups are copies."""

    def model(groups: int) -> Net:
        norm, head = nn.GroupNorm(groups, 10), nn.Conv2d(10, 3, 1)
        return Net(lambda s, x: s.h(s.n(torch.cat([x, x], 1))), n=norm, h=head)

    for groups in (2, 5):
        law1(model(groups), 5, 4, 4)
    assert sizes(model(2), data(5, 4, 4)) == [(2, ())] * 5
    assert sizes(model(5), data(5, 4, 4)) == []


def test_parts_of_a_channel_in_several_groups() -> None:
    """Groups of one and a half channels: 1 and 4 lie in two groups, the others in one."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.n(F.pixel_unshuffle(s.a(x), 2)))

    parts = {"a": nn.Conv2d(3, 6, 3), "n": nn.GroupNorm(4, 24), "h": nn.Conv2d(24, 3, 1)}
    model = Net(forward, **parts)
    law1(model, 3, 6, 6)
    assert sizes(model, data(3, 6, 6)) == [(2, ())]


def test_features_in_several_groups_without_parameters() -> None:
    """They belong to the groups, not the groups to them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        return s.h(F.group_norm(torch.cat([y, y], 1), 3))

    model = Net(forward, a=nn.Conv2d(3, 6, 3), h=nn.Conv2d(12, 3, 1))
    law1(model, 3, 6, 6)
    assert sizes(model, data(3, 6, 6)) == [(2, ())] * 3


# ------------------------------------------------- law 3: where features are observed, and restored
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(5, elementwise_affine=False), nn.Softmax(-1), nn.BatchNorm2d(3)],
    ids=["layer_norm", "softmax", "batch_norm"],
)
def test_cut_where_padding_is_normalised(norm: nn.Module) -> None:
    """The zeros then hold something of their row, or the bias of their channel; they move, too."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.a(x).view(-1, 3, 3, 3), (1, 1, 1, 1))
        return s.h(s.n(y))

    model = Net(forward, a=nn.Linear(4, 27), n=norm, h=nn.Conv2d(3, 2, 1))
    law3(model, 4, partial="n")
    assert sizes(model, data(4)) == [(3, ())]


def test_cut_after_the_features_of_tokens_were_multiplied_with_themselves() -> None:
    """Rows and columns are the same features; the tokens are exchangeable all the same."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).view(-1, 3, 4)
        return s.h(y.mT @ y.tanh())

    law3(Net(forward, a=nn.Linear(4, 12), h=nn.Linear(4, 2)), 4, partial="h")


def test_merge_of_features_that_are_the_rows_and_the_columns() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).flatten(2).mT
        gram = torch.cat([s.p.expand(x.shape[0], -1, -1), y.mT @ y.tanh()], 1)
        return s.h(s.b(gram).mean(1))

    parts = {"a": nn.Conv2d(3, 6, 1), "b": nn.Linear(6, 3), "h": nn.Linear(3, 2)}
    law3(Net(forward, p=parameter(1, 1, 6), **parts), 3, 4, 4)


def test_cut_where_features_leave_unequally_often() -> None:
    """A head could not restore a corner where the trunk has the pixel that is repeated."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.pad(s.a(x).view(-1, 3, 3, 3), (1, 1, 1, 1), mode="reflect")
        return s.h(s.act(y))

    model = Net(forward, a=nn.Linear(4, 27), act=nn.Dropout(), h=nn.Conv2d(3, 2, 1))
    law3(model, 4, partial="act")


def test_merge_where_a_part_of_the_channels_is_looked_at() -> None:
    """Channel 0 of one model is not channel 0 of another: no place to compare pixels."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.b(s.a(x).view(-1, 3, 3, 3))
        _ = y.chunk(2, 1)[1]
        return s.h(y.relu().mean((2, 3)))

    law3(Net(forward, a=nn.Linear(4, 27), b=nn.Conv2d(3, 2, 1), h=nn.Linear(2, 2)), 4)


def test_merge_where_a_softmax_makes_all_means_the_same() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = (s.w @ s.a(x).view(-1, 3, 4)).softmax(2)  # over the features of another space
        return s.h(y.mean(1))

    law3(Net(forward, a=nn.Linear(4, 12), w=parameter(3, 3), h=nn.Linear(4, 2)), 4)


def test_pinned_features_of_another_axis_are_samples() -> None:
    """The tokens leave, so that they stay where they are: no need for means over them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(s.a(x).view(-1, 3, 4)).softmax(1))

    law3(Net(forward, a=nn.Linear(4, 12), b=nn.Linear(4, 4), h=nn.Linear(4, 2)), 4)


def test_blocks_of_constant_features_are_matched_by_their_values() -> None:
    """A layer that sees nothing gives its bias, whatever comes in."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.h(s.b(0 * x).view(-1, 3, 4).tanh().mean(1))

    law3(Net(forward, b=nn.Linear(4, 12), h=nn.Linear(4, 2)), 4)
