"""Plain values: frozen dataclasses to JSON and back, checked against their annotations."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def written(value: Any) -> str:
    """A dataclass of plain values as JSON; tuples become lists, numpy's numbers Python's."""
    return json.dumps(dataclasses.asdict(value), default=lambda x: x.item())


def read(kind: type[T], text: str) -> T:
    """The dataclass that was `written`.

    Raises:
        ValueError: the text is no JSON, or its values are not those that the class is annotated
            with; the message names the field.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     at: tuple[int, ...]
    ...     name: str | None = None
    >>> read(Point, written(Point((1, 2))))
    Point(at=(1, 2), name=None)
    >>> read(Point, '{"at": [1, 2.5]}')
    Traceback (most recent call last):
    ValueError: Point.at is 2.5, not of type int
    """
    found: T = _read(kind, json.loads(text), kind.__name__)
    return found


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
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}")
    try:
        return kind(**{k: _read(kinds[k], v, f"{name}.{k}") for k, v in values.items()})
    except TypeError as error:
        raise ValueError(f"{name} is not complete: {error}") from error


def _typed(kind: Any, value: Any, name: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value
