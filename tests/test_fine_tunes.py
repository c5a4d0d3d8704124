"""The benchmark of fine-tunes: its rivals by what they are defined to give, and a small run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zipfx
from benchmarks import evaluate, fine_tunes, nearer, rivals, tuned
from benchmarks.tuned import Samples


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight.data = torch.tensor(weight)
    return layer


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    ).eval()


def near(a: nn.Module, b: nn.Module, within: float = 1e-5) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return all(torch.allclose(one[n].double(), other[n].double(), atol=within) for n in one)


def test_task_arithmetic_between_the_base_and_the_average() -> None:
    base, a, b = net(), net(), net()
    before = [copy.deepcopy(m.state_dict()) for m in (base, a, b)]
    assert near(rivals.task_arithmetic(base, [a, b], 0.5), rivals.averaged([a, b]))
    assert near(rivals.task_arithmetic(base, [a, b], 0), base)
    for model, state in zip((base, a, b), before, strict=True):
        assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())


def test_ties_takes_the_large_changes_of_the_sign_that_wins() -> None:
    base = linear([[1.0, 1.0, 1.0, 1.0]])
    a, b = linear([[1.4, 1.1, 0.0, 1.0]]), linear([[1.2, 1.0, 1.5, 1.1]])
    merged = rivals.ties(base, [a, b], factor=2.0, density=0.5)
    # of a: +0.4 and -1; of b: +0.2 and +0.5, which -1 outvotes
    expected = torch.tensor([[1 + 2 * 0.3, 1.0, 1 - 2 * 1.0, 1.0]])
    assert torch.allclose(merged.state_dict()["weight"], expected)


def test_regmean_is_least_squares_over_both_tasks() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = nn.Linear(4, 3), nn.Linear(4, 3)
    x, y = (torch.randn(50, 4, generator=generator) for _ in range(2))
    (merged,) = rivals.regmean([a, b], [x, y], [1.0])
    wanted = torch.cat([x @ a.weight.T, y @ b.weight.T])
    expected = torch.linalg.lstsq(torch.cat([x, y]), wanted).solution.T
    assert torch.allclose(merged.state_dict()["weight"], expected, atol=1e-4)


def test_regmean_and_fisher_of_a_model_with_itself() -> None:
    model, x = net(), torch.randn(20, 2, 4, 4)
    for merged in rivals.regmean([model, model], [x, x], [0.0, 0.9, 1.0]):
        assert near(merged, model, 1e-4)
    for merged in rivals.fisher([model, model], [x, x], [0.1, 0.5]):
        assert near(merged, model)


def test_fisher_follows_the_model_that_is_sure_of_a_weight() -> None:
    a, b = linear([[1.0, 0.0], [0.0, 1.0]]), linear([[0.0, 0.5], [2.0, 0.0]])
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])  # each reads one input only
    (merged,) = rivals.fisher([a, b], [x, y], [0.5])
    expected = torch.tensor([[1.0, 0.5], [0.0, 0.0]])
    assert torch.allclose(merged.state_dict()["weight"], expected, atol=1e-4)


def test_measures() -> None:
    labels = torch.tensor([[1, 0]])
    given = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])
    task = Samples(labels, labels)
    prose, code = tuned.Bits().scores([given, given], [task, task])
    assert prose == code == pytest.approx(1.5)  # of 1/4 and 1/2: 2 and 1 bits

    def sure(*classes: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(classes), 10).float()

    tasks = [Samples(torch.zeros(2), torch.tensor(c)) for c in ((0, 1), (5, 6))]
    found = tuned.Percent().scores([sure(0, 1), sure(0, 6)], tasks)
    # class 0 for a 5 is wrong among all; among its own five nothing is said, and 5 is the first
    assert found == (75.0, 100.0)


def test_a_run_has_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fine_tunes, "FACTORS", (0.5, 1.0))
    monkeypatch.setattr(fine_tunes, "TIES", ((1.0, 0.2),))
    monkeypatch.setattr(fine_tunes, "SHARES", (0.5,))
    monkeypatch.setattr(fine_tunes, "SHRINKS", (0.9,))

    def small(seed: int) -> tuned.Subject:
        return tuned.characters(seed, steps=(2, 2), samples=12, width=8)

    monkeypatch.setitem(tuned.SUBJECTS, "characters", small)
    out = tmp_path / "table.md"
    fine_tunes.main(["--subjects", "characters", "--seeds", "1", "--out", str(out)])
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    names = [row[0].removeprefix("| ") for row in rows]
    assert {"base", "ensemble, twice the cost", "averaging", "zip, none", "zip, refit"} <= {*names}
    assert {f"{n}, chosen" for n in ("TIES", "RegMean", "task arithmetic")} <= {*names}
    assert "zip, bn" not in names  # there are none
    assert all(0 < float(row[1]) < 10 for row in rows[2:])


def test_norms_are_measured_again() -> None:
    model = net()
    tasks = (Samples(torch.randn(8, 2, 4, 4), torch.zeros(8)),) * 2
    subject = tuned.Subject("", model, (model, net()), tasks, tasks, tasks, tuned.Percent())
    assert subject.has_norms
    run = fine_tunes.Run(subject, {})
    assert near(run.measured(model), evaluate.reset_batch_norm(model, run.mixed))


def test_a_head_by_likelihood_is_nearer_to_what_the_models_hold_likely() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    tunes = [copy.deepcopy(base), copy.deepcopy(base)]
    for tune in tunes:
        for p in tune.parameters():
            p.data += 0.3 * torch.randn_like(p)
    tasks = [torch.randn(100, 4) + shift for shift in (-1, 1)]

    def apart(model: nn.Module) -> float:
        pairs = zip(tunes, tasks, strict=True)
        gaps = [(t(x).softmax(1) * (t(x).softmax(1) / model(x).softmax(1)).log()) for t, x in pairs]
        return sum(float(gap.detach().sum()) for gap in gaps)

    merged = rivals.averaged(tunes)
    before = copy.deepcopy(merged.state_dict())
    found = nearer.by_likelihood(merged, tunes, tasks)
    assert apart(found) < apart(merged)
    assert all(torch.equal(before[n], t) for n, t in merged.state_dict().items())
    same = [n for n, t in found.state_dict().items() if torch.equal(before[n], t)]
    assert same == ["0.weight", "0.bias"]


def test_a_refit_towards_the_base_begins_there() -> None:
    base, a, b = net(), net(), net()
    for model in (base, a, b):
        for name in ("1.weight", "1.bias"):
            nn.init.normal_(model.get_parameter(name))
    x = torch.randn(1, 2, 4, 4)  # of one image nothing is refitted
    merged = zipfx.zip(
        [a, b], [[(x,)], [(x,)]], matcher="identity", repair=nearer.towards(base), progress=False
    )
    for name, t in base.named_parameters():
        assert torch.equal(merged.get_parameter(name), t) == (name[0] != "1"), name
