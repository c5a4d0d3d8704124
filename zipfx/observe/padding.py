"""Padding: which positions of a batch are samples, and which only fill it up.

Sequences of a batch are filled up to one length, and `attention_mask` says where, or a function of
the caller's. What a network
computes there is read by nobody, so it is no sample: neither of the statistics, nor of a repair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from zipfx.errors import ZipError, first_line
from zipfx.model.tensors import close
from zipfx.modes import as_caller

MASK = "attention_mask"
MaskOf = Callable[[Any], Tensor | None]


def mask_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """(B, T) bool, which of T positions are samples; None: all are, or it is not known.

    A batch with a decoder of as many positions says nothing of which of the two is meant.

    >>> import torch
    >>> mask_of({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])})
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    >>> mask_of({"attention_mask": torch.ones(2, 3)}) is None
    True
    """
    mask = arguments.get(MASK)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not _of_zeros_and_ones(mask):
        return None
    decoder = (v for k, v in arguments.items() if k.startswith("decoder") and isinstance(v, Tensor))
    if any(t.ndim > 1 and t.shape[1] == mask.shape[1] for t in decoder):
        return None
    return _unless_all(mask)


def mask_by(function: MaskOf, batch: Any, samples: int | None) -> Tensor | None:
    """(B, T) bool, as a function of the caller's says; None: all positions are samples.

    Args:
        function: from a batch, as the loader gave it, to such a tensor of 0 and 1, or None.
        samples: B.

    Raises:
        ZipError: the function fails, or gives something else.

    >>> import torch
    >>> mask_by(lambda batch: batch["tokens"] != 0, {"tokens": torch.tensor([[5, 7, 0]])}, 1)
    tensor([[ True,  True, False]])
    """
    try:
        with as_caller():
            mask = function(batch)
    except Exception as error:
        raise ZipError(
            f"mask fails on a batch, a {type(batch).__name__}: {first_line(error)}"
        ) from error
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != samples:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ZipError(
            f"mask gave {found} for a batch of {samples} samples: it must give a tensor "
            "(samples, positions) of booleans, or None where all positions count"
        )
    if not _of_zeros_and_ones(mask):
        raise ZipError("mask gave values other than 0 and 1: which positions count is not known")
    return _unless_all(mask)


def _of_zeros_and_ones(mask: Tensor) -> bool:
    return not mask.is_complex() and bool(((mask == 0) | (mask == 1)).all())


def _unless_all(mask: Tensor) -> Tensor | None:
    """The mask as booleans; None: it leaves nothing out."""
    kept = mask == 1
    return None if bool(kept.all()) else kept


def by_position(whole: Tensor, part: Tensor, rows: int, some: int) -> bool | None:
    """Whether what a batch gives, flattened to rows, has the same position of all sequences side by
    side, as torch's attention has it, and not a sequence; None: neither.

    Args:
        whole: (rows * T, n), of `rows` sequences; part: (some * T, n), of the first of them.

    >>> import torch
    >>> values = torch.arange(6.0).reshape(3, 2, 1)  # of three sequences, at two positions
    >>> by_position(values.flatten(0, 1), values[:1].flatten(0, 1), 3, 1)
    False
    >>> turned = values.transpose(0, 1)
    >>> by_position(turned.flatten(0, 1), turned[:, :1].flatten(0, 1), 3, 1)
    True
    """
    if whole.ndim != 2 or len(whole) * some != len(part) * rows:
        return None
    if close(whole[: len(part)], part):
        return False
    turned = whole.unflatten(0, (-1, rows))[:, :some].flatten(0, 1)
    return True if close(turned, part) else None


def spread(
    mask: Tensor, shape: Sequence[int], features: Collection[int] = (), turned: bool | None = False
) -> Tensor | None:
    """The mask along the dimensions of a value, 1 along all others; None: its positions are not
    those of the mask, or there are as many of them as samples.

    shape: of the value; features: dimensions along which no positions lie; turned: of rows that
    were flattened, whether they are `by_position` (None: it is not known).

    >>> import torch
    >>> mask = torch.tensor([[True, False, True]])
    >>> [tuple(spread(mask, s, f).shape) for s, f in [((1, 3, 8), [2]), ((1, 4, 3, 2), [1, 3])]]
    [(1, 3, 1), (1, 1, 3, 1)]
    >>> tuple(spread(mask, (3, 8), [1]).shape), spread(mask, (1, 8), [1])
    ((3, 1), None)
    """
    rows, length = mask.shape
    if rows == length:
        return None  # which of two dimensions the positions are is not known
    free = [d for d in range(len(shape)) if d not in features]
    sizes = [1] * len(shape)
    if not free or free[0] != 0:
        return None
    if shape[0] == rows:
        at = next((d for d in free[1:] if shape[d] == length), None)
        if at is not None:
            sizes[0], sizes[at] = rows, length
            return mask.reshape(sizes)
    if len(free) > 1 and (shape[0], shape[free[1]]) == (length, rows):
        sizes[0], sizes[free[1]] = length, rows
        return mask.T.reshape(sizes)
    if shape[0] == rows * length and length > 1:
        sizes[0] = rows * length
        return None if turned is None else (mask.T if turned else mask).reshape(sizes)
    return None
