"""Modes: what the caller has set for all of torch, and what the library needs.

A merge must not depend on where it is called from. Public functions run with gradients and
inference mode as they need them, without autocast, without the modes that see every call
(`TorchFunctionMode`, `TorchDispatchMode`), without hooks on all modules, with float32 and the CPU
as defaults, products of float32 in full precision, and one thread at a time. What belongs to the
caller - models, loaders - runs with the caller's default dtype and device.  All is as before when
they return.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.modules.module as hooks
import torch.nn.utils.parametrize as parametrize
import torch.overrides as functions
import torch.utils._python_dispatch as dispatch

from zipfx.errors import ZipError

T = TypeVar("T")
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


@dataclass(frozen=True)
class _Defaults:
    """dtype: of new tensors; device: None for the CPU."""

    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


#: what is set here, and what tracing replaces, is set for all threads
_one_at_a_time = threading.RLock()
_caller: ContextVar[_Defaults | None] = ContextVar("zipfx_caller", default=None)


@contextmanager
def own_modes() -> Iterator[None]:
    """The modes that the library needs; inside of another such call, nothing.

    Raises:
        ZipError: inside a transform of `torch.func`, where tensors are not what they seem.

    >>> with torch.inference_mode(), own_modes():
    ...     torch.is_inference_mode_enabled()
    False
    """
    if _caller.get() is not None:
        yield
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ZipError(
            "zipfx was called inside a transform of torch.func (grad, vmap, ...), where tensors "
            "stand for others: call it outside, and transform what comes out"
        )
    with _one_at_a_time, _entered():
        yield


@contextmanager
def _entered() -> Iterator[None]:
    device = torch.get_default_device()
    theirs = _Defaults(torch.get_default_dtype(), None if device.type == "cpu" else device)
    token = _caller.set(theirs)
    try:
        with ExitStack() as stack:
            for mode in (
                torch.inference_mode(False),
                dispatch._disable_current_modes(),
                _without_function_modes(),
                _without_autocast(),
                _without_hooks(),
                _without_cache(),
                _without_swapping(),
                _with_small_numbers(),
                _full_precision(),
                np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
                _defaults(_Defaults()),
            ):
                stack.enter_context(mode)
            yield
    finally:
        _caller.reset(token)


@contextmanager
def as_caller() -> Iterator[None]:
    """The default dtype and device of the caller, for what is the caller's."""
    theirs = _caller.get()
    if theirs is None or theirs == _Defaults():
        yield
        return
    with _defaults(theirs):
        yield


@contextmanager
def as_library() -> Iterator[None]:
    """Those of the library again, inside of `as_caller`."""
    if _caller.get() in (None, _Defaults()):
        yield
        return
    with _without_function_modes(), _defaults(_Defaults()):
        yield


@contextmanager
def _defaults(wanted: _Defaults) -> Iterator[None]:
    with ExitStack() as stack:
        if wanted.device is not None:
            stack.enter_context(wanted.device)
        stack.enter_context(_set(torch.get_default_dtype, torch.set_default_dtype, wanted.dtype))
        yield


@contextmanager
def _without_function_modes() -> Iterator[None]:
    popped = [functions._pop_mode() for _ in functions._get_current_function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(popped):
            functions._push_mode(mode)


@contextmanager
def _without_autocast() -> Iterator[None]:
    on = [device for device in _AUTOCAST if torch.is_autocast_enabled(device)]
    try:
        for device in on:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Hooks on all modules, and on what is registered in any."""
    found: list[dict[int, Callable[..., Any]]] = [
        value
        for name, value in vars(hooks).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    before = [dict(each) for each in found]
    try:
        for each in found:
            each.clear()
        yield
    finally:
        for each, entries in zip(found, before, strict=True):
            each.update(entries)


@contextmanager
def _set(get: Callable[[], T], put: Callable[[T], object], wanted: T) -> Iterator[None]:
    """A setting has this value inside, and its own again afterwards."""
    before = get()
    put(wanted)
    try:
        yield
    finally:
        put(before)


def _without_cache() -> AbstractContextManager[None]:
    """Weights that are computed are so anew each time, since they change."""
    name = "_cache_enabled"
    return _set(partial(getattr, parametrize, name), partial(setattr, parametrize, name), 0)


def _without_swapping() -> AbstractContextManager[None]:
    """Of a module that moves, parameters are set anew: copies share them."""
    future = torch.__future__
    get, put = (
        future.get_swap_module_params_on_conversion,
        future.set_swap_module_params_on_conversion,
    )
    return _set(get, put, False)


def _full_precision() -> AbstractContextManager[None]:
    """Products of float32 matrices are of that precision."""
    return _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")


@contextmanager
def _with_small_numbers() -> Iterator[None]:
    """Numbers below the normal ones are what they are, and not taken for zero."""
    tiny = torch.finfo(torch.float64).tiny
    smallest = torch.full((1,), tiny, dtype=torch.float64, device="cpu")
    flushed = not bool((smallest / 4).any())
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


@contextmanager
def fixed_randomness(seed: int) -> Iterator[None]:
    """Seed torch, numpy and python inside, and restore the caller's generators afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    # a CUDA that nobody has used yet is left alone: looking at its generators would start it
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
