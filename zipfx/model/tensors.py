"""Tensors: those in a value, such as a batch or an output, and those of a module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, but for rounding."""
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    scale = float(a.abs().nan_to_num(0, 0).sum()) / max(1, a.numel())
    return torch.allclose(a, b, 1e-3, 1e-3 * scale, equal_nan=True)


def alike(a: Any, b: Any) -> bool:
    """Whether the tensors in two values have the same shapes and dtypes, and are close.

    >>> alike({"x": torch.ones(2)}, [torch.ones(2)]), alike(torch.ones(2), torch.ones(2).double())
    (True, False)
    """
    ours, theirs = ([t for t in leaves(v) if isinstance(t, Tensor)] for v in (a, b))
    same = [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    return same and all(map(close, ours, theirs))


def leaves(value: Any) -> list[Any]:
    """As `tree_leaves`, and what dataclasses hold."""
    found = []
    for x in tree_leaves(value):
        parts = _fields(x)
        found += [x] if parts is None else leaves(parts)
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same value with every tensor in it replaced, also in dataclasses."""

    def replaced(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return function(x)
        parts = _fields(x)
        if parts is None:
            return x
        twin = copy.copy(x)
        for name, part in parts.items():
            object.__setattr__(twin, name, map_tensors(function, part))
        return twin

    return tree_map(replaced, value)


def _fields(x: Any) -> dict[str, Any] | None:
    """What a dataclass holds (None: it is none); to pytree it is a leaf."""
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return None
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}


def clone_tensors(value: Any) -> Any:
    """A copy of every tensor in a value, for graphs that may write into their inputs."""
    return map_tensors(torch.Tensor.clone, value)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def constant_names(module: nn.Module) -> set[str]:
    """Qualified names of the buffers that are constants of the code and no weights: those that are
    not persistent, and, in a traced module, those that forward wrote down.

    >>> module = nn.Module()
    >>> module.register_buffer("table", torch.zeros(3), persistent=False)
    >>> constant_names(module)
    {'table'}
    """
    return {
        f"{path}.{name}" if path else name
        for path, m in module.named_modules()
        if not isinstance(m, torch.jit.ScriptModule)
        for name in m._non_persistent_buffers_set & set(m._buffers)
    }


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its class does: no forward was put on the instance, nor is it
    that of a class derived from this one.

    >>> runs_as(nn.Linear(2, 2), nn.Linear), runs_as(nn.ReLU(), nn.Linear)
    (True, False)
    """
    return type(module).forward is kind.forward and "forward" not in vars(module)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics that can be re-estimated."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.track_running_stats
        and isinstance(module.running_mean, torch.Tensor)
    )


def inexact(t: Tensor) -> bool:
    """Whether a tensor holds numbers that can be averaged: real or complex, no integers."""
    return t.is_floating_point() or t.is_complex()


def widened(t: Tensor) -> Tensor:
    """In float64, or in complex128; integers stay as they are.

    >>> widened(torch.ones(2, dtype=torch.complex64)).dtype, widened(torch.ones(2)).dtype
    (torch.complex128, torch.float64)
    """
    if not inexact(t):
        return t
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def as_real(t: Tensor) -> Tensor:
    """Complex numbers as pairs, along a further dimension at the end; real ones as they are."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def batch_size(arguments: Any) -> int | None:
    """The first dimension that all tensors have in common; None if they have none. Numbers, and
    tensors that are the same for all samples (of length 1), do not count.

    >>> batch_size(((torch.zeros(8, 3), torch.tensor(0.5)), {"position": torch.zeros(1, 3)}))
    8
    """
    sizes = {len(t) for t in leaves(arguments) if isinstance(t, Tensor) and t.ndim}
    sizes = sizes - {1} or sizes
    return sizes.pop() if len(sizes) == 1 else None


def first_samples(arguments: Any, n: int) -> Any:
    """The first n samples of a batch (all of it, if its tensors share no first dimension)."""
    if batch_size(arguments) is None:
        return arguments

    def cut(t: Tensor) -> Tensor:
        if not t.ndim:
            return t
        if t.layout == torch.strided:
            return t[:n]
        return t.index_select(0, torch.arange(n, device=t.device))

    return map_tensors(cut, arguments)
