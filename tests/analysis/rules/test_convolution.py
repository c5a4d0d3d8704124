"""Grouped convolutions, kernels that are made or shared, and windows that slide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import zipfx
from tests.helpers.blocks import Net, Size, data, law1, law3, parameter, shuffled, sizes
from tests.helpers.laws import EXACT, error, heads_error, merge


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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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
