"""Examples: what a model is analysed with: what the caller gives, some data, or a guess."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zipfx.errors import ZipError
from zipfx.model.calls.arguments import given, in_order, spelled, surplus
from zipfx.model.tensors import first_samples, map_tensors
from zipfx.modes import as_caller
from zipfx.observe.data import Arguments, Calibration

_MANY = 256  # samples to analyse with, where two do not come everywhere


def example_batch(example: Any, device: torch.device) -> Arguments:
    """Example inputs - an input, a tuple of arguments, or a dict of them - as (args, kwargs)."""
    moved = map_tensors(lambda t: t.to(device), example)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def first_call(
    model: nn.Module,
    data: Calibration | None,
    example: Any,
    device: torch.device,
    samples: int = 2,
) -> tuple[tuple[Any, ...], tuple[str, ...], Calibration | None, list[str]]:
    """What to analyse a model with: `example`, or some samples of the first batch.

    Returns:
        Its values and the names of the last of them (`calls.in_order`); the data without what
        forward is not to be given; notes that say what that is.

    Raises:
        ZipError: there is no data; a batch does not fit forward's signature, or example_inputs.
    """
    notes: list[str] = []
    batch: Arguments | None = None
    if data is not None:
        batch = next(iter(data), None)
        if batch is None:
            raise ZipError("the calibration data is empty: calib_loader gave no batch")
        # a graph that torch.export wrote may be for one size of batches
        whole_batch = "_guards_fn" in model._modules
        args, kwargs = batch if whole_batch else first_samples(batch, samples)
        dropped, notes = surplus(model, args, kwargs)
        batch = args, {k: v for k, v in kwargs.items() if k not in dropped}
        data = replace(data, dropped=frozenset(dropped))
        with suppress(TypeError):  # which is said below
            has = frozenset(given(model.forward, *batch))
            data = replace(data, forward=model.forward, given=has)
    if example is None:
        assert batch is not None
        return *example_arguments(model.forward, *batch), data, notes
    found, by_name = example_arguments(model.forward, *example_batch(example, device))
    if batch is not None:
        for name, value in batch[1].items():
            names = [a.name for a in spelled(model.forward, found, by_name)]
            if value is not None and (name not in names or found[names.index(name)] is None):
                raise ZipError(
                    f"batches hold {name!r} and example_inputs do not: the models would be traced "
                    "without, and the calibration data would be read without; give it in both, or "
                    "in none"
                )
    return found, by_name, data, notes


@dataclass(frozen=True, eq=False)
class Example:
    """What K models are traced and analysed with.

    inputs: one value for each placeholder; by_name: the names of the last of them; data: the
    calibration data without what forward is not to be given; given: what messages call the inputs;
    guessed, left_out: notes of inputs that were drawn, and of entries of batches that are not used;
    more: gives more samples of the data, if the inputs are some.
    """

    inputs: tuple[Any, ...]
    by_name: tuple[str, ...]
    data: Calibration | None
    given: str
    guessed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    more: Callable[[], tuple[Any, ...]] | None = None


def example_of(
    model: nn.Module, data: Calibration | None, example: Any, device: torch.device
) -> Example:
    """The inputs that the caller gives, else the first samples of the data, else random ones.

    Raises:
        ZipError: see `first_call` and `guessed_input`.
    """
    guessed: tuple[str, ...] = ()
    own = data is not None and example is None
    if data is None and example is None:
        example = guessed_input(model)
        guessed = (
            f"analysed with random inputs of shape {tuple(example.shape)}, guessed from the first "
            "weight: pass example_inputs=... to choose",
        )
    inputs, by_name, kept, left_out = first_call(model, data, example, device)
    return Example(
        inputs,
        by_name,
        kept,
        "the first samples of calib_loader" if own else "example_inputs",
        guessed,
        tuple(left_out),
        (lambda: first_call(model, kept, None, device, _MANY)[0]) if own else None,
    )


def example_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """`in_order`, for what callers give.

    Raises:
        ZipError: it does not fit forward's signature.
    """
    try:
        return in_order(forward, args, kwargs)
    except TypeError as error:
        taken = ", ".join(inspect.signature(forward).parameters)
        raise ZipError(
            f"a batch does not fit the model's forward: {error} (it takes {taken}"
            + (f"; the batch has {', '.join(kwargs)}" if kwargs else "")
            + "). Pass batch_to_args=..., a function from a batch to the input, a tuple of "
            "arguments, or a dict of them"
        ) from error


def guessed_input(model: nn.Module) -> Tensor:
    """Two random samples of a shape that the model takes, going by its first weight.

    Raises:
        ZipError: none of those tried is taken.
    """
    found: Any = (m for m in model.modules() if isinstance(m, tuple(_SHAPES)))
    layer = next(found, None)
    tried = []
    if layer is not None:
        parameter = next(layer.parameters())
        shapes = next(shapes for kind, shapes in _SHAPES.items() if isinstance(layer, kind))
        for shape in shapes(layer):
            tried.append((2, *shape))
            x = torch.zeros(tried[-1], device=parameter.device)
            x = x.long() if isinstance(layer, nn.Embedding) else x.to(parameter.dtype).normal_()
            try:
                with as_caller():
                    copy.deepcopy(model).eval()(x)
            except Exception:  # too small, or of another rank: in many ways
                continue
            return x
    raise ZipError(
        f"no data to analyse the model with, and it takes none of the shapes {tried}; pass "
        "example_inputs=..."
    )


def _images(layer: Any) -> list[tuple[int, ...]]:
    sides = (32, 64, 96, 224, 256)
    return [(layer.in_channels, *[side] * len(layer.kernel_size)) for side in sides]


_SHAPES: dict[type[nn.Module], Callable[[Any], list[tuple[int, ...]]]] = {
    nn.modules.conv._ConvNd: _images,
    nn.Linear: lambda layer: [(layer.in_features,), (16, layer.in_features)],
    nn.RNNBase: lambda layer: [(16, layer.input_size)],
    nn.Embedding: lambda layer: [(16,)],
}
