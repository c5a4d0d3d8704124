"""A merge does not depend on what the caller has set for all of torch, and leaves it as it is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zipfx
from tests.helpers.laws import error, unharmed
from zipfx.modes import own_modes


class Net(nn.Module):
    """Spaces of a convolution, of attention and its heads, of a normed linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
        self.h = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n(self.a(x))).flatten(2).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return self.h(F.gelu(self.b(y)).mean(1))


class Ignoring(TorchFunctionMode):
    """Sees all calls, and breaks those that make tensors of ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ones, torch.zeros, torch.arange):
            raise RuntimeError("seen")
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if "mm" not in str(func) else None


@contextmanager
def setting(put: Callable[[Any], object], wanted: Any, usual: Any) -> Iterator[None]:
    """What is set for all of torch, and what it is afterwards."""
    put(wanted)
    try:
        yield
    finally:
        put(usual)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.float32)


@contextmanager
def global_hook() -> Iterator[None]:
    def twice(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 2 if isinstance(output, Tensor) else output

    handle = module_hooks.register_module_forward_hook(twice)
    try:
        yield
    finally:
        handle.remove()


def flushes() -> bool:
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    return not bool((tiny / 4).any())


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "function mode": Ignoring,
    "dispatch mode": Counting,
    "counting flops": lambda: FlopCounterMode(display=False),
    "hook on all modules": global_hook,
    "cached parametrizations": torch.nn.utils.parametrize.cached,
    "anomaly detection": torch.autograd.detect_anomaly,
    "parameters are swapped": lambda: setting(
        torch.__future__.set_swap_module_params_on_conversion, True, False
    ),
    "small numbers are nothing": lambda: setting(torch.set_flush_denormal, True, False),
    "coarse products": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "numpy raises": lambda: np.errstate(all="raise"),
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(str, str),
}


def pair() -> list[Net]:
    torch.manual_seed(0)
    return [Net().eval(), Net().eval()]


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 3, 6, 6, generator=generator) for _ in range(3)]


def settings() -> tuple[Any, ...]:
    hooks = {k: v for k, v in vars(module_hooks).items() if k.startswith("_global")}
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        {k: list(v) for k, v in hooks.items() if isinstance(v, dict)},
        torch.nn.utils.parametrize._cache_enabled,
        np.geterr(),
        torch.__future__.get_swap_module_params_on_conversion(),
        torch.get_float32_matmul_precision(),
        flushes(),
    )


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("partial", [None, "n"])
@pytest.mark.parametrize("name", MODES)
def test_the_same_merge_inside_as_outside(name: str, partial: str | None) -> None:
    models, data = pair(), images()
    expected = zipfx.zip(models, data, partial=partial, progress=False)

    def inside() -> Any:
        before = settings()
        merged = zipfx.zip(models, data, partial=partial, progress=False)
        assert settings() == before
        return merged

    mode = MODES[name]()  # some may be entered once only
    with mode:
        merged = unharmed(models, inside)
    assert isinstance(merged, nn.Module), merged
    for key, t in expected.state_dict().items():
        assert torch.equal(t, merged.state_dict()[key]), key
    assert [s.size for s in merged.meta["zipfx"].spaces] == [
        s.size for s in expected.meta["zipfx"].spaces
    ]
    assert all(p.requires_grad and not p.is_inference() for p in merged.parameters())
    merged(data[0])[0].sum().backward()  # can be trained


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODES)
def test_so_does_everything_else(name: str, tmp_path: Path) -> None:
    if "anomaly" in name:
        pytest.skip("its warning is tested above")
    models, data = pair(), images()
    spaces = zipfx.analyze(models[0], data[0])
    order = spaces.random_permutations(1)
    twin = spaces.permuted(models[0], order)
    merged = zipfx.zip(models, data, partial="n", progress=False)
    zipfx.save(merged, tmp_path / "outside.safetensors")
    with MODES[name]():
        assert str(zipfx.analyze(models[0], data[0])) == str(spaces)
        again = spaces.random_permutations(1)
        other = spaces.permuted(models[0], again)
        zipfx.save(merged, tmp_path / "inside.safetensors")
        loaded = zipfx.load(tmp_path / "inside.safetensors", models)
        head = zipfx.head(merged, 1)
    assert all(torch.equal(order[k], again[k]) for k in order)
    for one, two in ((twin, other), (merged, loaded), (zipfx.head(merged, 1), head)):
        assert all(torch.equal(t, two.state_dict()[k]) for k, t in one.state_dict().items())
        assert not any(p.is_inference() for p in two.parameters())
    files = [(tmp_path / f"{side}.safetensors").read_bytes() for side in ("inside", "outside")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_what_was_made_in_inference_mode() -> None:
    expected = zipfx.zip(pair(), images(), progress=False)
    with torch.inference_mode():
        models, data = pair(), images()
        inside = zipfx.zip(models, data, progress=False)
    for merged in (inside, zipfx.zip(models, data, progress=False)):
        for key, t in expected.state_dict().items():
            assert torch.equal(t, merged.state_dict()[key]), key
        assert not any(p.is_inference() for p in merged.parameters())
    spaces = zipfx.analyze(models[0], data[0])
    twin = spaces.permuted(models[0], spaces.random_permutations(0))
    with torch.no_grad():
        assert error(models[0](data[0]), twin(data[0])) < 1e-5


class Factories(nn.Module):
    """Makes tensors where, and in which dtype, the caller has said."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x)) * torch.ones(8)
        return self.h(torch.relu(self.b(y)) + torch.linspace(0, 1, x.shape[0])[:, None])


def test_models_run_with_the_callers_defaults() -> None:
    with default_dtype(torch.float64):
        models = [Factories() for _ in range(2)]  # float64, as what they make
        data = [torch.randn(16, 4) for _ in range(3)]
        twin = copy.deepcopy(models[0])
        merged = zipfx.zip([models[0], twin], data, matcher="identity", progress=False)
        assert merged(data[0]).dtype == torch.float64
        assert error(models[0](data[0]), merged(data[0])) < 1e-12
        assert [s.size for s in zipfx.analyze(models[0], data[0])] == [8, 8]


def test_loaders_run_with_the_callers_defaults() -> None:
    seen: list[torch.dtype] = []

    def batches() -> Iterator[Tensor]:
        seen.append(torch.zeros(1).dtype)
        yield torch.randn(16, 3, 6, 6, dtype=torch.float32)

    models = pair()
    with default_dtype(torch.float64):
        zipfx.zip(models, batches(), progress=False)
    assert seen == [torch.float64]


def test_transforms_are_refused() -> None:
    models, data = pair(), images()

    def merge(x: Tensor) -> Tensor:
        zipfx.zip(models, data, progress=False)
        return x.sum()

    with pytest.raises(zipfx.ZipError, match=r"inside a transform of torch\.func"):
        torch.func.grad(merge)(torch.ones(3))
    with pytest.raises(zipfx.ZipError, match=r"inside a transform of torch\.func"):
        torch.vmap(lambda x: zipfx.analyze(models[0], x) and x)(data[0])


def test_calls_may_be_nested() -> None:
    with ExitStack() as stack:
        for mode in (Ignoring(), torch.inference_mode(), own_modes(), own_modes()):
            stack.enter_context(mode)
        assert not torch.is_inference_mode_enabled()
        assert torch.ones(2).sum() == 2
    with Ignoring(), pytest.raises(RuntimeError, match="seen"):
        torch.ones(2)


@pytest.mark.slow
def test_threads_wait_for_each_other() -> None:
    """Tracing replaces what is there for all threads."""
    expected = zipfx.zip(pair(), images(), progress=False).state_dict()
    pairs = [pair() for _ in range(4)]
    before, found = torch.get_rng_state(), dict[int, Any]()

    def merge(k: int) -> None:
        found[k] = zipfx.zip(pairs[k], images(), progress=False).state_dict()

    threads = [threading.Thread(target=merge, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for state in found.values():
        assert all(torch.equal(t, expected[name]) for name, t in state.items())
    assert torch.equal(before, torch.get_rng_state())
