"""Bad input: what the message says, and that the caller's models are unharmed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zipfx
from tests.helpers.laws import error, merge, run, unharmed
from zipfx import ZipError


def mlp(hidden: int = 6, outputs: int = 3, seed: int = 0, **layers: nn.Module) -> nn.Sequential:
    """fc1 (5 -> hidden), act, fc2 (hidden -> 4), out (4 -> outputs); `layers` replace some."""
    torch.manual_seed(seed)
    made: OrderedDict[str, nn.Module] = OrderedDict(
        fc1=nn.Linear(5, hidden), act=nn.ReLU(), fc2=nn.Linear(hidden, 4), out=nn.Linear(4, outputs)
    )
    return nn.Sequential(OrderedDict({**made, **layers})).double()


def batch(seed: int = 0, n: int = 16) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)).double()


def refuse(models: Any, data: Any, match: str, **options: Any) -> None:
    """`zipfx.zip` raises ZipError with this message and leaves models and random states alone."""
    modules = [m for m in models if isinstance(m, nn.Module)]
    options = {"repair": "none", "progress": False, **options}
    raised = unharmed(modules, lambda: zipfx.zip(models, data, **options))
    assert isinstance(raised, ZipError), raised
    with pytest.raises(ZipError, match=match):
        raise raised


# ------------------------------------------------------------------ models that do not correspond
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: mlp(hidden=7), r"models 0 and 1 .*'fc1'.*'fc1'.*out_features=6.*out_features=7"),
        (lambda: mlp(act=nn.Tanh()), r"models 0 and 1 .*'act'.*'act'.*ReLU\(\).*Tanh\(\)"),
        (
            lambda: mlp(fc1=nn.ReLU(), act=nn.Linear(5, 6)),
            r"models 0 and 1 .*'fc1'.*'fc1'.*Linear\(.*ReLU\(\)",
        ),
        (lambda: mlp(fc2=nn.Linear(6, 4, bias=False)), r"'fc2'.*bias=True.*bias=False"),
        (lambda: nn.Sequential(*mlp()[:2]), r"models 0 and 1 do not correspond"),
        (lambda: mlp(fc1=nn.Sequential(nn.Linear(5, 6), nn.Tanh())), r"'act'.*fc1\.1"),
    ],
    ids=["width", "type", "order", "setting", "shorter", "longer"],
)
def test_models_that_differ(other: Callable[[], nn.Module], says: str) -> None:
    refuse([mlp(), other()], [batch()], says, partial="fc2")


def test_models_that_differ_after_the_cut_are_fine() -> None:
    models = [mlp(), mlp(outputs=7, seed=1), mlp(out=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))]
    merged = merge(models, [(batch(),)], partial="fc2")
    assert [tuple(y.shape) for y in merged(batch())] == [(16, 3), (16, 7), (16, 4)]


def test_full_zip_of_different_outputs_names_shapes_and_partial() -> None:
    says = r"model 0 gives shapes \[\(2, 3\)\] and model 1 \[\(2, 7\)\].*partial="
    refuse([mlp(), mlp(outputs=7)], [batch()], says)


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def test_models_that_tie_weights_differently() -> None:
    models = [Tied(True).double(), Tied(False).double()]
    refuse(models, [batch()], "weights are tied differently.*Tie or untie them alike.*partial='a'")


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([], r"at least two models; got 0"),
        ([mlp()], r"at least two models; got 1"),
        (mlp(), r"at least two models"),
        ([mlp(), "b"], r"model 1 is a str, not a torch.nn.Module"),
        ([mlp(), mlp().float()], r"different dtypes: model 0 .*float64.*model 1 .*float32"),
        ([mlp(), mlp().to("meta")], r"model 1: 'fc1\.weight' is on the meta device"),
    ],
    ids=["none", "one", "bare", "text", "dtype", "device"],
)
def test_bad_models(models: Any, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        zipfx.zip(models, [batch()], progress=False)


# ------------------------------------------------------------------ partial
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fc3", r"\['fc1', .*'fc2'"),
        ("ouput", r"\[.*'out'\]"),
        ("zzz", r"\['fc1', 'fc2', 'out'\]"),
    ],
)
def test_unknown_partial_suggests_what_is_near_in_the_graph(name: str, nearest: str) -> None:
    says = rf"partial='{name}' names no module; near it in the graph are {nearest}"
    refuse([mlp(), mlp()], [batch()], says, partial=name)


def test_a_module_that_does_not_run_is_no_cut() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.idle = nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    says = r"partial='idle' is a module that the model does not run; near it in the graph are"
    refuse([Idle().double(), Idle().double()], [batch()], says, partial="idle")
    says = r"partial='body\.0\.weight' lies inside 'body\.0', a Linear that is one node"
    refuse([Idle().double(), Idle().double()], [batch()], says, partial="body.0.weight")


# ------------------------------------------------------------------ tracing
class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        return self.b(y)


def test_untraceable_model_names_the_line_and_what_to_do() -> None:
    line = r"test_errors\.py:\d+ \(if y\.sum\(\) > 0:\)"
    says = rf"can not trace Branch at .*{line}.*torch\.fx\.wrap.*tracer="
    refuse([Branch().double(), Branch().double()], [batch()], says)
    with pytest.raises(ZipError, match=says):
        zipfx.analyze(Branch().double(), batch())


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ZipError, match=r"(?s)fails on example_inputs.*Pass inputs that the model"):
        zipfx.analyze(mlp(), batch()[:, :4])
    refuse([mlp(), mlp()], [batch()], r"does not fit|fails on", example_inputs=(batch(), batch()))


# ------------------------------------------------------------------ data
@pytest.mark.parametrize("data", [[], iter([])], ids=["list", "generator"])
def test_no_data(data: Any) -> None:
    refuse([mlp(), mlp()], data, r"the calibration data is empty: calib_loader gave no batch")


def test_no_data_with_example_inputs() -> None:
    refuse([mlp(), mlp()], [], r"the calibration data is empty", example_inputs=batch())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, r"calib_loader is a int; pass an iterable of batches"),
        (batch(), r"calib_loader is a Tensor; .*a single batch x: \[x\]"),
        ({"x": batch()}, r"calib_loader is a dict; pass an iterable"),
        (None, r'calib_loader=None works only with matcher="weights" or "identity"'),
        ([3.5], r"a calibration batch is a float; .*batch_to_args="),
        (["text"], r"a calibration batch is a str; .*batch_to_args="),
        ([()], r"a calibration batch is a tuple; .*batch_to_args="),
        ([{"y": batch()}], r"a batch does not fit the model's forward: .*batch_to_args="),
        ([[batch(), batch()], [batch(), batch()]], r"could be 2 batches or one loader per model"),
        (
            [[{"x": batch()}]] * 2,
            r"a list of 2 lists, which could be 2 batches .*\[\(x,\), \.\.\.\]",
        ),
        ([[torch.zeros(4, 6).long()] * 3] * 2, r"a list of 2 lists, which could be 2 batches"),
        ([[batch(), batch(n=3)], [batch()] * 2], r"a list of 2 lists, which could be 2 batches"),
        ([[(batch(), 0)]] * 3, r"a list of 3 lists of batches, for 2 models: pass one list of bat"),
        ([[(batch(), 0)], []], r"the loader of model 1, calib_loader\[1\], gave no batch"),
        ([DataLoader(batch())] * 3, r"a list of 3, with loaders in it, for 2 models: pass one"),
        ([DataLoader(batch())], r"a list of 1, with loaders in it, for 2 models"),
        ([DataLoader(batch()), batch()], r"calib_loader\[1\] is a Tensor, beside loaders"),
    ],
    ids=[
        "number",
        "tensor",
        "dict",
        "none",
        "float",
        "text",
        "empty tuple",
        "wrong key",
        "twofold",
        "twofold dicts",
        "twofold tokens",
        "twofold lengths",
        "three lists",
        "an empty list",
        "three loaders",
        "one loader",
        "a loader and a tensor",
    ],
)
def test_bad_data(data: Any, says: str) -> None:
    refuse([mlp(), mlp()], data, says)


def test_a_later_batch_of_another_shape() -> None:
    says = r"the models fail on a calibration batch with inputs \[\(16, 4\)\]"
    refuse([mlp(), mlp()], [batch(), batch()[:, :4]], says)


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        (float("nan"), 0),
        (float("nan"), 1),
        (float("inf"), 0),
        (float("inf"), 1),
        (-float("inf"), 1),
        (-float("inf"), 0),
    ],
)
def test_broken_activations_name_space_and_model(value: float, bad: int) -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    with torch.no_grad():
        models[bad].fc1.weight[2, 3] = value
    says = rf"activations of space 'fc1' are NaN or Inf in model {bad} .*check that model's weights"
    refuse(models, [batch()], says, partial="fc2")


def test_broken_batch_is_found_whichever_it_is() -> None:
    broken = batch()
    broken[5, 2] = float("nan")
    refuse([mlp(), mlp()], [batch(1), broken, batch(2)], "are NaN or Inf in model 0")


# ------------------------------------------------------------------ options
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"matcher": "zipp"},
            r"no matcher 'zipp'; did you mean 'zip'\? Known: identity, kmeans, optimal",
        ),
        ({"matcher": 7}, r"the matcher is a int: pass one of"),
        ({"matcher": zipfx.Zip}, r"the matcher is the class Zip: pass an instance"),
        ({"repair": "magic"}, r"repair='magic' is unknown; choose one of .*'none'.*'bn'"),
        ({"places": "where"}, r"places='where' is unknown; choose one of .*'last'"),
        ({"max_samples": 0}, r"max_samples .* is 0: .* whole number, at least 1"),
        ({"max_samples": -3}, r"max_samples .* is -3: .* whole number, at least 1"),
    ],
    ids=lambda v: str(next(iter(v.items()))) if isinstance(v, dict) else "",
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    refuse([mlp(), mlp()], [batch()], says, **options)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        zipfx.zip([mlp(), mlp()], [batch()], "fc2")  # type: ignore[misc]


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_bad_alpha(alpha: float) -> None:
    with pytest.raises(ZipError, match=rf"alpha is {alpha}: choose a value from 0 to 1"):
        zipfx.Zip(alpha=alpha)


@pytest.mark.parametrize("k", [-1, 2, "0"])
def test_a_head_that_is_not_there(k: Any) -> None:
    merged = merge([mlp(), mlp(seed=1)], [(batch(),)], partial="fc2")
    with pytest.raises(ZipError, match=rf"there is no head {k!r}: the merged model has 2 heads"):
        zipfx.head(merged, k)
    with pytest.raises(ZipError, match=r"there is no head 0.*full zip has one output"):
        zipfx.head(merge([mlp(), mlp(seed=1)], [(batch(),)]), 0)


@pytest.mark.parametrize("matcher", ["weights", "identity"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_no_activation_has_shown_to_be_broken(matcher: str, value: float) -> None:
    models = [mlp(), mlp(seed=1)]
    with torch.no_grad():
        models[1].fc2.weight[2, 3] = value  # type: ignore[union-attr]
    refuse(models, None, r"parameter 'fc2.weight' of model 1 holds NaN or Inf", matcher=matcher)


def test_a_model_that_is_compiled() -> None:
    refuse([mlp(), torch.compile(mlp(seed=1))], [(batch(),)], r"model 1 was compiled .*the module")


def test_a_device_that_is_not_there() -> None:
    refuse([mlp(), mlp(seed=1)], [(batch(),)], r"device='cuda:99' is none: ", device="cuda:99")
    refuse([mlp(), mlp(seed=1)], [(batch(),)], r"device='attic' is none: ", device="attic")


def test_data_of_another_shape_is_named_as_such() -> None:
    models, wide = [mlp(), mlp(seed=1)], torch.zeros(4, 7).double()
    refuse(models, [(wide,)], r"fails on the first samples of calib_loader: mat1 and mat2")
    refuse(models, [(batch(),)], r"fails on example_inputs: mat1 and mat2", example_inputs=wide)


def test_a_permutation_that_is_none() -> None:
    model = mlp()
    spaces = zipfx.analyze(model, batch())
    with pytest.raises(ZipError, match=r"space 'fc1' has 6 features; .* no permutation of 0\.\.5"):
        spaces.permuted(model, {"fc1": torch.tensor([0, 1, 2, 3, 4, 4])})


def test_repair_needs_batches_of_more_than_one_sample() -> None:
    models = [mlp(act=nn.BatchNorm1d(6), seed=s) for s in (0, 1)]
    refuse(models, [batch(n=1)], r'fewer than two values .* or repair="none"', repair="bn")


# ------------------------------------------------------------------ every form of data that is fine
class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        return self.h(torch.relu(self.a(first)) + torch.tanh(self.b(first)))


def generator(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def three() -> list[Tensor]:
    return [batch(s) for s in range(3)]


SAME_DATA: dict[str, Callable[[], Any]] = {
    "generator": lambda: generator(three()),
    "tuple": lambda: tuple(three()),
    "labelled": lambda: [(x, torch.zeros(16)) for x in three()],
    "labelled lists": lambda: [[x, torch.zeros(16)] for x in three()],
    "dicts": lambda: [{"first": x} for x in three()],
    "loader": lambda: DataLoader(TensorDataset(torch.cat(three())), batch_size=16),
    "one loader each": lambda: [
        DataLoader(TensorDataset(torch.cat([batch(0), batch(2)])), batch_size=16),
        DataLoader(TensorDataset(batch(1)), batch_size=16),
    ],
    "one generator each": lambda: [generator([batch(0), batch(2)]), generator([batch(1)])],
}


@pytest.mark.parametrize("form", SAME_DATA)
def test_every_form_of_data_gives_the_same_merge(form: str) -> None:
    torch.manual_seed(0)
    models = [Keywords().double(), Keywords().double()]
    expected = zipfx.zip(models, three(), repair="none", progress=False)
    merged = zipfx.zip(models, SAME_DATA[form](), repair="none", progress=False)
    assert merged.meta["zipfx"].batches["observe"] == 3
    assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


def test_batch_to_args_reads_any_batch() -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    expected = zipfx.zip(models, three(), repair="none", progress=False)
    for wrap in (lambda x: x, lambda x: (x,)):
        data = [{"deep": ["no", x]} for x in three()]
        merged = zipfx.zip(
            models, data, repair="none", progress=False,
            batch_to_args=lambda b, w=wrap: w(b["deep"][1]),
        )  # fmt: skip
        assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


@pytest.mark.parametrize("samples", [1, 16, 20, 48, 1000])
def test_max_samples_cuts_the_data(samples: int) -> None:
    models = [mlp(seed=s) for s in (0, 1)]
    rest = torch.cat(three())[:samples]
    expected = zipfx.zip(models, [rest], repair="none", progress=False)
    merged = zipfx.zip(models, three(), repair="none", progress=False, max_samples=samples)
    assert merged.meta["zipfx"].batches["observe"] == min(3, -(-samples // 16))
    assert error(run(expected, (batch(9),)), run(merged, (batch(9),))) < 1e-12


def test_a_loader_of_every_model_is_seen_by_all_models() -> None:
    models, twins = [mlp(seed=s) for s in (0, 1)], [mlp(seed=s) for s in (1, 0)]
    loaders = SAME_DATA["one loader each"]()
    one = zipfx.zip(models, loaders, repair="none", progress=False, matcher="permute")
    two = zipfx.zip(twins, copy.deepcopy(loaders), repair="none", progress=False, matcher="permute")
    assert error(run(one, (batch(9),)), run(two, (batch(9),))) < 1e-10


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": float("nan")}, r"device=nan is none"),
        ({"device": [1]}, r"device=\[1\] is none"),
        ({"verify": "no"}, r"verify is 'no': it must be True or False"),
        ({"progress": torch.ones(2)}, r"progress is tensor.*True or False"),
        (
            {"matcher": failing},
            r"the matcher fails for space 'fc1' \(6 .*no such thing",
        ),
        ({"batch_to_args": failing}, r"batch_to_args fails on a batch, a Tensor: .*no such thing"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], says: str) -> None:
    refuse([mlp(), mlp(seed=1)], [batch()], says, **options)


@pytest.mark.parametrize("odd", [None, 3, "abc", [], torch.ones(2), nn.Linear])
def test_what_is_no_module(odd: Any) -> None:
    spaces = zipfx.analyze(mlp(), batch())
    for call in (
        lambda: zipfx.analyze(odd, batch()),
        lambda: spaces.permuted(odd, spaces.random_permutations(0)),
        lambda: zipfx.zip([mlp(), odd], [batch()]),
    ):
        with pytest.raises(ZipError, match=r"is a \w+, not a torch.nn.Module"):
            call()
    with pytest.raises(ZipError, match=r"and no result of zipfx.zip"):
        zipfx.head(odd, 0)


@pytest.mark.parametrize("order", [None, 3, [0, 1], torch.arange(6.0), torch.tensor(3)])
def test_orders_of_the_wrong_kind(order: Any) -> None:
    model = mlp()
    spaces = zipfx.analyze(model, batch())
    with pytest.raises(ZipError, match=r"must be a tensor \(6,\) of int64"):
        spaces.permuted(model, {"fc1": order})
    with pytest.raises(ZipError, match=r"permutations are a list: give a dict"):
        spaces.permuted(model, [order])  # type: ignore[arg-type]


def test_data_without_values() -> None:
    refuse([mlp(), mlp(seed=1)], [batch().to("meta")], r"on the device .meta., where it holds no")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features() -> None:
    """There is nothing to solve for."""
    for widths in ((0, 3), (6, 0)):
        models = [mlp(*widths), mlp(*widths, seed=1)]
        merged = merge(models, [(batch(),)], repair="refit")
        assert run(merged, [batch()]).shape == (16, widths[1])
