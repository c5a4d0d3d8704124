"""Models that compute the same are one architecture, whatever their code looks like."""

from __future__ import annotations

import copy
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
from zipfx import ZipError
from zipfx.trace.align.alignment import aligned
from zipfx.trace.align.cut import last_node
from zipfx.trace.align.numbering import number
from zipfx.trace.tracing import trace


class Reference(nn.Module):
    """A convolutional block with a shortcut, a normed linear layer, attention by hand, a head."""

    eps = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, eps=self.eps)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.block, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, eps=self.eps, affine=False)
        self.drop, self.fc, self.ln = nn.Dropout(0.5), nn.Linear(8, 6), nn.LayerNorm(6)
        self.h = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.act(self.bn(self.conv(x))))
        y = y + self.norm(self.block(y))
        y = self.drop(y.mean((2, 3)))
        return self.h(F.gelu(self.ln(self.fc(y))))


class Functions(Reference):
    """Functions in place of modules, other forms of the same, in another place."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.bn(self.conv(x))), kernel_size=2)
        y += self.norm(self.block(y))
        y = F.dropout(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1), training=self.training)
        return self.h(F.gelu(self.ln(self.fc(y))))


class OtherNames(nn.Module):
    """Containers and names of its own, one activation for all, no-ops here and there."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.stem = nn.Sequential(
            nn.Identity(), nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8, eps, 0.3),
        )  # fmt: skip
        norm = nn.BatchNorm2d(8, eps, affine=False)
        self.body = nn.ModuleDict({"a": nn.Conv2d(8, 8, 1), "n": norm})
        self.head = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        y = torch.clone(self.relu(self.stem(images)))
        y = F.max_pool2d(y, (2, 2), stride=(2, 2))
        y = self.body["n"](self.body["a"](y)).add_(y)
        y = y.mean(dim=[-1, -2], keepdim=True).squeeze(-1).squeeze(-1)
        return self.last(self.head(y.contiguous()))


class OtherEps(OtherNames):
    def __init__(self) -> None:
        super().__init__(eps=1e-2)


def randomised(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                for t in (m.running_mean, m.running_var, m.weight, m.bias):
                    if t is not None:
                        t.copy_(torch.rand(t.shape, generator=generator) + 0.5)
    return model.double().eval()


def built(net: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return randomised(net(), seed)


def with_weights_of(net: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    """Another implementation, with the same weights in the order in which they are registered."""
    twin = built(net, 9)
    pairs = zip(sorted_state(twin), sorted_state(model), strict=True)
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs)
    return twin


def sorted_state(model: nn.Module) -> list[Tensor]:
    return [t for t in model.state_dict().values() if t.is_floating_point()]


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()
DATA = [(torch.randn(32, 3, 8, 8).double(),) for _ in range(6)]
WAYS = [Reference, Functions, OtherNames, OtherEps]


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


def test_eps_is_made_up_for_in_the_weight_where_variances_are_small() -> None:
    class Small(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.a, self.n = nn.Linear(4, 6), nn.BatchNorm1d(6, eps)
            self.h = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.relu(self.n(self.a(x))))

    torch.manual_seed(0)
    models = [Small(1e-3).double().eval(), Small(1e-6).double().eval()]
    for model in models:
        model.n.running_var.fill_(1e-4)
    data = [(torch.randn(16, 4).double(),)] * 2
    merged = merge(models, data, partial="h")
    for output, model in zip(run(merged, data[0]), models, strict=True):
        assert output.shape == run(model, data[0]).shape
    notes = [n for n in merged.meta["zipfx"].notes if "eps" in n]
    assert notes[1:] == [
        "BatchNorm's eps is 1e-06 in model 1 and 0.001 in model 0, in 1 layers: made up for in the "
        "statistics"
    ]
    same = copy.deepcopy(models[0])
    same.n.eps = 1e-6
    with torch.no_grad():
        same.n.weight.mul_(((same.n.running_var + 1e-6) / (same.n.running_var + 1e-3)).sqrt())
    assert error(run(models[0], data[0]), run(same, data[0])) < EXACT
    exact = merge([models[0], same], data, matcher="permute")
    assert error(run(models[0], data[0]), run(exact, data[0])) < EXACT
    for model in (models[0], same):
        model.n.weight = model.n.bias = None
    with pytest.raises(ZipError, match=r"its variance is too small to make up for that"):
        merge([models[0], same], data)


@pytest.mark.parametrize("eps", [(1e-5, 1e-3), (1e-3, 1e-5), (1e-5, 2e-5), (1e-2, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.half])
@pytest.mark.parametrize("partial", [None, "4"])
def test_eps_is_made_up_for_in_every_dtype(
    eps: tuple[float, float], dtype: torch.dtype, partial: str | None
) -> None:
    """Also where some variances are too small: those features are scaled in the weight."""

    def make(eps: float) -> nn.Module:
        torch.manual_seed(1)
        norms = [nn.BatchNorm2d(6, eps), nn.BatchNorm2d(6, eps)]
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.running_var.copy_(torch.tensor([1e-6, 2e-5, 3e-3, 0.2, 1.0, 30.0]))
        first, second = ([nn.Conv2d(c, 6, 3), n] for c, n in zip((3, 6), norms, strict=True))
        layers = [*first, nn.ReLU(), *second, nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)]
        return nn.Sequential(*layers).to(dtype).eval()

    models = [make(eps[0]), make(eps[1])]
    x = torch.randn(8, 3, 8, 8).mul(0.01).to(dtype)  # half overflows soon
    expected = run(models[1], (x,))
    modules = [trace(m) for m in models]
    adopted = aligned(modules, last_node(modules[0], partial), [x], partial).modules[1]
    assert adopted.get_submodule("zipfx_trunk.1" if partial else "1").eps == eps[0]
    bound = max(1e-12, 60 * torch.finfo(dtype).eps)
    assert error(expected.double(), run(adopted, (x,)).double()) < bound
    notes = merge(models, [(x,)], partial=partial).meta["zipfx"].notes
    assert any("made up for" in note for note in notes)


# ------------------------------------------------------------------ weights of like first use
class Glu(nn.Module):
    def __init__(self, order: str = "value gate") -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(8, 16), nn.Linear(8, 16)
        self.order = order.split()

    def forward(self, x: Tensor) -> Tensor:
        y = {name: getattr(self, name)(x) for name in self.order}
        return y["value"] * torch.sigmoid(y["gate"])


class Attention(nn.Module):
    """order: in which the projections are evaluated; names: theirs, for query, key and value."""

    def __init__(self, order: str = "q k v", names: str = "q k v") -> None:
        super().__init__()
        self.names = dict(zip("qkv", names.split(), strict=True))
        for name in sorted(self.names.values()):
            self.add_module(name, nn.Linear(8, 8))
        self.order = order.split()

    def forward(self, x: Tensor) -> Tensor:
        y = {name: getattr(self, self.names[name])(x) for name in self.order}
        return torch.softmax(y["q"] @ y["k"].transpose(-1, -2), -1) @ y["v"]


def followed(block: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for t in block.parameters():
        nn.init.normal_(t, 0, 0.3)
    width = 16 if isinstance(block, Glu) else 8
    return nn.Sequential(block, nn.ReLU(), nn.Linear(width, 3)).double().eval()


@pytest.mark.parametrize("partial", [None, "0", "1", "first of block", "last of block"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Glu(), Glu("gate value")),
        (Attention(), Attention("v k q")),
        (Attention(), Attention("k v q")),
        (Attention("v q k"), Attention("q v k")),
    ],
)
def test_branches_may_be_evaluated_in_any_order(
    one: nn.Module, other: nn.Module, partial: str | None
) -> None:
    """Law 3: the same weights correspond, though their first uses look alike."""
    if partial and "block" in partial:
        partial = f"0.{one.order[0 if 'first' in partial else -1]}"
    model, twin = followed(copy.deepcopy(one)), followed(copy.deepcopy(other))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(6, 5, 8).double()
    expected = run(model, (x,))
    assert error(expected, run(twin, (x,))) < EXACT
    spaces = zipfx.analyze(twin, x)
    twin = spaces.permuted(twin, spaces.random_permutations(1))
    merged = merge([model, twin], [(x,)] * 2, partial=partial, matcher="permute")
    for output in run(merged, (x,)) if partial else [run(merged, (x,))]:
        assert error(expected, output) < EXACT
    assert partial != "1" or not [
        n for n, _ in merged.task_heads[1].named_parameters() if "0." in n
    ]


@pytest.mark.parametrize(("order", "names"), [("v k q", "a b c"), ("k v q", "v q k")])
def test_what_is_computed_counts_more_than_names(order: str, names: str) -> None:
    """Two layers of attention, the projections of which have other names, or misleading ones."""

    def make(*given: str) -> nn.Module:
        torch.manual_seed(0)
        blocks = [Attention(*given), Attention(*given)]
        return nn.Sequential(*blocks, nn.Linear(8, 3)).double().eval()

    model, twin = make(), make(order, names)
    for i in range(2):
        for ours, theirs in zip("qkv", names.split(), strict=True):
            getattr(twin[i], theirs).load_state_dict(getattr(model[i], ours).state_dict())
    twin[2].load_state_dict(model[2].state_dict())
    x = torch.randn(6, 5, 8).double()
    expected = run(model, (x,))
    assert error(expected, run(twin, (x,))) < EXACT
    for partial in (None, "0", "1"):
        merged = merge([model, twin], [(x,)] * 2, partial=partial, matcher="identity")
        for output in run(merged, (x,)) if partial else [run(merged, (x,))]:
            assert error(expected, output) < EXACT


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


def test_what_the_trunk_hands_over_must_be_computed_in_each_model() -> None:
    """Else its head would do without the trunk, which would be the average of strangers."""

    class Gated(Glu):
        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.value(x), self.gate(x)
            return torch.tanh(value) * torch.sigmoid(gate)

    models = [followed(Glu(), 0), followed(Gated(), 1)]
    x = torch.randn(6, 8).double()
    for partial in (None, "0", "1"):
        with pytest.raises(ZipError, match=r"the last cut that works is partial='0\.gate'"):
            merge(models, [(x,)], partial=partial)


# ------------------------------------------------------------------ libraries
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


def test_numbers_do_not_depend_on_weights() -> None:
    x = [torch.randn(2, 3, 8, 8).double()]
    found = [number(trace(built(net, seed), inputs=x), x) for seed, net in enumerate(WAYS)]
    assert len({numbers.gives[-1] for numbers in found}) == 1
    assert len({tuple(sorted(use.number for use in numbers.uses)) for numbers in found}) == 1


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
