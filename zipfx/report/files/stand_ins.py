"""Stand-ins: example inputs as plain values that say what they are like, and inputs like these.

A saved merge holds no data. What tracing goes by is the shapes and dtypes of tensors, and numbers
and other plain values as they are. Of tensors of integers the largest is kept, since stand-ins must
be legal as indices, lengths or flags: they are filled with it. Others are random, 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zipfx.errors import ZipError, first_line

#: entries that all tensors of drawn inputs may have; two images of 1024 x 1024 have 6 million
LARGEST = 2**23
#: the same on the "meta" device, where nothing is computed, but there are models that loop
LARGEST_SHAPES = 2**25


@dataclass(frozen=True)
class Traced:
    """inputs: the example inputs, as `described`; tracer: the type of the caller's own, if any;
    names: of the last inputs, those that are given by name; front: what made the graphs."""

    inputs: Any
    tracer: str | None = None
    names: tuple[str, ...] = ()
    front: str = "symbolic"


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
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    return {"other": f"{type(value).__module__}.{type(value).__qualname__}"}


def as_described(stored: Any) -> Any:
    """A description that came from a file, as `described` gives it.

    Raises:
        ZipError: it is none.

    >>> as_described({"tuple": [math.inf, {"list": []}]})
    {'tuple': [{'float': 'inf'}, {'list': []}]}
    """
    match stored:
        case {"tuple": list(items)} | {"list": list(items)}:
            return {kind: [as_described(v) for v in items] for kind in stored}
        case {"dict": dict(items)}:
            return {"dict": {key: as_described(v) for key, v in items.items()}}
        case {"shape": list(shape), "dtype": str(), "largest": int() | None}:
            if all(type(n) is int for n in shape):
                return stored
        case {"other": str()} | {"float": "nan" | "inf" | "-inf"}:
            return stored
        case bool() | int() | float() | str() | None:
            return described(stored)
    raise ZipError(f"{repr(stored)[:80]} describes no example inputs; save it again")


def _is_dense(t: Tensor) -> bool:
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized)


def drawn(description: Any, device: torch.device) -> Any:
    """An input that is like what was described, the same at every call.

    Raises:
        ZipError: it can not be drawn, or its tensors have more than `LARGEST` entries in all (on
            the "meta" device, `LARGEST_SHAPES`).

    >>> drawn(described([torch.tensor([3, 5]), "mean"]), torch.device("cpu"))
    [tensor([5, 5]), 'mean']
    """
    return _Drawn(device).value(as_described(description))


class _Drawn:
    """What is drawn for one description; left: entries that its tensors may still have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.most = self.left = LARGEST_SHAPES if device.type == "meta" else LARGEST

    def value(self, description: Any) -> Any:
        match description:
            case {"shape": shape, "dtype": dtype, "largest": largest}:
                return self.tensor(shape, dtype, largest)
            case {"tuple": items}:
                return tuple(self.value(v) for v in items)
            case {"list": items}:
                return [self.value(v) for v in items]
            case {"dict": items}:
                return {key: self.value(v) for key, v in items.items()}
            case {"float": number}:
                return float(number)
            case {"other": name}:
                raise ZipError(
                    f"the example inputs hold a {name}, which is not stored: pass "
                    "example_inputs=..."
                )
        return description

    def tensor(self, shape: list[int], name: str, largest: Any) -> Tensor:
        dtype = vars(torch).get(name)  # getattr would import whatever torch has under that name
        if not isinstance(dtype, torch.dtype):
            raise ZipError(f"a tensor of the example inputs has no dtype of torch: {name[:80]!r}")
        if not all(0 <= n < 2**63 for n in shape) or len(shape) > 64:
            raise ZipError(f"a tensor of shape {str(shape)[:80]} can not be drawn")
        self.left -= math.prod(shape)
        if self.left < 0:
            raise ZipError(
                f"the example inputs have a tensor of shape {shape}, and stand-ins are drawn for "
                f"{self.most:,} entries in all: pass example_inputs=..."
            )
        try:
            if self.device.type == "meta":
                return torch.empty(shape, dtype=dtype, device=self.device)
            if largest is not None:
                return torch.full(shape, largest, dtype=dtype).to(self.device)
            generator = torch.Generator().manual_seed(0)
            return torch.rand(shape, generator=generator).to(self.device, dtype)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            text = f"a tensor {shape} of {name} can not be drawn: {first_line(error)}"
            raise ZipError(text) from error
