"""Rows that a model sends somewhere by what it has computed: other rows in every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, permuted, run, unharmed
from zipfx.analysis.rows import Origins, Rows


class Experts(nn.Module):
    """The best expert of each row is run on the rows that chose it; in two ways to say so."""

    def __init__(self, listed: bool = True, count: int = 3) -> None:
        super().__init__()
        self.listed = listed
        self.i, self.g, self.h = nn.Linear(5, 8), nn.Linear(8, count), nn.Linear(8, 3)
        self.up = nn.ModuleList([nn.Linear(8, 4) for _ in range(count)])
        self.norm = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(count)])
        self.dn = nn.ModuleList([nn.Linear(4, 8) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        r = torch.relu(self.i(x))
        best = self.g(r).argmax(-1)
        y = torch.zeros_like(r)
        for e, (up, norm, dn) in enumerate(zip(self.up, self.norm, self.dn)):
            if self.listed:
                rows = torch.where(best == e)[0]
                y = y.index_add(0, rows, dn(torch.tanh(norm(up(r[rows])))))
            else:
                mask = best == e
                y[mask] = dn(torch.tanh(norm(up(r[mask]))))
        return self.h(r + y)


class Dropped(nn.Module):
    """The tokens with the largest scores go on; a mean over them comes back to one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.score, self.a = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 8)
        self.b, self.h = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(torch.relu(self.i(x))))
        kept = self.score(y).squeeze(-1).topk(3, dim=1).indices
        y = y.gather(1, kept[..., None].expand(-1, -1, 8))
        return self.h(torch.relu(self.b(y)).mean(1))


class Padded(nn.Module):
    """A mask that is an input: the same rows in all models, perhaps none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        z = torch.zeros(x.shape[0], 6, dtype=x.dtype)
        z[mask] = torch.relu(self.b(y[mask]))
        return self.h(z)


def built(net: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return net().double().eval()


def rows(count: int = 40, *more: int) -> list[tuple[Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(count, *more, 5).double(),) for _ in range(5)]


def mask_of(count: int, share: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.rand(len(x)) < share


NETS: dict[str, tuple[Callable[[], nn.Module], list[tuple[Any, ...]], set[str]]] = {
    "listed": (Experts, rows(), {"up.0", "up.1", "up.2"}),
    "masked": (lambda: Experts(listed=False), rows(), {"up.0", "up.1", "up.2"}),
    "dropped": (Dropped, rows(20, 6), {"b"}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "bn", "refit"])
@pytest.mark.parametrize("matcher", ["permute", "zip", "weights", "identity", "optimal"])
@pytest.mark.parametrize("name", NETS)
def test_strangers_are_merged_and_it_is_said_how(name: str, matcher: str, repair: str) -> None:
    net, data, blind = NETS[name]
    models = [built(net, 0), built(net, 1)]
    merged = unharmed(models, lambda: merge(models, data, matcher=matcher, repair=repair))
    assert isinstance(merged, nn.Module), merged
    assert torch.isfinite(run(merged, data[0])).all()
    notes = [n for n in merged.meta["zipfx"].notes if "since rows are sent there" in n]
    if matcher in ("weights", "identity"):
        assert not notes
    else:
        assert set(notes[0].rpartition(": ")[2].split(", ")) == blind
    if repair == "refit":
        refitted = {r.name for r in merged.meta["zipfx"].refits}
        assert not any(n.startswith(("up", "dn", "norm", "b")) for n in refitted)
        assert "i" in refitted
        assert "h" in refitted or name == "dropped"


@pytest.mark.sweep
@pytest.mark.parametrize("matcher", ["permute", "weights"])
@pytest.mark.parametrize("name", NETS)
def test_law_3(name: str, matcher: str) -> None:
    """Which rows an expert gets does not depend on the order of features: so weights tell."""
    net, data, _ = NETS[name]
    model = built(net, 0)
    twin = permuted(model, data[0])
    assert error(run(model, data[0]), run(twin, data[0])) < EXACT
    merged = merge([model, twin], data, matcher=matcher)
    assert error(run(model, data[0]), run(merged, data[0])) < EXACT
    cut = "i" if name != "dropped" else "a"
    merged = merge([model, twin], data, matcher=matcher, partial=cut, repair="refit")
    assert heads_error(merged, [run(model, data[0])] * 2, data[0]) < EXACT


def test_an_expert_that_nothing_chooses_is_a_note() -> None:
    models = [built(Experts, 0), built(Experts, 1)]
    for model in models:
        with torch.no_grad():
            model.g.bias[1] = -100
    report = merge(models, rows(), repair="bn").meta["zipfx"]
    (note,) = (n for n in report.notes if "fewer than two values came" in n)
    assert note.endswith(": norm_1")
    assert {s.name for s in report.spaces} == {"i", "up.0", "up.1", "up.2"}


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("repair", ["none", "refit"])
def test_rows_that_the_data_chooses_are_the_same_in_all_models(share: float, repair: str) -> None:
    model = built(Padded, 0)
    data = [(x, torch.rand(len(x)) < share) for (x,) in rows()]
    example = (data[0][0], torch.rand(len(data[0][0])) < 0.5)
    twin = permuted(model, example)
    merged = merge([model, twin], data, matcher="permute", example_inputs=example, repair=repair)
    assert error(run(model, example), run(merged, example)) < EXACT
    notes = merged.meta["zipfx"].notes
    assert any("since nothing varies there on the calibration data: b" in n for n in notes) == (
        share == 0
    )
    assert not any("since rows are sent there" in n for n in notes)


def test_what_is_put_back_is_where_it_was() -> None:
    origins, aten = Origins(), torch.ops.aten
    x, index, given = torch.randn(6, 3), torch.tensor([4, 1]), torch.tensor([0, 2])
    origins.tell(x, Rows.LEARNED)
    origins.tell(index, Rows.LEARNED)
    taken = x[index]
    assert origins.after(aten.index.Tensor, (x, [index]), {}) == Rows.LEARNED | Rows.CHOSEN
    assert origins.after(aten.index.Tensor, (x, [given]), {}) == Rows.LEARNED
    origins.tell(taken, Rows.LEARNED | Rows.CHOSEN)
    assert origins.after(aten.relu.default, (taken,), {}) == Rows.LEARNED | Rows.CHOSEN
    assert origins.after(aten.index_put.default, (x, [index], taken), {}) == Rows.LEARNED
    assert origins.after(aten.nonzero.default, (x > 0,), {}) == Rows.GIVEN  # nothing is known
    weight = nn.Parameter(torch.randn(5, 3))
    origins.tell(weight, Rows.LEARNED)
    assert origins.after(aten.index.Tensor, (weight, [index]), {}) == Rows.LEARNED


def test_places_say_so() -> None:
    spaces = zipfx.analyze(built(Experts, 0), rows()[0])
    chosen = {s.name: {p.node for p in s.places if p.chosen} for s in spaces}
    assert chosen["up.0"] == {p.node for p in spaces["up.0"].places}
    assert chosen["i"]
    assert "add" not in chosen["i"]
    assert any(p.read and not p.chosen for p in spaces["i"].places)
