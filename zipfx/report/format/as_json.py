"""As JSON: frozen dataclasses to strict JSON and back, checked against their annotations."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

#: levels of lists and dicts inside one another; what is deeper is not parsed
#: metadata of a field of a dataclass that is not part of its text, and must have a default
NOT_STORED = {"stored": False}
DEEPEST = 100
#: JSON has no numbers for these
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MARKS = re.compile(r'["\\\[\]{}]')


def written(value: Any) -> str:
    """A dataclass of plain values as JSON; tuples become lists, numpy's numbers Python's, and
    floats that JSON can not hold their names.

    Raises:
        ValueError: something in it is no plain value, or lies too deep.
    """
    text = json.dumps(_plain(value), allow_nan=False)
    _check_depth(text)
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _stored(value)}
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not isinstance(value, float) and hasattr(value, "item"):  # a number of numpy
        return _plain(value.item())
    if not isinstance(value, float):
        raise ValueError(f"a {type(value).__name__} is no plain value")
    return float(value) if math.isfinite(value) else str(float(value))


def _stored(kind: Any) -> list[str]:
    """The fields of a dataclass that are written: `field(metadata=NOT_STORED)` is not."""
    return [f.name for f in dataclasses.fields(kind) if f.metadata != NOT_STORED]


def read(kind: type[T], text: str) -> T:
    """The dataclass that was `written`.

    Raises:
        ValueError: the text is no JSON, or its values are not those that the class is annotated
            with; the message names the field.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     at: tuple[float, ...]
    ...     name: str | None = None
    >>> read(Point, written(Point((1.5, math.inf))))
    Point(at=(1.5, inf), name=None)
    >>> read(Point, '{"at": [1, "x"]}')
    Traceback (most recent call last):
    ValueError: Point.at is 'x', not of type float
    """
    found: T = _read(kind, parsed(text), kind.__name__)
    return found


def parsed(text: str) -> Any:
    """What JSON says (also with NaN and Infinity, which are no JSON, but were written once).

    Raises:
        ValueError: it is no JSON, or lies too deep.
    """
    _check_depth(text)
    return json.loads(text)


def _check_depth(text: str) -> None:
    """Before the parser, which may recurse until the stack is full, sees the text."""
    depth, quoted, escaped = 0, False, -1
    for mark in _MARKS.finditer(text):
        if mark.start() == escaped:
            continue
        if mark[0] == "\\":
            escaped = mark.end()
        elif mark[0] == '"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if mark[0] in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"lists and dicts lie more than {DEEPEST} deep in one another")


def _read(kind: Any, value: Any, name: str) -> Any:
    if kind is Any:
        return value
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # X | None
        (other,) = (p for p in parts if p is not types.NoneType)
        return None if value is None else _read(other, value, name)
    if typing.get_origin(kind) is tuple:
        items = _typed(list, value, name)
        kinds = [parts[0]] * len(items) if parts[-1] is Ellipsis else parts
        if len(kinds) != len(items):
            raise ValueError(f"{name} has {len(items)} items, not {len(kinds)}")
        return tuple(_read(k, v, name) for k, v in zip(kinds, items, strict=True))
    if typing.get_origin(kind) is dict:
        return {
            k: _read(parts[1], v, f"{name}[{k!r}]") for k, v in _typed(dict, value, name).items()
        }
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _typed(dict, value, name), name)
    return _typed(kind, value, name)


def _dataclass(kind: Any, values: dict[str, Any], name: str) -> Any:
    kinds = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(_stored(kind)))
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}")
    try:
        return kind(**{k: _read(kinds[k], v, f"{name}.{k}") for k, v in values.items()})
    except TypeError as error:
        raise ValueError(f"{name} is not complete: {error}") from error


def _typed(kind: Any, value: Any, name: str) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name} is out of range") from error
    if kind is float and type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) is not kind:
        shown = repr(value)
        shown = shown if len(shown) < 80 else shown[:80] + "..."
        raise ValueError(f"{name} is {shown}, not of type {kind.__name__}")
    return value
