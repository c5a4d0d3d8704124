"""Checks: what callers give is of the type and range that it should be, or a `ZipError`."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import nn

from zipfx.errors import ZipError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, of any type that is one.

    Raises:
        ZipError: it is none, or below `least`.

    >>> whole("rounds", 2, 0)
    2
    >>> whole("rounds", 0.5, 0)
    Traceback (most recent call last):
    zipfx.errors.ZipError: rounds is 0.5: it must be a whole number, at least 0
    """
    fine = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fine or (least is not None and int(value) < least):
        bound = "" if least is None else f", at least {least}"
        raise ZipError(f"{name} is {value!r}: it must be a whole number{bound}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ZipError: it is neither.

    >>> flag("verify", "no")
    Traceback (most recent call last):
    zipfx.errors.ZipError: verify is 'no': it must be True or False
    """
    if type(value).__name__ not in ("bool", "bool_"):  # that of numpy, too
        raise ZipError(f"{name} is {value!r}: it must be True or False")
    return bool(value)


def module(name: str, value: Any) -> nn.Module:
    """A module.

    Raises:
        ZipError: it is none.

    >>> module("the model", 1)
    Traceback (most recent call last):
    zipfx.errors.ZipError: the model is a int, not a torch.nn.Module
    """
    if not isinstance(value, nn.Module):
        raise ZipError(f"{name} is a {type(value).__name__}, not a torch.nn.Module")
    return value


def real(name: str, value: Any, least: float = -math.inf) -> float:
    """A real number that is not NaN.

    Raises:
        ZipError: it is none, or below `least`.

    >>> real("ridge", float("nan"), 0)
    Traceback (most recent call last):
    zipfx.errors.ZipError: ridge is nan: it must be a number, at least 0
    """
    fine = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not fine or not float(value) >= least:
        bound = "" if least == -math.inf else f", at least {least:g}"
        raise ZipError(f"{name} is {value!r}: it must be a number{bound}")
    return float(value)
