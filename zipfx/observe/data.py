"""Data: what the caller gives as such becomes forward's arguments, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zipfx.checks import whole
from zipfx.errors import ZipError, first_line
from zipfx.model.calls.arguments import given, left_out
from zipfx.model.tensors import batch_size, first_samples, map_tensors
from zipfx.modes import as_caller
from zipfx.observe.padding import MaskOf, mask_by, mask_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NO_BATCH = object()
_NO_LOADERS = (Tensor, np.ndarray, Mapping, str, bytes, nn.Module)  # though they can be iterated
BatchToArgs = Callable[[Any], Any]


@dataclass(frozen=True)
class Calibration:
    """Batches that can be run through as often as needed.

    loaders: one iterable of batches, or one per model (taken in turns).
    max_samples: at most this many samples of each loader (None: all); no batch is asked for beyond.
    A batch whose tensors have no first dimension in common counts as one sample.
    dropped: entries of a batch that forward is not given.
    mask: tells of a batch which positions count (None: its `attention_mask`).
    forward: what the batches are for; given: the names of its arguments that the first one has.
    """

    loaders: tuple[Iterable[Any], ...]
    batch_to_args: BatchToArgs | None = None
    max_samples: int | None = None
    device: torch.device | None = None
    dropped: frozenset[str] = frozenset()
    forward: Callable[..., Any] | None = None
    given: frozenset[str] = frozenset()
    mask: MaskOf | None = None

    def __iter__(self) -> Iterator[Arguments]:
        """Yield (args, kwargs) on the device, cut so that max_samples is kept."""
        return (arguments for _, arguments, _ in self.by_source())

    def by_source(self) -> Iterator[tuple[int, Arguments, Tensor | None]]:
        """The same batches, each with the number of the loader that it comes from, and which of its
        positions count (B, T); none is empty.

        Raises:
            ZipError: a batch that can not be read; a loader without a sample.
        """
        with as_caller():
            turns = {source: iter(loader) for source, loader in enumerate(self.loaders)}
        seen: dict[int, float] = dict.fromkeys(turns, 0)
        empty = False
        while turns:
            for source in list(turns):
                with as_caller():
                    batch = next(turns[source], _NO_BATCH)
                    found = None if batch is _NO_BATCH else self._arguments(batch)
                if found is None:
                    del turns[source]
                    continue
                arguments = self._read(*found)
                size = batch_size(arguments)
                if size == 0:
                    empty = True
                    continue
                mask = self._mask(batch, arguments, size)
                left = math.inf if self.max_samples is None else self.max_samples - seen[source]
                if size is not None and size > left:
                    arguments = first_samples(arguments, int(left))
                    mask = None if mask is None else mask[: int(left)]
                seen[source] += min(size or 1, left)
                if seen[source] == self.max_samples:
                    del turns[source]
                yield source, map_tensors(self._move, arguments), map_tensors(self._move, mask)
        self._check(seen, empty)

    def _mask(self, batch: Any, arguments: Arguments, size: int | None) -> Tensor | None:
        if self.mask is None:
            return mask_of(arguments[1])
        return mask_by(self.mask, batch, size)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """What forward is given of a batch: the same arguments of each, since they decide the way
        that it takes."""
        left = {k: v for k, v in kwargs.items() if k not in self.dropped}
        if self.forward is None:
            return args, left
        unknown, labels = left_out(self.forward, left)
        left = {k: v for k, v in left.items() if k not in unknown | labels}
        with suppress(TypeError):  # it does not fit, which is said where it is run
            odd = given(self.forward, args, left) ^ self.given
            if odd:
                raise ZipError(
                    f"some calibration batches hold {', '.join(map(repr, sorted(odd)))} and others "
                    "do not, so that forward takes more than one way: give it in all of them, or "
                    "in none"
                )
        return args, left

    def _check(self, seen: Mapping[int, float], empty: bool) -> None:
        missing = [source for source, samples in seen.items() if not samples]
        if missing and len(self.loaders) > 1:
            raise ZipError(
                f"the loader of model {missing[0]}, calib_loader[{missing[0]}], gave no "
                + ("sample: its batches are empty" if empty else "batch")
            )
        if missing and empty:
            raise ZipError("the calibration data holds no sample: all its batches are empty")

    def _move(self, t: Tensor) -> Tensor:
        if t.is_meta:
            raise ZipError('a calibration batch is on the device "meta", where it holds no values')
        return t if self.device is None else t.to(self.device)

    def _arguments(self, batch: Any) -> Arguments:
        if self.batch_to_args is not None:
            try:
                batch = self.batch_to_args(batch)
            except Exception as error:
                raise ZipError(
                    f"batch_to_args fails on a batch, a {type(batch).__name__}: {first_line(error)}"
                ) from error
            if isinstance(batch, Mapping):
                return (), dict(batch)
            return (batch if isinstance(batch, tuple) else (batch,)), {}
        if isinstance(batch, Tensor):
            return (batch,), {}
        if isinstance(batch, Mapping) and batch:
            return (), dict(batch)
        if isinstance(batch, (tuple, list)) and batch:
            first = batch[0]
            if isinstance(first, (Tensor, Mapping, list, tuple)):
                return (first,), {}
        if isinstance(batch, np.ndarray):
            raise ZipError(
                f"a calibration batch is a numpy array {batch.shape} of {batch.dtype}: pass "
                "tensors, such as torch.from_numpy(batch), or batch_to_args=torch.from_numpy"
            )
        raise ZipError(
            f"a calibration batch is a {type(batch).__name__}; it must be a tensor, a tuple or "
            "list whose first item is the input, or a dict of forward's keyword arguments. For "
            "anything else pass batch_to_args=..., a function from a batch to the arguments"
        )


class _Kept:
    """What an iterator gives, drawn as it is asked for, and kept, since it gives it only once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._drawn = batches, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        at = 0
        while True:
            if at == len(self._drawn):
                batch = next(self._batches, _NO_BATCH)
                if batch is _NO_BATCH:
                    return
                self._drawn.append(batch)
            yield self._drawn[at]
            at += 1


def calibration(
    data: Any,
    models: int,
    batch_to_args: BatchToArgs | None = None,
    max_samples: int | None = None,
    device: torch.device | None = None,
    mask: MaskOf | None = None,
) -> Calibration:
    """Understand the `calib_loader` argument: one iterable of batches, or one for each model.

    Raises:
        ZipError: not an iterable, or a list that could be read both ways.
    """
    if max_samples is not None:
        max_samples = whole("max_samples (None: all)", max_samples, 1)
    if batch_to_args is not None and not callable(batch_to_args):
        raise ZipError(
            f"batch_to_args is a {type(batch_to_args).__name__}: it must be a function of a batch"
        )
    if mask is not None and not callable(mask):
        raise ZipError(
            f"mask is a {type(mask).__name__}: it must be a function of a batch, which tells what "
            "counts in it"
        )
    if isinstance(data, _NO_LOADERS) or not isinstance(data, Iterable):
        raise ZipError(
            f"calib_loader is a {type(data).__name__}; pass an iterable of batches, such as a "
            "DataLoader or a list of tensors (a single batch x: [x])"
        )
    items = data if isinstance(data, Sequence) else ()
    odd = [i for i, x in enumerate(items) if not (_is_loader(x) or _of_batches(x))]
    several = any(map(_is_loader, items))
    if several and len(items) != models:
        raise ZipError(
            f"calib_loader is a list of {len(items)}, with loaders in it, for {models} models: "
            "pass one loader, or one for each model"
        )
    if not several and items and not odd and len(items) != models:
        raise ZipError(
            f"calib_loader is a list of {len(items)} lists of batches, for {models} models: pass "
            "one list of batches, or one for each model"
        )
    if several and odd:
        raise ZipError(
            f"calib_loader[{odd[0]}] is a {type(items[odd[0]]).__name__}, beside loaders: pass one "
            "loader for each model; a list is one if its batches are tuples"
        )
    loaders = (data,)
    if len(items) == models and not odd:
        loaders = tuple(items)
    elif len(items) == models and all(map(_ambiguous, items)):
        raise ZipError(
            f"calib_loader is a list of {models} lists, which could be {models} batches or one "
            "loader per model; pass DataLoaders, or lists whose batches are tuples: [(x,), ...]"
        )
    once = {id(x): _Kept(x) for x in loaders if isinstance(x, Iterator)}
    kept = tuple(once.get(id(x), x) for x in loaders)
    return Calibration(kept, batch_to_args, max_samples, device, mask=mask)


def _is_loader(x: Any) -> bool:
    return isinstance(x, Iterable) and not isinstance(x, (*_NO_LOADERS, tuple, list))


def _of_batches(x: Any) -> bool:
    """A list of tuples, which as a batch would be odd."""
    return isinstance(x, list) and all(isinstance(t, tuple) and len(t) > 0 for t in x)


def _ambiguous(x: Any) -> bool:
    """A list of what could be batches, or the parts of one."""
    if not isinstance(x, list) or not x:
        return False
    if all(isinstance(t, (tuple, list, Mapping)) for t in x):
        return True
    return all(isinstance(t, Tensor) for t in x) and len({(t.dtype, t.ndim) for t in x}) == 1
