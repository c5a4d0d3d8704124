"""Refit: exact where the merge is, the least squares optimum where it is linear, never worse."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import error, heads_error, merge, permuted, run, running_modules, unharmed
from tests.helpers.models import NETS, Net
from tests.helpers.strangers import Images, images, moments, strangers
from tests.laws.test_laws import Mlp, ResidualCnn, ResidualMlp, redundant
from zipfx.repair import batches as replay
from zipfx.repair.layerwise import Refit, _as_likely
from zipfx.repair.ridge import Normal

UNCHANGED = 1e-9
all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


class Batches:
    """A loader."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


# ------------------------------------------------------------------ laws
@pytest.mark.sweep
@all_nets
def test_law_3_nothing_changes_where_the_merge_is_exact(net: Net) -> None:
    model, x = net.build(), net.inputs(8)
    merged = merge([model, permuted(model, x)], net.batches(), matcher="permute", repair="refit")
    assert error(run(model, x), run(merged, x)) < UNCHANGED
    assert not any(r.changed for r in merged.meta["zipfx"].refits)


def test_rounding_of_float32_is_no_error() -> None:
    model = strangers(1)[0].float()
    x = [(part.float(),) for (part,) in images(60)]
    merged = merge([model, permuted(model, x[0])], x, matcher="permute", repair="refit")
    assert not any(r.changed for r in merged.meta["zipfx"].refits)


@pytest.mark.sweep
@pytest.mark.parametrize("cut", running_modules(Images()))
@pytest.mark.parametrize("own", [False, True])
def test_law_3_at_every_cut(cut: str, own: bool) -> None:
    model, x = strangers(1)[0], images(6, 1)[0]
    data: Any = [Batches(images(60, s)) for s in (0, 2)] if own else images(60)
    models = [model, permuted(model, x)]
    merged = merge(models, data, partial=cut, matcher="permute", repair="refit")
    assert heads_error(merged, [run(model, x)] * 2, x) < UNCHANGED


@pytest.mark.sweep
@pytest.mark.parametrize("models", [2, 3])
@pytest.mark.parametrize("cls", [Mlp, ResidualMlp, ResidualCnn], ids=lambda c: c.__name__)
def test_law_4_nothing_changes_where_nothing_is_lost(cls: Any, models: int) -> None:
    members = redundant(cls, models)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(200, *cls.shape, generator=generator).double(),) for _ in range(3)]
    x = (torch.randn(16, *cls.shape, generator=generator).double(),)
    merged = merge(members, data, partial="last", matcher="zip", repair="refit")
    assert heads_error(merged, [run(m, x) for m in members], x) < UNCHANGED


@pytest.mark.parametrize("own", [False, True])
def test_law_5_permuting_a_model_beforehand_changes_nothing(own: bool) -> None:
    a, b = strangers()
    x = images(6, 1)[0]
    data: Any = [Batches(images(100, s)) for s in (0, 2)] if own else images(100)
    options = {"partial": "d", "matcher": "zip", "repair": "refit"}
    before = merge([a, b], data, **options)
    after = merge([permuted(a, x, 3), permuted(b, x, 4)], data, **options)
    assert error(run(before, x), run(after, x)) < UNCHANGED


def test_law_5_the_cut_into_batches_does_not_matter() -> None:
    a, b = strangers()
    x = images(6, 1)[0]
    one, many = (merge([a, b], images(100, 0, n), repair="refit") for n in (100, 7))
    assert error(run(one, x), run(many, x)) < UNCHANGED


@pytest.mark.parametrize("size", [3, 7, 16])
def test_law_5_also_where_time_comes_before_the_batch(size: int) -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.h = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.b(torch.relu(self.a(x.transpose(0, 1)))))
            return self.h(y.mean(0))

    models = strangers(2, Sequences)
    x = torch.randn(80, 6, 5, generator=torch.Generator().manual_seed(0)).double()
    one, many = (merge(models, [(p,) for p in x.split(n)], repair="refit") for n in (80, size))
    assert error(run(one, (x,)), run(many, (x,))) < UNCHANGED
    assert sum(r.changed for r in one.meta["zipfx"].refits) > 8


def test_law_5_empty_batches_do_not_count() -> None:
    models, data, empty = strangers(), images(60), (torch.zeros(0, 3, 8, 8).double(),)
    one, many = (merge(models, d, repair="refit") for d in (data, [*data[:1], empty, *data[1:]]))
    assert error(run(one, data[0]), run(many, data[0])) < UNCHANGED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_law_6_models_are_unharmed_also_by_an_error(bad: float) -> None:
    models, data = strangers(), images(40)
    assert isinstance(unharmed(models, lambda: merge(models, data, repair="refit")), nn.Module)
    data[1][0][3, 0, 0, 0] = bad
    options = {"repair": "refit", "matcher": "weights"}
    raised = unharmed(models, lambda: merge(models, data, **options))
    assert isinstance(raised, zipfx.ZipError)
    assert "layer 'a' reads or should give NaN or Inf" in str(raised)


# ------------------------------------------------------------------ the optimum
class Chain(nn.Module):
    """Nothing but linear layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def regression(x: Tensor, y: Tensor) -> Tensor:
    """The best y that is linear in x, by a library's least squares."""
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    found: Tensor = x @ torch.linalg.lstsq(x, y, driver="gelsd").solution
    return found


@pytest.mark.parametrize("hidden", [4, 6])
@torch.no_grad()
def test_a_linear_network_is_refitted_to_the_closed_form_optimum(hidden: int) -> None:
    models = [Chain(hidden).double() for _ in range(2)]
    x = torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    merged = merge(models, [(x,)], matcher="zip", repair=Refit(ridges=(0.0,)))
    outputs = sum(m(x) for m in models) / 2
    best = regression(merged.a(x), outputs)
    assert error(best, merged(x)) < UNCHANGED
    assert error(best, merge(models, [(x,)], matcher="zip")(x)) > 1e-2
    # six hidden features hold all five inputs, four do not
    assert (error(outputs, merged(x)) < UNCHANGED) == (hidden == 6)


@torch.no_grad()
def test_with_data_of_its_own_each_head_is_fitted_on_its_task() -> None:
    models = [Chain(4).double() for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(200, 5, generator=generator).double() + k for k in range(2)]
    data = [Batches([(x,)]) for x in xs]
    merged = merge(models, data, partial="a", repair=Refit(ridges=(0.0,)))
    for k, x in enumerate(xs):
        best = regression(merged.a(x), models[k](x))
        assert error(best, merged(x)[k]) < UNCHANGED


# ------------------------------------------------------------------ in practice
MATCHERS = ["identity", "permute", "zip", "optimal", "kmeans", "weights", "svd"]


def task(batches: Sequence[tuple[Tensor]], k: int) -> list[tuple[Tensor]]:
    """Images of which one can tell what is to be done with them."""
    return [(x + k,) for (x,) in batches]


def gap(models: Sequence[nn.Module], merged: nn.Module, data: Sequence[Any]) -> float:
    """Mean square by which heads, on their own data, miss what their models compute."""
    total = 0.0
    for k, (model, batches) in enumerate(zip(models, data, strict=True)):
        for (x,) in batches:
            output = run(merged, (x,))
            head = output[k] if isinstance(output, tuple) else output
            total += float((run(model, (x,)) - head).square().mean())
    return total


@pytest.mark.sweep
@pytest.mark.parametrize("models", [2, 3])
@pytest.mark.parametrize("cut", [None, "c"])
@pytest.mark.parametrize("matcher", MATCHERS)
def test_every_matcher_gets_better(matcher: str, cut: str | None, models: int) -> None:
    members = strangers(models)
    data: Any = [Batches(task(images(200, s), s)) for s in range(models)]
    fresh = [task(images(60, 10 + s), s) for s in range(models)]
    found = {}
    for repair in ("bn", "affine", "refit"):
        merged = merge(members, data, matcher=matcher, partial=cut, repair=repair)
        found[repair] = gap(members, merged, fresh)
        if repair != "bn":
            refits = merged.meta["zipfx"].refits
            assert refits
            assert all(r.after <= r.before for r in refits)
            assert all((r.ridge == math.inf) for r in refits if r.changed) or repair == "refit"
    assert found["refit"] < 0.8 * found["bn"]


class Plain(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.sweep
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("repair", ["affine", "refit"])
def test_some_image_is_held_out_or_nothing_changes(count: int, repair: str) -> None:
    models, generator = strangers(2, Plain), torch.Generator().manual_seed(0)
    data = [(torch.randn(count, 20, generator=generator).double(),)]
    fresh = [[(torch.randn(200, 20, generator=generator).double(),)]] * 2
    zipped, refitted = (merge(models, data, repair=r) for r in ("none", repair))
    assert gap(models, refitted, fresh) < 2 * gap(models, zipped, fresh)
    assert count > 1 or not any(r.changed for r in refitted.meta["zipfx"].refits)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_few_images_do_no_harm(count: int) -> None:
    models, fresh = strangers(), [images(60, 5)] * 2
    merged = {r: merge(models, images(count), repair=r) for r in ("none", "refit")}
    assert gap(models[:1], merged["refit"], fresh[:1]) < 3 * gap(
        models[:1], merged["none"], fresh[:1]
    )
    assert all(t.isfinite().all() for t in merged["refit"].state_dict().values())


def test_dead_features_and_inputs_that_depend_on_each_other() -> None:
    models = strangers()
    with torch.no_grad():
        for m in models:
            m.bn.weight[:3] = 0
            m.bn.bias[:3] = -1  # dead behind the ReLU
            m.a.weight[4] = m.a.weight[5]
    for ridges in ((0.0,), (1e-4, 1e-1)):
        merged = merge(models, images(100), repair=Refit(ridges=ridges))
        assert all(t.isfinite().all() for t in merged.state_dict().values())
        assert all(r.after <= r.before for r in merged.meta["zipfx"].refits)


def test_what_never_varies_does_not_blow_up() -> None:
    """What a constant varies by is rounding; it says nothing about a weight."""
    for few, seed in itertools.product((0, 1000), range(8)):
        torch.manual_seed(seed)
        x = (torch.randn(1, 1, 4).double() * 5).expand(1, 300, 4)
        y = torch.randn(1, 300, 3).double()
        normal, anchor = Normal.of(moments(x, y, few), 4, torch.arange(3)), torch.randn(1, 3, 4)
        for ridge in (0.0, 1e-4, math.inf):
            weight, bias = normal.solve(*normal.start(anchor.double()), ridge)
            assert float(weight.abs().max()) < 10
            assert torch.allclose(x @ weight.mT + bias.unsqueeze(1), y.mean(1), atol=1e-9)


@pytest.mark.slow
def test_positions_can_be_left_out() -> None:
    models, fresh = strangers(), [images(60, 5)] * 2
    all_of_them = merge(models, images(200), repair=Refit(oversampling=1e9))
    some = merge(models, images(200), repair=Refit(oversampling=2))
    bn = gap(models, merge(models, images(200), repair="bn"), fresh)
    assert error(run(all_of_them, fresh[0][0]), run(some, fresh[0][0])) > 1e-4
    assert gap(models, some, fresh) < bn


@pytest.mark.sweep
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("share", [0, 0.3, 0.7])
def test_with_less_memory_batches_run_again_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch, share: float, own: bool
) -> None:
    models, kept, runs = strangers(), dict[int, int](), list[int]()
    settle, start = replay.Room.settle, replay.Batch.start

    def settled(room: replay.Room, batch: replay.Batch) -> None:
        settle(room, batch)
        kept[id(batch)] = batch.nbytes()
        most.append(sum(kept.values()))

    def started(batch: replay.Batch, *lines: Any) -> Any:
        runs.append(batch.run is None)
        return start(batch, *lines)

    monkeypatch.setattr(replay.Room, "settle", settled)
    monkeypatch.setattr(replay.Batch, "start", started)
    data = [Batches(images(60, seed)) for seed in range(2)] if own else images(120)
    most: list[int] = []
    whole = merge(models, data, repair=Refit())
    assert sum(runs) == 6  # every batch once
    needed, most = max(most), []
    kept.clear()
    runs.clear()
    less = merge(models, data, repair=Refit(memory=share * needed))
    assert max(most) <= share * needed
    assert sum(runs) > 6
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, less.state_dict()[name]), name
    assert whole.meta["zipfx"].refits == less.meta["zipfx"].refits


class Refilled(Batches):
    """A loader that fills the same memory for each batch."""

    def __iter__(self) -> Any:
        memory = torch.empty_like(self.batches[0][0])
        for (x,) in self.batches:
            memory.copy_(x)
            yield (memory,)


def test_a_loader_may_fill_the_same_memory_again() -> None:
    models, data = strangers(), images(80)
    kept, refilled = (merge(models, d, repair="refit") for d in (data, Refilled(data)))
    assert torch.equal(run(kept, data[0]), run(refilled, data[0]))


class Tokens(nn.Module):
    """A class token and a position code: at each position a feature has another origin."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.b, self.c = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.place
        y = y + self.c(torch.tanh(self.b(self.norm(y))))
        return self.h(y[:, 0] + y.mean(1))


@torch.no_grad()
def test_a_layer_on_a_stream_with_a_position_code() -> None:
    """It gives the least squares optimum of the merged sum less the stream."""
    models, (x,) = strangers(2, Tokens), images(60, 0, 60)[0]
    merged = merge(models, [(x,)], matcher="identity", repair=Refit(ridges=(0.0,), rounds=0))
    seen: list[dict[str, Tensor]] = []
    for model in (*models, merged):
        values: dict[str, Tensor] = {}
        model.norm.register_forward_hook(lambda _, i, o, v=values: v.update(stream=i[0]))
        model.c.register_forward_hook(lambda _, i, o, v=values: v.update(input=i[0], output=o))
        model(x)
        seen.append({k: v.flatten(0, 1) for k, v in values.items()})
    a, b, ours = seen
    wanted = (a["stream"] + a["output"] + b["stream"] + b["output"]) / 2 - ours["stream"]
    assert error(regression(ours["input"], wanted), ours["output"]) < UNCHANGED
    names = [r.name for r in merged.meta["zipfx"].refits]
    assert names == ["a", "norm", "b", "c", "h"]


def test_what_forward_writes_is_as_without_refit() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.a, self.h = nn.Linear(20, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.h(torch.relu(self.a(x)))

    models, data = strangers(2, Counts), [(torch.randn(16, 20).double(),) for _ in range(4)]
    plain, refitted = (merge(models, data, repair=r) for r in ("none", "refit"))
    assert torch.equal(plain.seen, refitted.seen)


class Levels(nn.Module):
    """One head for two levels; and a loop, where a layer reads what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.h, self.out = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.loop = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.relu(self.a(x))
        one, two = (self.out(torch.relu(self.h(t))) for t in (x, torch.relu(self.b(x))))
        state = two.mean((2, 3))
        for _ in range(2):
            state = torch.tanh(self.loop(state))
        return one, two, state


@torch.no_grad()
@pytest.mark.parametrize("front", ["symbolic", "export"])
def test_a_layer_for_several_levels_is_fitted_to_all(front: str) -> None:
    """It comes nearer at each; one that feeds itself is left alone, and named."""
    torch.manual_seed(0)
    models = [Levels().double() for _ in range(2)]
    data = [(torch.randn(8, 3, 8, 8).double(),) for _ in range(6)]
    wanted = [(a + b) / 2 for a, b in zip(*(m(*data[0]) for m in models), strict=True)]
    missed = []
    for repair in ("none", "refit"):
        merged = merge(models, data, repair=repair, front=front)
        missed.append([error(a, b) for a, b in zip(merged(*data[0]), wanted, strict=True)])
    report = merged.meta["zipfx"]
    assert [r.name for r in report.refits] == ["a", "b", "h", "out"]
    assert "not refitted: loop" in report.notes
    before, after = missed
    assert after[0] < before[0]
    assert after[1] < before[1]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        return torch.cat([self.h(y), self.h(y.square())])


@torch.no_grad()
def test_a_repeated_layer_has_no_norm_folded_in() -> None:
    """Its norms, one for each level, are layers by themselves."""

    class Normed(Levels):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            x = torch.relu(self.a(x))
            pairs = zip(self.norms, (x, torch.relu(self.b(x))), strict=True)
            return tuple(self.out(torch.relu(norm(self.h(t)))) for norm, t in pairs)

    models = [Normed().double().eval() for _ in range(2)]
    data = [(torch.randn(8, 3, 8, 8).double(),) for _ in range(4)]
    report = merge(models, data, repair="refit").meta["zipfx"]
    assert [r.name for r in report.refits] == ["a", "b", "h", "norms.0", "norms.1", "out"]


@torch.no_grad()
def test_all_levels_make_one_system_of_equations() -> None:
    """The least squares optimum of both levels together."""
    models, (x,) = [Both().double() for _ in range(2)], (torch.randn(200, 5).double(),)
    merged = merge(models, [(x,)], matcher="identity", repair=Refit(ridges=(0.0,), rounds=0))
    y = torch.tanh(merged.a(x))
    wanted = sum(m(x) for m in models) / 2
    assert error(regression(torch.cat([y, y.square()]), wanted), merged(x)) < UNCHANGED


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.tied, self.memory = nn.Linear(5, 8), nn.Linear(8, 8), nn.GRU(8, 8)
        self.h = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        return self.h(self.memory(self.tied(torch.relu(self.tied(y))))[0].mean(1))


def test_what_is_not_refitted_is_named() -> None:
    models = [Kept().double() for _ in range(2)]
    data = [(torch.randn(16, 6, 5).double(),) for _ in range(4)]
    report = merge(models, data, repair="refit").meta["zipfx"]
    assert "not refitted: tied, memory.weight_hh_l0" in report.notes
    assert [r.name for r in report.refits] == ["a", "memory.weight_ih_l0", "h"]
    assert re.search("layer +outputs +refitted", str(report))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridges": ()}, r"ridges are \(\): give a tuple of at least one"),
        ({"ridges": (-1.0,)}, r"a ridge is -1\.0: it must be a number, at least 0"),
        ({"rounds": -1}, r"rounds is -1: it must be a whole number, at least 0"),
        ({"oversampling": 0}, r"oversampling is 0: it must be above 0"),
        ({"memory": math.nan}, r"memory is nan: it must be a number, at least 0"),
        ({"logits": 20}, r"logits is 20: it must be True or False"),
    ],
)
def test_settings_out_of_range(options: Any, message: str) -> None:
    with pytest.raises(zipfx.ZipError, match=message):
        Refit(**options)


# ------------------------------------------------------------------ logits
LOGITS = Refit(logits=True)


def divergence(logits: Tensor, wanted: Tensor) -> float:
    of = nn.KLDivLoss(reduction="batchmean", log_target=True)
    return float(of(logits.log_softmax(-1), wanted.log_softmax(-1)))


def test_targets_for_logits_never_lead_away() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.ones(60, 1), torch.randn(60, 5)], 1).double()
    for size in (0.1, 1.0, 10.0):
        wanted = (size * torch.randn(60, 7)).double()
        weights, last = torch.randn(6, 7).double(), math.inf
        for _ in range(30):
            now = divergence(x @ weights, wanted)
            assert now < last
            last = now
            weights = torch.linalg.lstsq(x, _as_likely(wanted, x @ weights)).solution


class Classes(nn.Module):
    """(B, 6) -> logits of nine classes, most of them unlikely."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.b(torch.relu(self.a(x)))))


@torch.no_grad()
@pytest.mark.parametrize("cut", [None, "a"])
def test_logits_are_fitted_by_their_probabilities(cut: str | None) -> None:
    models, x = strangers(2, Classes), torch.randn(500, 6).double()
    for model in models:
        model.h.weight.mul_(20)
    found = []
    for repair in (Refit(), LOGITS):
        merged = merge(models, [(x,)], partial=cut, matcher="permute", repair=repair)
        own = [m(x) for m in models]
        heads = [merged(x)] if cut is None else [*merged(x)]
        wanted = [torch.stack(own).mean(0)] if cut is None else own
        found.append(sum(divergence(*pair) for pair in zip(heads, wanted, strict=True)))
    assert found[1] < 0.98 * found[0]


def test_logits_of_an_exact_merge_stay_and_batches_do_not_matter() -> None:
    (a, b), x = strangers(), images(6, 1)[0]
    exact = merge([a, permuted(a, x)], images(60), matcher="permute", repair=LOGITS)
    assert error(run(a, x), run(exact, x)) < UNCHANGED
    one, many = (merge([a, b], images(100, 0, n), repair=LOGITS) for n in (100, 7))
    assert error(run(one, x), run(many, x)) < UNCHANGED


def test_what_is_no_output_is_fitted_as_it_was() -> None:
    def hidden(repair: Refit) -> dict[str, Tensor]:
        merged = merge(strangers(), images(60), matcher="permute", repair=repair)
        return {n: t for n, t in merged.state_dict().items() if not n.startswith("h.")}

    before, after = hidden(Refit()), hidden(LOGITS)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Twisted(nn.Module):
    """Norms in another order than what they normalise; one writes what the other has read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(3, 8, 3, bias=False)
        self.of_a, self.of_b, self.h = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        b = self.of_b(b).relu_()
        return self.h((torch.tanh(b) + torch.relu(self.of_a(a))).mean((2, 3)))


class OneNorm(nn.Module):
    """A norm without parameters, for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.h = nn.BatchNorm2d(8, affine=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.b(torch.relu(self.norm(self.a(x))))))
        return self.h(y.mean((2, 3)))


class Broadcast(nn.Module):
    """Sums of tensors that differ in shape: a position code, and what is for all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.place = nn.Conv2d(3, 8, 1), nn.Parameter(torch.randn(8, 1, 1))
        self.b, self.h = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.tanh(self.place)
        x = torch.relu(self.a(x) + place)
        x = torch.relu(x + self.b(x.mean((2, 3), keepdim=True)))
        return self.h(x.mean((2, 3)))


class Rows(nn.Module):
    """A norm of another axis than the one along which the layer's features lie."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.h = nn.Linear(8, 12), nn.BatchNorm1d(24), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.norm(self.a(x.flatten(1, 2)))).mean(1))


class Square(Rows):
    """The same, of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(8, 24), nn.Linear(24, 3)


class Constant(nn.Module):
    """Layers of what is not data, with no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.token, self.b = (
            nn.Linear(8, 12),
            nn.Parameter(torch.randn(5)),
            nn.Linear(5, 12),
        )
        self.h = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.a(x) + self.b(self.token)).mean((1, 2)))


class Computed(nn.Module):
    """Weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.a, self.b, self.h = norm(nn.Conv2d(3, 8, 1)), nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cls", "left"),
    [
        (Twisted, ""),
        (OneNorm, ""),
        (Broadcast, "place"),
        (Rows, "norm"),
        (Square, "norm"),
        (Constant, "token, b"),
        (Computed, ""),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_layers_in_odd_places(cls: Any, left: str, own: bool) -> None:
    """What is done to each is right: no layer is worse for it on what it was fitted to."""
    models, x = strangers(2, cls), images(6, 1)[0]
    data: Any = [Batches(images(60, s)) for s in (0, 2)] if own else images(60)
    merged = merge(models, data, matcher="permute", repair=Refit(oversampling=1e9))
    notes = [n for n in merged.meta["zipfx"].notes if "not refitted" in n]
    assert notes == [f"not refitted: {left}"] * bool(left)
    plain = merge(models, data, matcher="permute")
    both = [[(x,) for (x,) in images(60, s)] for s in ((0, 2) if own else (0, 0))]
    assert gap(models, merged, both) < gap(models, plain, both)
    model = models[0]
    same = merge([model, permuted(model, x)], data, matcher="permute", repair="refit")
    assert error(run(model, x), run(same, x)) < UNCHANGED
    assert not any(r.changed for r in same.meta["zipfx"].refits)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, 4), "node 'a' fails on a calibration batch: mat1 and mat2"),
        (
            {"y": torch.zeros(3, 20)},
            "a calibration batch does not fit the model's forward: missing",
        ),
    ],
)
def test_a_batch_that_does_not_fit(bad: Any, message: str) -> None:
    data: list[Any] = [torch.zeros(8, 20).double(), bad]
    with pytest.raises(zipfx.ZipError, match=message):
        zipfx.zip(strangers(2, Plain), data, matcher="weights", progress=False)


def test_refit_needs_data() -> None:
    with pytest.raises(zipfx.ZipError, match=r"calib_loader=None works only with"):
        zipfx.zip(strangers(), None, matcher="weights", repair="refit")
