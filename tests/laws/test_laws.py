"""The exactness laws: what a merge must compute, in float64 to a relative error below 1e-12."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import (
    EXACT,
    error,
    heads_error,
    merge,
    parameters,
    permuted,
    run,
    running_modules,
    storages,
    unharmed,
)
from tests.helpers.models import NETS, Net, randomise

all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)
EVERY_CUT = [(n, cut) for n in NETS.values() for cut in running_modules(n.make())]


# ------------------------------------------------------------------ law 1: permutations
@pytest.mark.sweep
@all_nets
def test_law_1_permuting_every_space_leaves_the_function_unchanged(net: Net) -> None:
    model, x = net.build(), net.inputs(4)
    spaces = zipfx.analyze(model, net.inputs(4, seed=5), verify=False)
    for seed in range(3):
        other = spaces.permuted(model, spaces.random_permutations(seed))
        assert error(run(model, x), run(other, x)) < EXACT


@pytest.mark.sweep
@all_nets
def test_the_spaces_have_the_sizes_they_should(net: Net) -> None:
    spaces = zipfx.analyze(net.build(), net.inputs(2))
    assert tuple(sorted(s.size for s in spaces)) == net.sizes


@pytest.mark.sweep
@all_nets
def test_a_swap_in_any_space_moves_parameters(net: Net) -> None:
    model = net.build()
    spaces = zipfx.analyze(model, net.inputs(2))
    for space in spaces:
        order = torch.arange(space.size)
        order[[0, 1]] = order[[1, 0]]
        moved = spaces.permuted(model, {space.name: order}).state_dict()
        changed = {n for n, t in model.state_dict().items() if not torch.equal(t, moved[n])}
        assert changed >= {axis.parameter for axis in space.axes}


# ------------------------------------------------------------------ law 2: maximality
@pytest.mark.sweep
@all_nets
def test_law_2_a_full_zip_of_copies_has_the_parameters_of_one(net: Net) -> None:
    model, x = net.build(), net.inputs(4)
    merged = merge([model, copy.deepcopy(model)], net.batches(), matcher="permute")
    assert parameters(merged) == parameters(model)
    assert merged.state_dict().keys() == model.state_dict().keys()
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.sweep
@all_nets
def test_law_2_a_zip_of_three_copies_by_identity_is_the_model(net: Net) -> None:
    model, x = net.build(), net.inputs(4)
    twins = [model, copy.deepcopy(model), copy.deepcopy(model)]
    merged = merge(twins, None, matcher="identity", example_inputs=x)
    assert parameters(merged) == parameters(model)
    assert error(run(model, x), run(merged, x)) < EXACT


# ------------------------------------------------------------------ law 3: permuted copies
@pytest.mark.sweep
@all_nets
def test_law_3_full_zip_of_a_permuted_copy_is_the_model(net: Net) -> None:
    model, x = net.build(), net.inputs(8)
    merged = merge([model, permuted(model, x)], net.batches(), matcher="permute")
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.sweep
@all_nets
@pytest.mark.parametrize("matcher", ["zip", zipfx.Zip(alpha=1, beta=0)], ids=str)
def test_law_3_holds_for_the_zip_matcher(net: Net, matcher: Any) -> None:
    model, x = net.build(), net.inputs(8)
    merged = merge([model, permuted(model, x)], net.batches(), matcher=matcher)
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.sweep
@all_nets
@pytest.mark.parametrize("matcher", ["permute", "zip"])
def test_law_3_holds_for_three_models(net: Net, matcher: str) -> None:
    model, x = net.build(), net.inputs(8)
    trio = [permuted(model, x, seed) for seed in (1, 2, 3)]
    merged = merge(trio, net.batches(), matcher=matcher)
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.parametrize("matcher", ["permute", "zip", "weights"])
def test_law_3_holds_for_eight_models(matcher: str) -> None:
    net = NETS["BatchNorm"]
    model, x = net.build(), net.inputs(8)
    merged = merge([permuted(model, x, seed) for seed in range(8)], net.batches(), matcher=matcher)
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.sweep
@pytest.mark.parametrize(("net", "cut"), EVERY_CUT, ids=[f"{n.name}-{c}" for n, c in EVERY_CUT])
def test_law_3_at_every_cut_each_head_is_the_model(net: Net, cut: str) -> None:
    model, x = net.build(), net.inputs(8)
    data = net.batches(2)
    merged = merge([model, permuted(model, x)], data, partial=cut, matcher="permute")
    expected = run(model, x)
    assert heads_error(merged, [expected, expected], x) < EXACT


@pytest.mark.sweep
@all_nets
@pytest.mark.parametrize("places", ["reads", "source", "all"])
def test_law_3_holds_wherever_a_space_is_observed(net: Net, places: str) -> None:
    model, x = net.build(), net.inputs(8)
    merged = merge([model, permuted(model, x)], net.batches(), matcher="permute", places=places)
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.sweep
@all_nets
def test_law_3_in_float32_to_rounding(net: Net) -> None:
    kind = torch.float32
    model, x = net.build(dtype=kind), net.inputs(8, dtype=kind)
    merged = merge([model, permuted(model, x)], net.batches(dtype=kind), matcher="permute")
    assert error(run(model, x), run(merged, x)) < 1e-5


@pytest.mark.sweep
@all_nets
def test_different_models_keep_their_heads_apart(net: Net) -> None:
    models, x = [net.build(seed=s) for s in (0, 1)], net.inputs(8)
    cut = running_modules(models[0])[0]
    expected = [run(m, x) for m in models]
    merged = merge(models, net.batches(1), partial=cut, matcher="permute")
    heads = run(merged, x)
    alone = [run(zipfx.head(merged, k), x) for k in range(2)]
    assert max(error(h, a) for h, a in zip(heads, alone, strict=True)) < EXACT
    assert error(expected[0], expected[1]) > 1e-3
    assert error(heads[0], heads[1]) > 1e-3


@pytest.mark.sweep
@all_nets
def test_the_example_is_left_alone_and_the_sizes_are_right(net: Net) -> None:
    model, x = net.build(), net.inputs(8)
    example = copy.deepcopy(x)
    spaces = zipfx.analyze(model, example)
    assert error(x, example) == 0
    assert tuple(sorted(s.size for s in spaces)) == tuple(sorted(net.sizes))


# ------------------------------------------------------------------ law 4: redundancy
N = 8  # units of every layer of every model
SETS = {  # which of the N distinct features each model has; the rest of its units are copies
    2: [[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]],
    3: [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]],
}


def copies(owned: Sequence[int], seed: int) -> Tensor:
    """(N,) which distinct feature each unit is: all of `owned`, each at least once."""
    generator = torch.Generator().manual_seed(seed)
    more = torch.randint(len(owned), (N - len(owned),), generator=generator)
    units = torch.tensor(owned)[torch.cat([torch.arange(len(owned)), more])]
    return units[torch.randperm(N, generator=generator)]


def expand(weight: Tensor, out: Tensor | None, into: Tensor | None, seed: int) -> Tensor:
    """A weight over distinct features as one over units; columns split at will between copies."""
    generator = torch.Generator().manual_seed(seed)
    rows = weight if out is None else weight[out]
    if into is None:
        return rows
    share = torch.randn(len(rows), len(into), generator=generator, dtype=torch.float64)
    for feature in into.unique():
        same = into == feature
        share[:, same] += (1 - share[:, same].sum(1, keepdim=True)) / same.sum()
    return rows[:, into] * share.reshape(*share.shape, *[1] * (weight.ndim - 2))


def distinct(shape: tuple[int, ...], models: int, seed: int) -> Tensor:
    """Weights between distinct features: those that several models share read shared ones only."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
    if shape[:2] == (N, N):
        for i in range(N):
            having = [set(s) for s in SETS[models] if i in s]
            for j in set(range(N)) - set.intersection(*having):
                weight[i, j] = 0
    return weight


class Mlp(nn.Module):
    """Plain layers."""

    shape, streams = (5,), {"a": "1", "b": "2", "c": "3"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, N), nn.Linear(N, N), nn.Linear(N, N)
        self.last, self.h = nn.ReLU(), nn.Linear(N, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.last(self.c(F.relu(self.b(F.relu(self.a(x)))))))


class ResidualMlp(nn.Module):
    """A residual stream `1` and two hidden layers."""

    shape, streams = (5,), {"a": "1", "b": "2", "c": "1", "d": "3", "e": "1"}

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, N)
        self.b, self.c, self.d, self.e = (nn.Linear(N, N) for _ in range(4))
        self.last, self.h = nn.Identity(), nn.Linear(N, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = y + self.c(F.relu(self.b(y)))
        y = y + self.e(F.relu(self.d(y)))
        return self.h(self.last(y))


class ResidualCnn(nn.Module):
    """The same with convolutions and BatchNorm, which must take the exact variance."""

    shape = (3, 6, 6)
    streams: ClassVar = {"a": "1", "bn": "1", "b": "2", "bn1": "2", "c": "1", "bn2": "1"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, N, 3, padding=1), nn.BatchNorm2d(N)
        self.b, self.bn1 = nn.Conv2d(N, N, 3, padding=1), nn.BatchNorm2d(N)
        self.c, self.bn2 = nn.Conv2d(N, N, 3, padding=1), nn.BatchNorm2d(N)
        self.last, self.h = nn.ReLU(), nn.Conv2d(N, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.a(x)))
        z = self.bn2(self.c(F.relu(self.bn1(self.b(y)))))
        return self.h(self.last(y + z))


def redundant(cls: Any, models: int) -> list[nn.Module]:
    """Models whose features are copies of N distinct ones, in all of them together."""
    made = []
    for k, owned in enumerate(SETS[models]):
        model = randomise(cls(), seed=k).double()
        units = {s: copies(owned, seed=10 * k + int(s)) for s in cls.streams.values()}
        before: Tensor | None = None
        with torch.no_grad():
            for i, (name, stream) in enumerate(cls.streams.items()):
                layer, out = model.get_submodule(name), units[stream]
                for key, t in (*layer.named_parameters(), *layer.named_buffers()):
                    if not t.is_floating_point():
                        continue
                    pool = distinct(tuple(t.shape), models, seed=100 * i + len(key))
                    if key == "weight" and t.ndim > 1:
                        t.copy_(expand(pool, out, before, seed=k))
                    else:
                        t.copy_((0.5 + pool.abs() if key != "bias" else pool)[out])
                before = out
        made.append(model)
    return made


@pytest.mark.sweep
@pytest.mark.parametrize("alpha", [0.3, 1])
@pytest.mark.parametrize("models", [2, 3])
@pytest.mark.parametrize("cls", [Mlp, ResidualMlp, ResidualCnn], ids=lambda c: c.__name__)
def test_law_4_redundant_models_are_merged_without_loss(
    cls: Any, models: int, alpha: float
) -> None:
    members = redundant(cls, models)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(200, *cls.shape, generator=generator).double() for _ in range(3)]
    x = (torch.randn(16, *cls.shape, generator=generator).double(),)
    expected = [run(m, x) for m in members]
    matcher = zipfx.Zip(alpha)
    merged = merge(members, [(batch,) for batch in data], partial="last", matcher=matcher)
    assert heads_error(merged, expected, x) < EXACT
    assert min(error(expected[0], e) for e in expected[1:]) > 0.1
    assert any(s.within for s in merged.meta["zipfx"].spaces)
    # one to one, the distinct features do not fit
    merged = merge(members, [(batch,) for batch in data], partial="last", matcher="permute")
    assert heads_error(merged, expected, x) > 1e-3


# ------------------------------------------------------------------ law 5: equivariance
@pytest.mark.sweep
@all_nets
@pytest.mark.parametrize("matcher", ["zip", "permute"])
def test_law_5_permuting_a_model_beforehand_changes_nothing(net: Net, matcher: str) -> None:
    a, b, x = net.build(0), net.build(1), net.inputs(8)
    cut, data = running_modules(a)[-1], net.batches()
    before = merge([a, b], data, partial=cut, matcher=matcher)
    after = merge([permuted(a, x, 3), permuted(b, x, 4)], data, partial=cut, matcher=matcher)
    assert error(run(before, x), run(after, x)) < 1e-10


@pytest.mark.sweep
@all_nets
def test_law_5_the_cut_into_batches_does_not_matter(net: Net) -> None:
    a, b, x = net.build(0), net.build(1), net.inputs(8)
    whole = [tuple(torch.cat(parts) for parts in zip(*net.batches(3), strict=True))]
    pieces = [tuple(t[i : i + 7] for t in whole[0]) for i in range(0, len(whole[0][0]), 7)]
    one, many = merge([a, b], whole), merge([a, b], pieces)
    assert error(run(one, x), run(many, x)) < 1e-10


def test_law_5_the_same_call_gives_the_same_bytes() -> None:
    net = NETS["BatchNorm"]
    twice = [merge([net.build(0), net.build(1)], net.batches(), repair="bn") for _ in range(2)]
    for (name, t), (_, u) in zip(*(m.state_dict().items() for m in twice), strict=True):
        assert torch.equal(t, u), name


# ------------------------------------------------------------------ law 6: unharmed
def prepared(net: Net) -> list[nn.Module]:
    """Two models with uneven modes, frozen parameters, a gradient and hooks that must not run."""

    def hook(*_: Any) -> None:
        raise AssertionError("a hook of the caller ran")

    models = [net.build(0), net.build(1)]
    for model in models:
        model.train()
        inner = list(model.children())
        inner[0].eval()
        parameters = list(model.parameters())
        parameters[0].requires_grad_(False)
        parameters[-1].grad = torch.ones_like(parameters[-1])
        inner[0].register_forward_hook(hook)
        inner[-1].register_forward_pre_hook(hook)
    return models


@pytest.mark.sweep
@all_nets
@pytest.mark.parametrize("partial", [False, True], ids=["full", "partial"])
def test_law_6_models_data_and_random_states_are_the_same_bytes(net: Net, partial: bool) -> None:
    models, data = prepared(net), net.batches(2, batch=8)
    before = copy.deepcopy(data)
    cut = running_modules(models[0])[0] if partial else None
    merged = unharmed(models, lambda: merge(models, data, partial=cut, repair="bn"))
    assert isinstance(merged, torch.fx.GraphModule), merged
    assert not storages(merged) & set.union(*(storages(m) for m in models))
    assert error(before, data) == 0


@pytest.mark.sweep
@all_nets
def test_law_6_analyze_and_permuted_leave_the_model_unchanged(net: Net) -> None:
    model = prepared(net)[0]
    spaces = unharmed([model], lambda: zipfx.analyze(model, net.inputs(2)))
    order = spaces.random_permutations(7)
    twin = unharmed([model], lambda: spaces.permuted(model, order))
    assert not storages(model) & storages(twin)


def failing_loader(good: Any) -> Iterator[Any]:
    yield good
    raise OSError("the disk is gone")


class FailingLoader:
    """Raises in the middle of every pass."""

    def __init__(self, good: Any) -> None:
        self.good = good

    def __iter__(self) -> Iterator[Any]:
        return failing_loader(self.good)


@pytest.mark.parametrize("loader", [FailingLoader, failing_loader], ids=["loader", "generator"])
def test_law_6_when_the_loader_raises(loader: Callable[[Any], Any]) -> None:
    net = NETS["Inplace"]
    models = prepared(net)
    raised = unharmed(models, lambda: merge(models, loader(net.inputs(8)), repair="bn"))
    assert isinstance(raised, OSError)
    assert str(raised) == "the disk is gone"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_law_6_when_activations_break(bad: float) -> None:
    net = NETS["Inplace"]
    models, (x,) = prepared(net), net.inputs(8)
    x[3] = bad
    raised = unharmed(models, lambda: merge(models, [(x,)], repair="bn"))
    assert isinstance(raised, zipfx.ZipError), raised


def test_law_6_when_repair_fails() -> None:
    net = Net("Bn1d", lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), ((3,),), (4,))
    models = prepared(net)
    data = [net.inputs(1)]
    raised = unharmed(models, lambda: merge(models, data, repair="bn"))
    assert isinstance(raised, zipfx.ZipError), raised
    assert "a variance takes 2" in str(raised)


def test_law_6_a_data_loader_leaves_the_random_states_alone() -> None:
    net = NETS["BatchNorm"]
    models = prepared(net)
    dataset = torch.utils.data.TensorDataset(*net.inputs(32))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    merged = unharmed(models, lambda: merge(models, loader, batch_to_args=None))
    assert isinstance(merged, nn.Module)


def test_law_6_a_generator_that_draws_leaves_the_random_states_alone() -> None:
    net = NETS["BatchNorm"]
    models = prepared(net)
    draws = ((torch.randn(8, 3, 4, 4).double(),) for _ in range(2))
    assert isinstance(unharmed(models, lambda: merge(models, draws)), nn.Module)
