"""Memory: which tensors lie on the same elements, and which are only neighbours in one storage.

A parameter is a parameter, wherever it lies: after `vector_to_parameters`, as slices of one loaded
tensor, as a recurrent layer's weights are laid out for cuDNN.  Labels, windows and writes belong to
storages, so neighbours are given storages of their own.  Tensors that share elements are tied, and
stay so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor


def storage_key(t: Tensor) -> int:
    """The same for all tensors that lie in one storage, as long as it lives."""
    return int(t.untyped_storage()._cdata)


def is_dense(t: Tensor) -> bool:
    """Whether a tensor fills the memory between its first and its last element, in any order."""
    return _length(t) == t.numel()


def _length(t: Tensor) -> int:
    """Elements from the first to the last, both included."""
    steps = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return 1 + steps if t.numel() else 0


def span(t: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies, in bytes."""
    return t.data_ptr(), t.data_ptr() + _length(t) * t.itemsize


def families(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that share elements; in storages of which several tensors have a part, or one that is
    not dense. Those with a storage to themselves are left out.

    >>> flat = torch.arange(12.0)
    >>> a, b = flat[:6].view(2, 3), flat[6:]
    >>> [len(family) for family in families([a, b, a.T, torch.zeros(3)])]
    [2, 1]
    """
    of_storage: dict[int, dict[int, Tensor]] = {}
    for t in tensors:
        if t.layout == torch.strided and t.numel() and not t.is_meta:
            of_storage.setdefault(storage_key(t), {})[id(t)] = t
    found = []
    for several in of_storage.values():
        if len(several) > 1 or not is_dense(next(iter(several.values()))):
            found += _families(list(several.values()))
    return found


def _families(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    ordered = sorted(tensors, key=span)
    runs: list[list[Tensor]] = []
    end = -1
    for t in ordered:  # those whose spans overlap
        start, stop = span(t)
        if start < end:
            runs[-1].append(t)
        else:
            runs.append([t])
        end = max(end, stop)
    return [
        family
        for run in runs
        for family in ([run] if all(map(is_dense, run)) else _by_element(run))
    ]


def _by_element(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    elements = [_addresses(t) for t in tensors]
    _, where = np.unique(np.concatenate(elements), return_inverse=True)
    owner = np.repeat(np.arange(len(tensors)), [len(e) for e in elements])
    shape = (len(tensors), int(where.max()) + 1)
    touches = coo_array((np.ones(len(where), np.int8), (owner, where)), shape=shape).tocsr()
    of = connected_components(touches @ touches.T, directed=False)[1]
    groups: dict[int, list[Tensor]] = {}
    for t, group in zip(tensors, of.tolist(), strict=True):
        groups.setdefault(group, []).append(t)
    return list(groups.values())


def _addresses(t: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of the bytes at which the elements of a tensor begin, in units of the smallest dtype."""
    index = torch.zeros(1, dtype=torch.int64)
    for n, s in zip(t.shape, t.stride(), strict=True):
        index = (index[:, None] + torch.arange(n) * s * t.itemsize).flatten()
    parts = torch.arange(0, t.itemsize, min(t.itemsize, 4))  # a complex number is two real ones
    index = (index[:, None] + parts).flatten()
    return index.numpy() + int(t.storage_offset()) * t.itemsize


def own_memory(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """For every tensor that does not have a storage to itself, by its id: the same values on a
    storage that it shares only with those that it shares elements with."""
    found: dict[int, Tensor] = {}
    for family in families(tensors):
        if len(family) == 1:
            found[id(family[0])] = family[0].detach().clone(memory_format=torch.contiguous_format)
            continue
        low, high = (f(edges) for f, edges in zip((min, max), zip(*map(span, family))))
        whole = torch.empty(0, dtype=torch.uint8, device=family[0].device)
        storage, start = family[0].untyped_storage(), low - family[0].untyped_storage().data_ptr()
        copied = whole.set_(storage, start, (high - low,), (1,)).clone().untyped_storage()
        for t in family:
            alias = torch.empty(0, dtype=t.dtype, device=t.device)
            offset = (t.data_ptr() - low) // t.itemsize
            found[id(t)] = alias.set_(copied, offset, t.shape, t.stride())
    return found


def partners(named: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Names of tensors that share elements, without being one."""
    names = {id(t): name for name, t in named.items()}
    shared = (tuple(names[id(t)] for t in family) for family in families(named.values()))
    return [family for family in shared if len(family) > 1]
