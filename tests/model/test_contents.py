"""What is neither parameter nor buffer nor a setting that can be compared is refused by name, and
so is what can not be averaged, traced or read, with a message that says what to do."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.laws import merge, unharmed
from zipfx import Refit, ZipError
from zipfx.model.contents import as_text, attributes, code_of
from zipfx.report.files.recipe import Does


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    ).eval()


DATA = [torch.randn(32, 4) for _ in range(2)]


def quantised_dynamically(seed: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(mlp(seed), {nn.Linear})
    return made


def quantised_statically(seed: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantisation = torch.ao.quantization
        model = nn.Sequential(quantisation.QuantStub(), *mlp(seed), quantisation.DeQuantStub())
        model.qconfig = quantisation.get_default_qconfig(torch.backends.quantized.engine)
        prepared = quantisation.prepare(model.eval())
        prepared(DATA[0])
        made: nn.Module = quantisation.convert(prepared)
    return made


def scripted(seed: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.script(mlp(seed))
    return made


def jit_traced(seed: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.trace(mlp(seed), DATA[0])
    return made


def lazy(seed: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))


class Listed(nn.Module):
    """Its layers are in a list, where torch does not see them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.h = [mlp(seed)], nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.layers[0](x))


class Bank:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(16, 4))


class InAnObject(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.bank, self.h = Bank(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(F.linear(x, self.bank.weight))


def closure(seed: int) -> nn.Module:
    model = mlp(seed)
    layer = model[2]
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return model


def sparse(seed: int) -> nn.Module:
    model = mlp(seed)
    model[2].weight = nn.Parameter(model[2].weight.detach().to_sparse(), requires_grad=False)
    return model


class Wrapped(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def subclass(seed: int) -> nn.Module:
    model = mlp(seed)
    model[2].register_buffer("table", torch.zeros(3).as_subclass(Wrapped))
    return model


REFUSED: dict[Callable[[int], nn.Module], str] = {
    quantised_dynamically: r"module '\d.*packed inside .* before they are quantised",
    quantised_statically: r"module '\d.*packed inside .* before they are quantised",
    scripted: r"compiled by torch\.jit .*zip the models first",
    jit_traced: r"compiled by torch\.jit .*zip the models first",
    lazy: r"'0\.weight' is not initialised yet \(a lazy layer\): run the model once",
    Listed: r"holds 'layers', a Sequential with parameters that are not registered: .*ModuleList",
    InAnObject: r"holds 'bank', a parameter \(16, 4\) that is not registered: .*ParameterList",
    closure: r"module '2' \(Linear\) has a forward of its own, .*closure.* types\.MethodType",
    sparse: r"'2\.weight' is torch\.sparse_coo, which can not be averaged",
    subclass: r"'2\.table' is a Wrapped, a tensor that is more than its values",
    lambda seed: mlp(seed).to("meta"): r"'0\.weight' is on the meta device: .*load weights",
    lambda seed: nn.DataParallel(mlp(seed)): r"is a DataParallel: pass what it wraps",
    lambda seed: torch.compile(mlp(seed)): r"was compiled \(torch\.compile\): pass the module",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("make", REFUSED)
def test_weights_that_can_not_be_seen_are_refused(
    make: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    says = REFUSED[make]
    with pytest.raises(ZipError, match=f"model 0.*{says}"):
        zipfx.zip([make(0), make(1)], DATA, progress=False)
    with pytest.raises(ZipError, match=f"model 1.*{says}"):
        zipfx.zip([mlp(), make(1)], DATA, progress=False)
    with pytest.raises(ZipError, match=f"the model.*{says}"):
        zipfx.analyze(make(0), DATA[0])
    zipfx.save(merge([mlp(), mlp(1)], DATA, batch_to_args=None), tmp_path / "one.safetensors")
    if "meta" not in says:
        with pytest.raises(ZipError, match=f"model 1.*{says}"):
            zipfx.load(tmp_path / "one.safetensors", [mlp(), make(1)])


def test_a_scripted_activation_has_no_weights(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        act = torch.jit.script(nn.ReLU())
    models = [mlp(), mlp(1)]
    for model in models:
        model[1] = act
    assert merge(models, DATA, batch_to_args=None).meta["zipfx"].layers == (3, 3)


def test_a_bound_forward_is_one_of_the_copy() -> None:
    """It is no closure; and it is no linear layer, so it is not refitted as one."""

    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)

    models = [mlp(), mlp(1)]
    for model in models:
        model[2].forward = types.MethodType(doubled, model[2])
    merged = unharmed(models, lambda: merge(models, DATA, batch_to_args=None, repair="refit"))
    assert isinstance(merged, nn.Module), merged
    names = [r.name for r in merged.meta["zipfx"].refits]
    assert names == ["0", "4"]
    hidden = merged[1](merged[0](DATA[0])) if isinstance(merged, nn.Sequential) else None
    x = torch.relu(merged.get_submodule("0")(DATA[0])) if hidden is None else hidden
    layer = merged.get_submodule("2")
    assert torch.allclose(layer(x), 2 * F.linear(x, layer.weight, layer.bias))


# ------------------------------------------------------------------ settings that were compared
class Scaled(nn.Module):
    """A leaf to a tracer that says so, with settings of all kinds."""

    used = True

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))
        settings: dict[str, Any] = {
            "scale": 0.5, "_scale": 0.5, "table": torch.ones(3), "array": np.ones(3),
            "act": F.relu, "partial": functools.partial(F.leaky_relu, negative_slope=0.1),
            "options": {"deep": [1, (2, torch.ones(2))]}, "bank": types.SimpleNamespace(a=1),
        }  # fmt: skip
        for name, value in {**settings, **changed}.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.partial(self.act(F.linear(x, self.w))) * self.scale * self._scale
        if not self.used:
            return y
        y = y * (1 + self.table.sum()) * float(self.array.sum()) * self.bank.a
        return y + self.options["deep"][1][1].sum()


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Scaled) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"scale": 0.6}, r"scale is 0\.5 against 0\.6"),
        ({"_scale": 0.6}, r"_scale is 0\.5 against 0\.6"),
        ({"table": torch.zeros(3)}, r"table is float32\(3,\) \w+ against float32\(3,\) \w+"),
        ({"array": np.zeros(3)}, r"array is float64\(3,\) \w+ against float64\(3,\) \w+"),
        ({"act": F.gelu}, r"act is .*relu.* against .*gelu"),
        (
            {"partial": functools.partial(F.leaky_relu, negative_slope=0.2)},
            r"partial is .*0\.1.* against .*0\.2",
        ),
        ({"options": {"deep": [1, (2, torch.zeros(2))]}}, r"options is \{'deep': .* against"),
        ({"bank": types.SimpleNamespace(a=2)}, r"bank is SimpleNamespace.*1.* against .*2"),
    ],
)
def test_settings_of_leaves_are_compared(changed: dict[str, Any], says: str) -> None:
    def make(**settings: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Scaled(**settings), nn.Linear(16, 3)).eval()

    models = [make(), make(**changed)]
    options: dict[str, Any] = {"batch_to_args": None, "tracer": Leaves()}
    assert merge(models, DATA, partial="0", **options).meta["zipfx"].layers == (1, 3)
    if not says:
        merge(models, DATA, **options)
        return
    with pytest.raises(ZipError, match=says):
        merge(models, DATA, **options)
    if changed.keys() & {"table", "array", "options", "bank"}:  # of what nothing uses it is a note
        models[0][1].used = models[1][1].used = False
        notes = merge(models, DATA, **options).meta["zipfx"].notes
        assert any(re.search(says, note) for note in notes)


# ------------------------------------------------------------------ code that was compared
class Act(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.k * x)


def leaf(k: float) -> nn.Module:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, k * x)

    return Leaf()


def leaf_of_source(k: float) -> nn.Module:
    """Another constant in the code, and nothing else."""
    scope: dict[str, Any] = {"nn": nn, "__name__": "leaves"}
    lines = "class Leaf(nn.Module):", "    def forward(self, x):", f"        return x * {k}"
    exec("\n".join(lines), scope)
    made: nn.Module = scope["Leaf"]()
    return made


def leaf_of_helper(k: float) -> nn.Module:
    scope: dict[str, Any] = {"nn": nn, "__name__": "leaves", "K": k}
    lines = (
        "def f(x): return x * K",
        "class Leaf(nn.Module):",
        "    def forward(self, x): return f(x)",
    )
    exec("\n".join(lines), scope)
    made: nn.Module = scope["Leaf"]()
    return made


def leaf_of_method(k: float) -> nn.Module:
    act = nn.ReLU()
    if k < 1:
        act.forward = types.MethodType(lambda self, x: x * 2, act)  # type: ignore[method-assign]
    else:
        act.forward = types.MethodType(lambda self, x: x * 7, act)  # type: ignore[method-assign]
    return act


def leaf_of_partial(k: float) -> nn.Module:
    act = Scaled()
    act.act = functools.partial(lambda x, k: torch.where(x > 0, x, k * x), k=k)
    torch.nn.init.eye_(act.w)
    return act


def leaf_of_default(k: float) -> nn.Module:
    act = Scaled()
    act.act = lambda x, k=k: torch.where(x > 0, x, k * x)
    torch.nn.init.eye_(act.w)
    return act


def transformer(k: float) -> nn.Module:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            act = (lambda x: F.leaky_relu(x, 0.1)) if k < 1 else (lambda x: F.leaky_relu(x, 3.0))
            self.layer = nn.TransformerEncoderLayer(16, 2, 16, activation=act, batch_first=True)
            self.mask = nn.Buffer(torch.zeros(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, None], src_mask=self.mask)[:, 0]

    return Masked()


def scripted_leaf(k: float) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.script(Act(k))
    return made


class AnyLeaf(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = type(m).__name__ in ("Leaf", "Scaled") or isinstance(m, torch.jit.ScriptModule)
        return known or super().is_leaf_module(m, module_qualified_name)


CODED = [
    scripted_leaf, leaf, leaf_of_source, leaf_of_helper, leaf_of_method, leaf_of_partial,
    leaf_of_default, transformer,
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("act", CODED)
def test_leaves_are_told_apart_by_their_code(
    act: Callable[[float], nn.Module], tmp_path: Path
) -> None:
    """Two that are called alike and compute something else do not correspond; two that were made
    twice do, and a file of theirs is loaded by them only."""

    def make(k: float) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 16), act(k), nn.Linear(16, 3)).double().eval()

    options: dict[str, Any] = {"batch_to_args": None, "tracer": AnyLeaf(), "matcher": "identity"}
    data = [torch.randn(8, 4).double()]
    for partial in (None, "1"):
        with pytest.raises(ZipError, match=r"code of|act is"):
            merge([make(0.1), make(5.0)], data, partial=partial, **options)
    files = []
    for name in ("a", "b"):
        merged = merge([make(0.1), make(0.1)], data, **options)
        assert not [n for n in merged.meta["zipfx"].notes if "sets" in n or "differs" in n]
        zipfx.save(merged, tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    loaded = zipfx.load(tmp_path / "a", [make(0.1)] * 2, tracer=AnyLeaf())
    assert torch.equal(loaded(data[0]), merged(data[0]))
    with pytest.raises(ZipError, match=r"(code of|act) .*was .* and is"):
        zipfx.load(tmp_path / "a", [make(5.0)] * 2, tracer=AnyLeaf())


@pytest.mark.slow
def test_digests_of_code_are_those_of_every_process(tmp_path: Path) -> None:
    """Wherever the source lies, and whatever comes before it; and another Python's say nothing."""
    source = (
        "import math\nLIMIT = {1: 2.5}\nSCALE = 2.0\n"
        "def helper(x, *, k=3): return x * k * SCALE if x in {'b', 'a', 'c'} else math.sin(x)\n"
        "def make(k):\n    def inner(x): return [helper(i) * k for i in x]\n    return inner\n"
    )
    found = []
    for i, before in enumerate(("", "# moved\n" * 7)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "coded.py").write_text(before + source, encoding="utf-8")
        asks = (
            "import coded; from zipfx.model.contents import code_of; "
            "print(code_of('f', coded.make(2)))"
        )
        found.append(
            subprocess.run(
                [sys.executable, "-c", asks],
                env={**os.environ, "PYTHONPATH": f"{folder}:{Path(zipfx.__file__).parents[1]}",
                     "PYTHONHASHSEED": str(i + 1)},
                check=True, capture_output=True, text=True,
            ).stdout
        )  # fmt: skip
    assert found[0] == found[1]
    assert sys.implementation.cache_tag in found[0]
    ours = Does("call_module", "a", "", settings={"code of f (cpython-399)": "1"})
    assert ours.difference(Does("call_module", "a", "", settings=code_of("f", leaf))) is None


def test_text_says_what_computes_the_same() -> None:
    assert attributes(nn.Conv2d(3, 4, 3))["kernel_size"] == "(3, 3)"
    twice = [nn.Sequential(nn.Dropout(0.1), nn.Hardtanh(-2, 2)) for _ in range(2)]
    assert attributes(twice[0]) == attributes(twice[1])
    assert as_text([lambda x: x, {1: (2,)}, {3}]) == as_text([lambda x: x, {1: (2,)}, {3}])
    nested: list[Any] = []
    nested.append(nested)
    assert len(as_text(nested)) < 100


class Constant(nn.Module):
    def __init__(self, value: float, persistent: bool, plain: bool = False) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(4, 8), nn.Linear(8, 3)
        table = torch.linspace(0, value, 8)
        if plain:
            self.table = table
        else:
            self.register_buffer("table", table, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.a(x)) * self.table)


@pytest.mark.parametrize("plain", [False, True])
def test_constants_must_be_equal(plain: bool) -> None:
    """Buffers that are not persistent are constants of the class, and so are plain tensors: where
    they are equal they tell features apart, where they are not nothing can be averaged."""
    same = [Constant(1, False, plain) for _ in range(2)]
    merged = merge(same, DATA, batch_to_args=None)
    assert len(merged.meta["zipfx"].spaces) == 0
    other = [Constant(1, False, plain), Constant(2, False, plain)]
    with pytest.raises(ZipError, match=r"a constant of node .*table.*differs between models 0 and"):
        merge(other, DATA, batch_to_args=None)
    assert len(merge(other, DATA, batch_to_args=None, partial="a")(DATA[0])) == 2
    weights = [Constant(1, True), Constant(2, True)]
    assert [s.size for s in merge(weights, DATA, batch_to_args=None).meta["zipfx"].spaces] == [8]


# ------------------------------------------------------------------ messages
class Autocast(nn.Module):
    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.a, self.h, self.enabled = nn.Linear(4, 8), nn.Linear(8, 3), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            y = torch.relu(self.a(x))
        return self.h(y.float())


def test_autocast_inside_forward_is_named() -> None:
    with pytest.raises(
        ZipError, match=r"test_contents\.py:\d+ \(with torch\.autocast.*leave autoc"
    ):
        zipfx.analyze(Autocast(), DATA[0])
    assert [s.size for s in zipfx.analyze(Autocast(enabled=False), DATA[0])] == [8]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_samples": 1.5}, r"max_samples .* is 1\.5: it must be a whole number"),
        ({"max_samples": True}, r"max_samples .* is True"),
        ({"max_samples": "8"}, r"max_samples .* is '8'"),
        ({"seed": None}, r"seed is None: it must be a whole number"),
        ({"seed": 0.5}, r"seed is 0\.5: it must be a whole number"),
        ({"repair": ["refit"]}, r"repair=\['refit'\] is unknown"),
        ({"places": {}}, r"places=\{\} is unknown"),
        ({"tracer": fx.Tracer}, r"tracer=.* is no instance of torch\.fx\.Tracer"),
        ({"batch_to_args": "x"}, r"batch_to_args is a str: it must be a function"),
        ({"partial": 3}, r"partial is 3"),
    ],
)
def test_odd_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ZipError, match=says):
        merge([mlp(), mlp(1)], DATA, **{"batch_to_args": None, **options})


def test_numbers_of_any_type_are_fine() -> None:
    options = {"max_samples": np.int64(16), "seed": np.int32(2**31 - 1), "batch_to_args": None}
    assert merge([mlp(), mlp(1)], DATA, **options).meta["zipfx"].batches["observe"] == 1
    merge([mlp(), mlp(1)], DATA, seed=-3, batch_to_args=None)
    merge([mlp(), mlp(1)], DATA, seed=2**70, batch_to_args=None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Refit(rounds=0.5), r"rounds is 0\.5: it must be a whole number, at least 0"),
        (lambda: Refit(rounds=-1), r"rounds is -1"),
        (lambda: Refit(ridges=(float("nan"),)), r"a ridge is nan: it must be a number, at least 0"),
        (lambda: Refit(ridges=(-1.0,)), r"a ridge is -1\.0"),
        (lambda: Refit(ridges=()), r"give a tuple of at least one"),
        (lambda: Refit(ridges=1.0), r"ridges are 1\.0: give a tuple"),
        (lambda: Refit(ridges="1"), r"ridges are '1': give a tuple"),
        (lambda: Refit(ridges=("a",)), r"a ridge is 'a'"),
        (lambda: Refit(oversampling=0), r"oversampling is 0: it must be above 0"),
        (lambda: Refit(oversampling=float("nan")), r"oversampling is nan"),
        (lambda: Refit(memory=None), r"memory is None: it must be a number"),
        (lambda: zipfx.Zip(alpha="0.5"), r"alpha is 0\.5: choose a value"),
        (lambda: zipfx.KMeans(iterations=1.5), r"iterations is 1\.5: it must be a whole number"),
        (lambda: zipfx.Weights(sweeps=0), r"sweeps is 0: it must be a whole number, at least 1"),
        (lambda: zipfx.Zip(ridge="1"), r"ridge is '1': it must be a number"),
    ],
)
def test_odd_settings(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ZipError, match=says):
        make()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([(255 * torch.rand(8, 4)).byte()], r"of the weights, float32: these are uint8 .*batch_to"),
        ([torch.rand(8, 4).double()], r"of the weights, float32: these are float64 .*batch_to"),
        ([torch.rand(8, 4).half()], r"of the weights, float32: these are float16 .*batch_to"),
        (
            [np.zeros((8, 4)), np.zeros((8, 4)), np.zeros((8, 4))],
            r"a numpy array \(8, 4\) of float",
        ),
        ([np.zeros((8, 4)), np.zeros((8, 4))], r"a numpy array \(8, 4\) of float64: .*from_numpy"),
        (np.zeros((2, 8, 4)), r"calib_loader is a ndarray; pass an iterable of batches"),
        ({"x": torch.zeros(8, 4)}, r"calib_loader is a dict; pass an iterable of batches"),
    ],
    ids=["uint8", "float64", "float16", "arrays", "as many arrays as models", "array", "dict"],
)
def test_odd_data(data: Any, says: str) -> None:
    with pytest.raises(ZipError, match=says):
        zipfx.zip([mlp(), mlp(1)], data, progress=False)


def test_errors_without_a_text_are_named_by_their_type() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError

    with pytest.raises(ZipError, match="NotImplementedError"):
        zipfx.zip([Fails(), Fails()], DATA, progress=False)


def test_hooks_are_a_note() -> None:
    models = [mlp(), mlp(1)]
    models[1][2].register_forward_hook(lambda m, i, o: None)
    models[1].register_forward_pre_hook(lambda m, i: None)
    notes = merge(models, DATA, batch_to_args=None).meta["zipfx"].notes
    (note,) = (n for n in notes if "hooks" in n)
    assert note == "hooks of model 1 are not part of the result: those of the model itself, '2'"
