"""Naming: what a callable is called, wherever it lies in memory and whenever it is asked."""

from __future__ import annotations

import functools
import re
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 200  # a report has a line for it


def without_addresses(text: str) -> str:
    """A text such as `repr` gives, with nothing in it that another process would not say.

    >>> without_addresses("<function f at 0x7f12ab34>")
    '<function f>'
    """
    return _ADDRESS.sub("", text)


def name_of_callable(value: Any) -> str:
    """What to call a function, or anything else that can be called, in a report.

    Functions, classes and methods have their qualified names; a `functools.partial` names its
    arguments too; other objects are what `repr` says, where that is more than an address.

    >>> name_of_callable(functools.partial(round, ndigits=2))
    'partial(builtins.round, ndigits=2)'
    >>> name_of_callable(re.compile("a").match), name_of_callable(lambda x: x)
    ("re.compile('a').match", 'zipfx.naming.<lambda>')
    """
    if isinstance(value, functools.partial):
        named = sorted(value.keywords.items())
        given = [*map(_named, value.args), *(f"{key}={_named(v)}" for key, v in named)]
        return f"partial({', '.join([name_of_callable(value.func), *given])})"
    owner, name = getattr(value, "__self__", None), getattr(value, "__name__", None)
    qualified = getattr(value, "__qualname__", None)
    bound = owner is not None and not isinstance(owner, type(functools)) and isinstance(name, str)
    if bound:  # a method of an object, or of a class
        return f"{name_of_callable(owner)}.{name}"
    if isinstance(qualified, str):
        module = getattr(value, "__module__", None)
        return f"{module}.{qualified}" if isinstance(module, str) else qualified
    return _shown(value)


def _named(value: Any) -> str:
    """An argument: by name if it is a function, else as it is written."""
    return name_of_callable(value) if callable(value) else _shown(value)


def _shown(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    try:
        text = repr(value)
    except Exception:  # of somebody else's making
        return kind
    if text == object.__repr__(value):
        return kind
    text = without_addresses(" ".join(text.split()))
    if callable(value) and type(value).__name__ not in text:
        text = f"{kind}: {text}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
