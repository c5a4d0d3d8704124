"""Models that compute the same are one architecture, whatever their code looks like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, parameters, run, unharmed
from tests.helpers.variants import (
    DATA,
    IMAGES,
    WAYS,
    Functions,
    OtherEps,
    OtherNames,
    Reference,
    built,
    with_weights_of,
)
from zipfx import ZipError


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "refit"])
@pytest.mark.parametrize("other", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_a_permuted_copy_in_other_code_zips_to_the_model(
    first: Callable[[], nn.Module], other: Callable[[], nn.Module], repair: str
) -> None:
    """Law 3 across implementations; and law 7: the merge has the modules of the first."""
    model = built(first, 0)
    if OtherEps in (first, other) and first is not other:
        theirs = with_weights_of(other, model)
        with torch.no_grad():  # the same function: what eps adds is taken from the variance
            gap = (1e-2 - 1e-5) * (1 if other is OtherEps else -1)
            for m in theirs.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.running_var.sub_(gap)
    else:
        theirs = with_weights_of(other, model)
    expected = run(model, (IMAGES,))
    assert error(expected, run(theirs, (IMAGES,))) < EXACT
    spaces = zipfx.analyze(theirs, IMAGES)
    twin = spaces.permuted(theirs, spaces.random_permutations(1))
    merged = unharmed(
        [model, twin], lambda: merge([model, twin], DATA, matcher="permute", repair=repair)
    )
    assert isinstance(merged, nn.Module), merged
    assert error(expected, run(merged, (IMAGES,))) < EXACT
    assert parameters(merged) == parameters(model)
    fresh = built(first, 5)
    fresh.load_state_dict(merged.state_dict(), strict=True)
    assert error(expected, run(fresh, (IMAGES,))) < EXACT
    notes = [n for n in merged.meta["zipfx"].notes if "written differently" in n]
    assert bool(notes) == (first is not other)


CUTS = {
    Reference: ["conv", "act", "pool", "norm", "fc", "ln"],
    OtherNames: ["stem.1", "stem", "body.n", "head.0", "head"],
}


@pytest.mark.sweep
@pytest.mark.parametrize("other", [Functions, OtherNames, OtherEps])
@pytest.mark.parametrize(
    ("first", "cut"), [(net, cut) for net, cuts in CUTS.items() for cut in cuts]
)
def test_heads_stay_in_the_code_of_their_models(
    first: Callable[[], nn.Module], cut: str, other: Callable[[], nn.Module]
) -> None:
    model, stranger = built(first, 0), built(other, 1)
    merged = merge([model, stranger], DATA, partial=cut, repair="refit")
    assert len(run(merged, (IMAGES,))) == 2
    theirs = with_weights_of(other, model)
    if other is not OtherEps:
        spaces = zipfx.analyze(theirs, IMAGES)
        twin = spaces.permuted(theirs, spaces.random_permutations(1))
        exact = merge([model, twin], DATA, partial=cut, matcher="permute")
        for k, output in enumerate(run(exact, (IMAGES,))):
            assert error(run(model, (IMAGES,)), output) < EXACT
            assert error(output, run(zipfx.head(exact, k), (IMAGES,))) < EXACT
    own = {name for name, _ in stranger.named_parameters()}
    kept = {name for name, _ in merged.task_heads[1].named_parameters()}
    assert kept
    assert kept <= own


def test_a_stranger_contributes_its_own_weights() -> None:
    """Averaging by position is the average of both, whoever wrote the code."""
    a, b = built(Reference, 0), built(OtherNames, 1)
    merged = merge([a, b], DATA, matcher="identity")
    expected = (a.conv.weight + b.stem[1].weight) / 2
    assert error(expected.detach(), merged.get_parameter("conv.weight").detach()) < EXACT


@pytest.mark.parametrize("shape", [(1, 8), (12, 8), (6, 8)])
def test_a_weight_may_be_either_summand(shape: tuple[int, int]) -> None:
    """Repeated, cut out, or as it is."""

    class Placed(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.place = first, nn.Parameter(torch.randn(shape))
            self.a, self.h = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y, place = self.a(x), self.place
            place = place.expand(6, 8) if shape[0] == 1 else place[:6] if shape[0] > 6 else place
            return self.h(torch.relu(place + y if self.first else y + place))

    models = [Placed(True).double().eval(), Placed(False).double().eval()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 6, 8).double()
    merged = merge(models, [(x,)] * 2, matcher="permute")
    assert error(run(models[0], (x,)), run(merged, (x,))) < EXACT


# ------------------------------------------------------------------ libraries
@pytest.mark.slow
def test_resnets_of_torchvision_and_timm() -> None:
    timm = pytest.importorskip("timm")
    model = built(torchvision.models.resnet18, 0)
    theirs = built(lambda: timm.create_model("resnet18", drop_path_rate=0.1, drop_rate=0.2), 1)
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 64, 64).double()
    spaces = zipfx.analyze(theirs, x, verify=False)
    twin = spaces.permuted(theirs, spaces.random_permutations(1))
    data = [(torch.randn(8, 3, 64, 64).double(),) for _ in range(6)]
    merged = merge([model, twin], data, matcher="permute")
    assert error(run(model, (x,)), run(merged, (x,))) < EXACT


# ------------------------------------------------------------------ advice that can be followed
class Deep(nn.Module):
    def __init__(self, *blocks: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(n)))
            for n in blocks
        )
        self.h = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.stem(x))
        for i, stage in enumerate(self.stages):
            y = stage(y) * (1 + i)
        return self.h(y)


ROWS = [(torch.randn(32, 4),) for _ in range(3)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "other", "cut", "says"),
    [
        (Deep(2), Deep(2, width=7), "h", r"They have no layer in common that could be shared"),
        (Deep(2, 1), Deep(3, 1), "stages.1", r"the last cut that works is partial='stages\.0'"),
        (Deep(3, 1), Deep(2, 1), "stages.1", r"the last cut that works is partial='stages\.0\.1'"),
        (Deep(3, 1), Deep(2, 1), None, r"the last cut that works is partial='stages\.0\.1'"),
        (Deep(3, 1), Deep(2, 1), "stages.0.2", r"last cut that works is partial='stages\.0\.1'"),
    ],
)
def test_the_last_cut_that_works_works(
    first: nn.Module, other: nn.Module, cut: str | None, says: str
) -> None:
    with pytest.raises(ZipError, match=says) as raised:
        merge([first, other], ROWS, partial=cut)
    found = re.search(r"partial='([^']*)'", str(raised.value))
    if found is not None:
        assert len(run(merge([first, other], ROWS, partial=found.group(1)), ROWS[0])) == 2


def test_a_stage_that_is_longer_in_one_model() -> None:
    """The cut is where both have it, whichever comes first, and a note says so."""
    short, long = Deep(2, 1), Deep(3, 1)
    merged = {}
    for name, models in (("short first", [short, long]), ("long first", [long, short])):
        merged[name] = merge(models, ROWS, partial="stages.0", matcher="permute")
        (note,) = (n for n in merged[name].meta["zipfx"].notes if "stages.0" in n)
        assert "inside" in note
    a, b = (run(merged[name], ROWS[0]) for name in merged)
    assert error(a[0], b[1]) < 1e-5
    assert error(a[1], b[0]) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ("stages.0.7", r"near it in the graph are \['stages\.0\.0', 'stages\.0\.1'\]"),
        ("stages.5.1", r"names no module; near it in the graph are \['stages\.0', 'stages\.1'\]"),
        ("stages.0.1.0.weight", r"lies inside 'stages\.0\.1\.0', a Linear that is one node"),
        ("stag", r"names no module; near it in the graph are \['stem', 'stages', 'h'\]"),
        ("", r"near it in the graph are \['stem', 'stages', 'h'\]"),
    ],
)
def test_names_that_are_suggested_are_near_in_the_graph(cut: str, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        merge([Deep(2, 1), Deep(2, 1)], ROWS, partial=cut)


def test_a_container_that_is_not_called_can_be_the_cut() -> None:
    merged = merge([Deep(2, 1), Deep(2, 1)], ROWS, partial="stages")
    assert merged.meta["zipfx"].layers == (4, 5)


# ------------------------------------------------------------------ what is not the same
class Variant(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.a, self.b = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(2, 6, 3, padding=1)
        self.c = nn.Conv2d(6, 6, 3, padding=options.get("padding", 1))
        self.ln, self.h = nn.LayerNorm(6, options.get("eps", 1e-5)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.a(x), self.b(x)
        y = p - q if not self.options.get("swapped") else q - p
        y = F.leaky_relu(y, self.options.get("slope", 0.1))
        y = self.c(y) * self.options.get("factor", 2)
        return self.h(self.ln(y.mean((2, 3))))


@pytest.mark.parametrize(
    "options",
    [{"slope": 0.2}, {"factor": 3}, {"padding": 0}, {"eps": 1e-3}, {"swapped": True}],
    ids=str,
)
def test_settings_that_matter_matter(options: dict[str, Any]) -> None:
    data = [(torch.randn(8, 2, 6, 6),)]
    if options == {"swapped": True}:  # which of two like layers comes first
        a, b = Variant().double(), Variant(swapped=True).double()
        with torch.no_grad():
            for name, other in (("a", "b"), ("b", "a"), ("c", "c"), ("ln", "ln"), ("h", "h")):
                getattr(b, name).load_state_dict(getattr(a, other).state_dict())
        x = (data[0][0].double(),)
        assert error(run(a, x), run(b, x)) < EXACT
        try:  # either it is found out which is which, or it is refused
            merged = merge([a, b], [x] * 3, matcher="permute")
        except ZipError:
            return
        assert error(run(a, x), run(merged, x)) < EXACT
        return
    with pytest.raises(ZipError, match="do not correspond"):
        merge([Variant(), Variant(**options)], data)


def test_inputs_must_be_those_of_model_0() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.h(self.a(x).relu())
            return y

    class Two(One):
        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            y: Tensor = self.h(self.a(x).relu() * scale)
            return y

    with pytest.raises(zipfx.ZipError, match=r"model 1 uses an input 'scale'.*one signature"):
        zipfx.zip([One(), Two()], [torch.randn(4, 5)], partial="a", progress=False)
