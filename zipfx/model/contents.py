"""Contents: what a module holds that is neither a parameter, nor a buffer, nor a plain setting.

Weights that torch does not see can be neither matched nor averaged.  They are refused by name; what
else a module holds is described as text, so that it can be compared.  Models are checked for that,
and for their devices and dtypes, before anything is made of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zipfx.checks import module as as_module
from zipfx.errors import ZipError
from zipfx.model.callables import dialect, program
from zipfx.model.tensors import inexact, named_tensors

_BASE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_DEPTH = 6  # of what is described
CODE = "code of "  # how the names of digests begin, which hold for one version of Python or torch
_SCRIPTED: tuple[type, ...] = (torch.ScriptObject, torch._C.ScriptFunction)
_ORDINARY = [
    getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    for kind in (Tensor, nn.Parameter)
]


def check_visible(model: nn.Module, what: str, *, on_meta: bool = False) -> None:
    """Check that all that a model has learned is in ordinary parameters and buffers.

    Args:
        what: the model, as messages name it.
        on_meta: whether its tensors may have shapes only.

    Raises:
        ZipError: weights are packed (quantised layers), scripted, not there yet (lazy layers), in
            modules that are not registered, or tensors of a kind that can not be averaged.

    >>> check_visible(nn.Sequential(nn.LazyLinear(3)), "the model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zipfx.errors.ZipError: the model: '0.weight' is not initialised yet (a lazy layer): run ...
    """
    _check_wrapper(as_module(what, model), what)
    known = {id(t) for t in named_tensors(model).values()}
    for path, module in model.named_modules():
        here = f"{what}: module {path!r} ({type(module).__name__})" if path else what
        if isinstance(module, torch.jit.ScriptModule) and named_tensors(module):
            raise ZipError(
                f"{here} was compiled by torch.jit ({type(module).__name__}), which hides its "
                "weights; zip the models first, then compile what comes out"
            )
        scripted = isinstance(module, torch.jit.ScriptModule)
        for name, value in () if scripted else vars(module).items():
            if name not in _BASE:
                _check_attribute(f"{here} holds {name!r}", value, known)
        _check_forward(here, module)
    for name, t in named_tensors(model).items():
        _check_tensor(f"{what}: {name!r}", t, on_meta)


def _check_wrapper(model: nn.Module, what: str) -> None:
    if hasattr(model, "_orig_mod"):
        raise ZipError(
            f"{what} was compiled (torch.compile): pass the module itself, and compile what comes "
            "out"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ZipError(f"{what} is a {type(model).__name__}: pass what it wraps, model.module")


def _check_tensor(where: str, t: Tensor, on_meta: bool) -> None:
    if isinstance(t, (UninitializedParameter, UninitializedBuffer)):
        raise ZipError(
            f"{where} is not initialised yet (a lazy layer): run the model once, on a batch of the "
            "right shape"
        )
    kind = type(t)
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    odd = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or own not in _ORDINARY
    if odd:
        raise ZipError(
            f"{where} is a {kind.__name__}, a tensor that is more than its values (quantised, "
            "sharded, fake, ...): pass the models before they are converted, or convert them back "
            "(full_tensor() of a DTensor, dequantize() of a quantised one)"
        )
    if t.is_quantized or t.layout != torch.strided or t.is_nested:
        layout = "quantised" if t.is_quantized else "nested" if t.is_nested else str(t.layout)
        raise ZipError(
            f"{where} is {layout}, which can not be averaged: pass the models before they are "
            "converted"
        )
    if t.is_meta and not on_meta:
        raise ZipError(f"{where} is on the meta device: it has a shape and no values; load weights")


def _check_attribute(where: str, value: Any, known: set[int]) -> None:
    for item in _inside(value):
        if isinstance(item, _SCRIPTED[:1]):
            raise ZipError(
                f"{where}, weights that are packed inside a {type(item).__name__} (a quantised "
                "layer?), which zipfx can not see: pass the models before they are quantised, and "
                "quantise what comes out"
            )
        if isinstance(item, nn.Module) and any(id(p) not in known for p in item.parameters()):
            raise ZipError(
                f"{where}, a {type(item).__name__} with parameters that are not registered: keep "
                "modules in an nn.ModuleList or nn.ModuleDict"
            )
        if isinstance(item, nn.Parameter) and id(item) not in known:
            raise ZipError(
                f"{where}, a parameter {tuple(item.shape)} that is not registered: keep parameters "
                "in an nn.ParameterList or nn.ParameterDict"
            )


def _inside(value: Any, depth: int = 3) -> Iterator[Any]:
    """A value, and what lists, tuples, dicts and plain objects hold."""
    yield value
    if depth and not isinstance(value, (nn.Module, Tensor, *_PLAIN, type)):
        items: Any = ()
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            items = value
        elif type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__"):
            items = vars(value).values()
        for item in list(items):
            yield from _inside(item, depth - 1)


def _check_forward(here: str, module: nn.Module) -> None:
    """A forward that was put on one instance must not have the weights of another in its closure:
    copies would go on computing with those."""
    forward = vars(module).get("forward")
    held = _captured(forward)
    if isinstance(forward, types.FunctionType) and any(
        isinstance(item, (nn.Module, Tensor)) for value in held for item in _inside(value)
    ):
        raise ZipError(
            f"{here} has a forward of its own, put on the instance, that holds modules or tensors "
            "in its closure: copies would use those. Write a class with that forward, or bind the "
            "function with types.MethodType"
        )


def _captured(function: Any) -> list[Any]:
    """What a function has kept from where it was defined."""
    found = [*(getattr(function, "__defaults__", None) or ())]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found


# ------------------------------------------------------------------ as text
def attributes(module: nn.Module, *, tensors: bool = True) -> dict[str, str]:
    """What a module and its children hold besides weights, buffers and modules, as text by path.

    Of torch's own modules the public attributes, from which the others follow; of what can be run,
    the digest of its code as well. tensors: whether those that are attributes count.

    >>> attributes(nn.Dropout(0.25))
    {'p': '0.25', 'inplace': 'False'}
    """
    found = {}
    for path, m in module.named_modules():
        whole = isinstance(m, (torch.jit.ScriptModule, fx.GraphModule))
        found.update(code_of(f"{path}.forward".lstrip("."), m if whole else type(m)))
        # what a script holds is part of its code
        for key, value in () if isinstance(m, torch.jit.ScriptModule) else vars(m).items():
            idle = key in _BASE or (key.startswith("_") and _is_of_torch(m))
            if not idle and (tensors or not isinstance(value, Tensor)):
                name = f"{path}.{key}".lstrip(".")
                found[name] = as_text(value)
                found.update(code_of(name, value))
    return found


def code_of(name: str, value: Any) -> dict[str, str]:
    """The digest of what a value can run, under a name that says in what it is written: digests of
    different dialects are of different things.

    >>> code_of("act", torch.relu)
    {}
    """
    digest = program(value, as_text)
    return {} if digest is None else {f"{CODE}{name} ({dialect(value)})": digest}


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "torch"


def as_text(value: Any, depth: int = _DEPTH) -> str:
    """A value by what it is, not where: equal text for what computes the same."""
    if isinstance(value, (*_PLAIN, slice, range)) or depth == 0:
        return repr(value) if depth else type(value).__qualname__
    inner = functools.partial(as_text, depth=depth - 1)
    if isinstance(value, (Tensor, np.ndarray)):
        return _digest(value)
    if isinstance(value, io.BytesIO):
        return repr(value.getvalue())
    if isinstance(value, Mapping):
        items = ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items())
        return f"{{{items}}}" if type(value) is dict else f"{type(value).__name__}({{{items}}})"
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(inner, value)) + "," * (isinstance(value, tuple) and len(value) == 1)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({sorted(map(inner, value))})"
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {type(value.__self__).__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        held = _captured(value)
        return f"{value.__module__}.{value.__qualname__}" + (inner(held) if held else "")
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    fields = vars(value) if hasattr(value, "__dict__") else {}
    return f"{type(value).__qualname__}({inner(fields)})"


def _digest(value: Any) -> str:
    t = torch.as_tensor(value) if isinstance(value, Tensor) or value.dtype != object else None
    if t is None:
        return f"array{value.shape}"
    if t.is_meta:
        return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"
    data = t.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)} {digest}"


def check_models(models: Any, *, on_meta: bool = False) -> None:
    """At least two modules, with everything visible, on one device and in corresponding dtypes;
    on_meta: they may have shapes only."""
    if not isinstance(models, Sequence) or len(models) < 2:
        count = len(models) if isinstance(models, Sequence) else f"a {type(models).__name__}"
        raise ZipError(f"pass a list of at least two models; got {count}")
    for k, model in enumerate(models):
        check_visible(model, f"model {k}", on_meta=on_meta)
    _check_devices(models)


def _check_devices(models: Sequence[nn.Module]) -> None:
    """All parameters of all models lie on one device, and corresponding ones share a dtype."""
    kinds = []
    for model in models:
        tensors = [*model.parameters(), *model.buffers()]
        devices = sorted({str(t.device) for t in tensors})
        dtypes = sorted({str(t.dtype) for t in tensors if inexact(t)})
        kinds.append((devices, dtypes))
    for k, kind in enumerate(kinds):
        for what, ours, theirs in zip(("devices", "dtypes"), kinds[0], kind, strict=True):
            if ours != theirs:
                raise ZipError(
                    f"the models have different {what}: model 0 {ours}, model {k} {theirs}; move "
                    "them to one first (model.to(...))"
                )
        if len(kind[0]) > 1:
            raise ZipError(f"model {k} is spread over devices {kind[0]}; move it to one first")
