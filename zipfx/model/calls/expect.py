"""Expect: what a graph takes for granted of its inputs, as checks in front of its other nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.model.calls.sizes import expect_sizes


def expect_absent(value: Any, name: str) -> None:
    """Refuse what the graph has no use for, since it was traced without.

    >>> expect_absent(1, "mask")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zipfx.errors.ZipError: 'mask' was None when the models were traced, and would be ignored: ...
    """
    if value is not None:
        raise ZipError(
            f"{name!r} was None when the models were traced, and would be ignored: call it "
            f"without, or merge with batches (or example_inputs) that hold {name!r}"
        )


def expect_given(value: Any, name: str) -> None:
    """Refuse to go on without what the models were traced with."""
    if value is None:
        raise ZipError(
            f"{name!r} was given when the models were traced, and is needed: call it with "
            f"{name}=..., or merge with batches (or example_inputs) without {name!r}"
        )


def expect_equal(value: Any, name: str, wanted: Any) -> None:
    """Refuse another setting than the one that forward was traced with."""
    if isinstance(value, Tensor) or value != wanted:
        raise ZipError(
            f"{name!r} was {wanted!r} when the models were traced, which decided the way that "
            f"forward takes, and is {value!r}: merge with example_inputs that say so"
        )


def expect_off(value: Any, name: str) -> None:
    """Refuse to switch on what the graph was traced without (such as a cache).

    >>> expect_off(None, "use_cache"), expect_off(False, "use_cache")
    (None, None)
    """
    if value is not None and value is not False:
        raise ZipError(
            f"{name!r} was off when the models were traced, and is {value!r}: a graph keeps "
            "nothing between calls. Use the merged weights in the model's own class for that"
        )


def form(value: Any, *, exact: bool) -> str:
    """What a value is made of, in words.

    exact: with the kinds and the numbers of dimensions of tensors, and with all that is no tensor;
    else only which containers hold which entries, and which of these are None.

    >>> form({"x": torch.zeros(2, 3), "n": [1, None]}, exact=True)
    "{'x': a float tensor of 2 dimensions, 'n': [1, None]}"
    >>> form({"x": torch.zeros(2, 3), "n": [1, None]}, exact=False)
    "{'x': a value, 'n': [a value, None]}"
    """
    if isinstance(value, Mapping):
        parts = (f"{key!r}: {form(v, exact=exact)}" for key, v in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(form(v, exact=exact) for v in value)
        return f"({inside})" if isinstance(value, tuple) and exact else f"[{inside}]"
    if value is None:
        return "None"
    if not exact:
        return "a value"
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
    kind = "bool" if value.dtype == torch.bool else "integer"
    kind = "complex" if value.is_complex() else "float" if value.is_floating_point() else kind
    return f"a {kind} tensor of {value.ndim} dimensions"


def expect_form(value: Any, name: str, wanted: str) -> None:
    """Refuse what is made otherwise than what forward was traced with: see `form`.

    >>> expect_form(torch.zeros(2), "x", "a bool tensor of 1 dimensions")
    Traceback (most recent call last):
    zipfx.errors.ZipError: 'x' was a bool tensor of 1 dimensions when the models were traced, ...
    """
    _check_form(name, form(value, exact=True), wanted)


def expect_parts(value: Any, name: str, wanted: str) -> None:
    """Refuse containers that hold other entries than when forward was traced: see `form`."""
    _check_form(name, form(value, exact=False), wanted)


def _check_form(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ZipError(
            f"{name!r} was {wanted} when the models were traced, which decided the way that "
            f"forward takes, and is {found}: merge with example_inputs that are like it"
        )


EXPECTATIONS = (
    expect_absent, expect_given, expect_equal, expect_off, expect_form, expect_parts, expect_sizes
)  # fmt: skip


@dataclass(frozen=True)
class Expectation:
    """What a graph expects of its inputs: one of `EXPECTATIONS`.

    name: of the input (of several: joined by ", "); wanted: values to compare with.
    """

    name: str
    check: Callable[..., None]
    wanted: tuple[Any, ...] = ()

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the check is called with; inputs: by their names.

        >>> Expectation("x", expect_equal, (3,)).arguments({"x": 5})
        (5, 'x', 3)
        """
        values = tuple(inputs[name] for name in self.name.split(", "))
        first = values if self.check is expect_sizes else values[0]
        return (first, self.name, *self.wanted)
