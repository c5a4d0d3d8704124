"""Elements: the numbers of all elements of all storages.

They lie beside the storages, in the same order: a view of a tensor is the same view of its numbers,
and what is written to one is seen through all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zipfx.hashing import Hashes, hash64
from zipfx.model.memory import storage_key
from zipfx.model.tensors import leaves

#: of what a node computes: the digests and shapes of its tensors, other things as text
Value = tuple[Any, ...]

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class _Numbered:
    """The elements of a storage, of `size` bytes each, and their numbers (0: none yet)."""

    ref: Any
    size: int
    numbers: Hashes


class Elements:
    """Numbers by storage; constant: the storages that are known by their values.

    >>> elements, x = Elements(), torch.zeros(2, 3)
    >>> elements.fill(x, 5)
    >>> [elements.digest(t) == elements.digest(x) for t in (x.view(3, 2), x.T, x.T.T)]
    [True, False, True]
    """

    def __init__(self) -> None:
        self.storages: dict[int, _Numbered] = {}
        self.constant: set[int] = set()
        self._most = 64  # storages, before those that are gone are forgotten

    def add(self, t: Tensor) -> None:
        """Make a tensor's storage known, with no numbers yet."""
        self.storages.setdefault(storage_key(t), _blank(t))

    def is_constant(self, t: Tensor) -> bool:
        return storage_key(t) in self.constant

    def window(self, t: Tensor) -> Hashes | None:
        """The numbers of a tensor's elements, as a view (None: its storage is unknown, or seen
        through another dtype)."""
        known = self.storages.get(storage_key(t))
        if known is None or known.ref.expired() or known.size != t.itemsize:
            return None
        whole = known.numbers[int(t.storage_offset()) :]
        return np.lib.stride_tricks.as_strided(whole, t.shape, [s * 8 for s in t.stride()])

    def fill(self, t: Tensor, number: int) -> None:
        """New numbers for all elements of a tensor, in their order."""
        self.put(t, hash64(_places(t).view(np.int64) ^ number))

    def put(self, t: Tensor, numbers: Hashes) -> None:
        window = self.window(t)
        if window is None:
            self.storages[storage_key(t)] = _blank(t)
            window = self.window(t)
            if len(self.storages) > self._most:
                self._forget()
        assert window is not None
        window[...] = numbers.reshape(t.shape)

    def by_value(self, t: Tensor) -> None:
        """Number a tensor by what it holds."""
        self.put(t, _hashed(t))
        self.constant.add(storage_key(t))

    def digest(self, t: Tensor) -> int:
        """Of the numbers of a tensor's elements, in their order."""
        window = self.window(t)
        if window is None:
            self.by_value(t)  # a tensor that came from nowhere, such as one in an attribute
            window = self.window(t)
        assert window is not None
        if not t.numel():
            return 0
        with np.errstate(over="ignore"):
            flat = window.reshape(-1) + _places(t)
            return int(hash64(flat.view(np.int64)).sum(dtype=np.uint64))

    def value(self, value: Any) -> Value:
        """What a node has computed."""
        return tuple(
            (self.digest(x), tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
            for x in leaves(value)
        )

    def _forget(self) -> None:
        gone = [key for key, known in self.storages.items() if known.ref.expired()]
        for key in gone:
            del self.storages[key]
            self.constant.discard(key)
        self._most = 64 + 2 * len(self.storages)


def _blank(t: Tensor) -> _Numbered:
    storage = t.untyped_storage()
    count = storage.nbytes() // t.itemsize
    return _Numbered(StorageWeakRef(storage), t.itemsize, np.zeros(count, np.uint64))


def _places(t: Tensor) -> Hashes:
    """A number for each place in a tensor, whatever it holds."""
    with np.errstate(over="ignore"):
        return np.arange(t.numel(), dtype=np.uint64) * _ODD


def _hashed(t: Tensor) -> Hashes:
    """The hashes of a tensor's entries, one after the other: equal ones for equal numbers, also
    where these are floats of different dtypes, or integers of different dtypes."""
    values = t.detach().cpu().contiguous().reshape(-1)
    real = torch.view_as_real(values) if values.is_complex() else values
    wide = real.double() if real.is_floating_point() else real.long()
    bits = (wide + 0 if wide.dtype == torch.int64 else wide + 0.0).numpy().view(np.int64)
    found = hash64(bits)
    if values.is_complex():
        found = hash64((found[..., 0] ^ hash64(found[..., 1].view(np.int64))).view(np.int64))
    return found.reshape(-1)
