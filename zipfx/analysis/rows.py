"""Rows: which values are of the same samples in every model, and which are not.

Where a model sends rows by what it has computed - to experts, past tokens that it drops - two
models do not have the same rows at one place. So their features can not be compared there, sample
by sample. What is put back to where it came from can.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zipfx.model.memory import storage_key

#: the first operand says where the rows are, others are put there
_PUT_BACK = """
    index_put index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce
    masked_scatter masked_fill slice_scatter select_scatter copy
""".split()
#: rows of data are taken from where indices say
_TAKEN = (
    *("index", "index_select", "gather", "take_along_dim", "_unsafe_index", "take"),
    *("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"),
)


class Rows(enum.IntFlag):
    """LEARNED: depends on weights, and so differs between models; CHOSEN: other rows in each."""

    GIVEN = 0
    LEARNED = 1
    CHOSEN = 2


class Origins:
    """What is known of the rows of every storage."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Rows]] = {}
        self._most = 64

    def of(self, tensors: Iterable[Tensor]) -> Rows:
        """What tensors have in common with none that is the same in all models."""
        found = Rows.GIVEN
        for t in tensors:
            ref, rows = self._known.get(storage_key(t), (None, Rows.GIVEN))
            if ref is not None and not ref.expired():
                found |= rows
        return found

    def tell(self, t: Tensor, rows: Rows) -> None:
        """Set what is known of the storage of a tensor."""
        self._known[storage_key(t)] = StorageWeakRef(t.untyped_storage()), rows
        if len(self._known) > self._most:
            self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
            self._most = 64 + 2 * len(self._known)

    def after(self, op: Any, args: Any, kwargs: Any) -> Rows:
        """Of the results of a call."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = str(op._schema.name).rpartition("::")[2].rstrip("_")
        learned = self.of(tensors) & Rows.LEARNED
        if name in _PUT_BACK and tensors:
            return learned | (self.of(tensors[:1]) & Rows.CHOSEN)
        found = self.of(tensors)
        if name in _TAKEN and tensors:  # a weight has no samples: its rows are those of the indices
            of_data = not isinstance(tensors[0], torch.nn.Parameter)
            indices = self.of(tensors[1:])
            return found | (Rows.CHOSEN if of_data and indices & Rows.LEARNED else Rows.GIVEN)
        if torch.Tag.dynamic_output_shape in op.tags and learned:
            found |= Rows.CHOSEN
        return found
