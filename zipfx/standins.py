"""Stand-ins: example inputs as plain values that say what they are like, and inputs like these.

A saved merge holds no data. What tracing goes by is the shapes and dtypes of tensors, and numbers
and other plain values as they are. Of tensors of integers the largest is kept, since stand-ins must
be legal as indices, lengths or flags: they are filled with it. Others are random, 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zipfx.errors import ZipError

#: meta key of a merged module: what its models were traced with
TRACED = "zipfx_traced"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Traced:
    """inputs: the example inputs, as `described`; tracer: the type of the caller's own, if any;
    names: of the last inputs, those that are given by name."""

    inputs: Any
    tracer: str | None = None
    names: tuple[str, ...] = ()


def described(value: Any) -> Any:
    """What an input is like, as JSON knows it.

    >>> described((torch.tensor([[3, 5]]), None))
    {'tuple': [{'shape': [1, 2], 'dtype': 'int64', 'largest': 5}, None]}
    """
    if isinstance(value, Tensor) and _is_dense(value):
        real = value.is_floating_point() or value.is_complex()
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "largest": None if real or not value.numel() else int(value.long().max()),
        }
    if type(value) in (tuple, list):
        return {type(value).__name__: [described(v) for v in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: described(v) for key, v in value.items()}}
    if type(value) in _PLAIN:
        return value
    return {"other": f"{type(value).__module__}.{type(value).__qualname__}"}


def _is_dense(t: Tensor) -> bool:
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized)


def drawn(description: Any, device: torch.device) -> Any:
    """An input that is like what was described, the same at every call.

    Raises:
        ZipError: it can not be drawn.

    >>> drawn(described([torch.tensor([3, 5]), "mean"]), torch.device("cpu"))
    [tensor([5, 5]), 'mean']
    """
    if isinstance(description, _PLAIN):
        return description
    match description:
        case {"shape": list(shape), "dtype": str(name), "largest": largest}:
            return _tensor(shape, getattr(torch, name, None), largest).to(device)
        case {"tuple": list(items)}:
            return tuple(drawn(v, device) for v in items)
        case {"list": list(items)}:
            return [drawn(v, device) for v in items]
        case {"dict": dict(items)}:
            return {key: drawn(v, device) for key, v in items.items()}
        case {"other": name}:
            raise ZipError(
                f"the example inputs hold a {name}, which is not stored: pass example_inputs=..."
            )
        case _:
            raise ZipError(f"example inputs can not be drawn from {description!r}")


def _tensor(shape: list[int], dtype: Any, largest: Any) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise ZipError(f"a tensor of the example inputs has no dtype of torch: {dtype}")
    try:
        if largest is not None:
            return torch.full(shape, largest, dtype=dtype)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    except (RuntimeError, TypeError) as error:
        raise ZipError(f"a tensor {shape} can not be drawn: {error}") from error
