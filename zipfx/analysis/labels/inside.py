"""Inside: see what weights read and make inside one node of the traced graph.

A leaf module (nn.LSTM, nn.TransformerEncoder) or a wrapped function is one node, whose result need
not carry the features that live inside it.  They are met at the aten calls: an *address* says "what
is multiplied with this window into this weight", or "what comes of it".  It counts no calls, so it
holds for every batch size and sequence length; in a loop over time it is reached at every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.errors import ZipError
from zipfx.model.running import decomposed

#: number of the tensor among those of the node, and the window into it (size and stride of every
#: dimension that is longer than 1, offset in bytes)
Key = tuple[int, tuple[tuple[int, int], ...], int]
#: a weight, and whether its product is meant; else what it is multiplied with
Address = tuple[Key, bool]

#: contractions of two tensors, with the number of the first of the two among the operands
_CONTRACTIONS = dict.fromkeys("mm bmm mv dot linear convolution _convolution embedding".split(), 0)
_CONTRACTIONS |= {"addmm": 1, "baddbmm": 1}
_BARE, _SUMS = ("mm", "bmm", "mv"), ("add", "add_")


class OwnedTensors:
    """The tensors that a node is given or owns; finds views of them."""

    def __init__(self, module: nn.Module | None, args: Any) -> None:
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if module is not None:
            named = (module.named_parameters, module.named_buffers)
            tensors = [t for f in named for _, t in f(remove_duplicate=False)] + tensors
        self.spans: list[tuple[int, int, int]] = []
        for i, t in enumerate(tensors):
            if t.layout == torch.strided and t.numel():
                length = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
                self.spans.append((t.data_ptr(), t.data_ptr() + length * t.itemsize, i))

    def key(self, t: Tensor) -> Key | None:
        """Which window into which tensor `t` is, if it is a view of one."""
        if t.layout != torch.strided or not t.numel():
            return None
        at = t.data_ptr()
        for start, end, i in self.spans:
            if start <= at < end:
                window = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s]
                return i, tuple(window), at - start
        return None


@dataclass(frozen=True)
class Meeting:
    """A weight meets another tensor in a contraction.

    axis: the dimension, counted from the end, that is summed over in `other`; in the product it is
    the one that the weight makes.
    """

    weight: Tensor
    other: Tensor
    axis: int


def meetings(op: Any, operands: Sequence[Tensor]) -> list[Meeting]:
    """How the two factors of a contraction may be seen, either being the weight."""
    name = op.overloadpacket.__name__
    first = _CONTRACTIONS.get(name)
    if first is None:
        return []
    a, b = operands[first : first + 2]
    if "convolution" in name:
        return [Meeting(b, a, 1 - a.ndim)]
    rows = -2 if name.endswith("mm") else -1
    return [Meeting(b, a, -1), Meeting(a, b, rows)]


class _Listen(TorchDispatchMode):
    def __init__(self, weights: OwnedTensors, addresses: Collection[Address]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights
        self.heard: dict[Address, list[Tensor]] = {address: [] for address in addresses}
        #: products that have met no bias so far, and where they are heard
        self.bare: list[tuple[Tensor, Address, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.overloadpacket.__name__ in _SUMS:
            self._add_bias(tensors, result)
        for meeting in meetings(func, tensors):
            key = self.weights.key(meeting.weight)
            if key is not None and (key, False) in self.heard:
                self.heard[key, False].append(meeting.other.clone())  # it may yet be written to
            if key is not None and (key, True) in self.heard:
                product = self._product(func, args, kwargs or {}, result)
                self.heard[key, True].append(product)
                if func.overloadpacket.__name__ in _BARE:
                    self.bare.append((result, (key, True), len(self.heard[key, True]) - 1))
        return result

    def _product(self, op: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> Tensor:
        """With its bias, which may be added here or later, and without anything else."""
        added = op.overloadpacket.__name__ in ("addmm", "baddbmm")
        if not added or self._is_bias(args[0]):
            return result.clone()
        found: Tensor = result - kwargs.get("beta", 1) * args[0]
        return found

    def _is_bias(self, t: Tensor) -> bool:
        return t.ndim == 1 and self.weights.key(t) is not None

    def _add_bias(self, operands: Sequence[Tensor], result: Tensor) -> None:
        """A product that is added to a tensor of the node's own has met its bias."""
        own = [self._is_bias(t) for t in operands]
        if sorted(own) != [False, True] or not isinstance(result, Tensor):
            return
        at = operands[own.index(False)].data_ptr()
        for product, address, i in [p for p in self.bare if p[0].data_ptr() == at]:
            self.bare = [p for p in self.bare if p[0] is not product]
            if product.shape[-1:] == result.shape[-1:] and product.numel() == result.numel():
                self.heard[address][i] = result.reshape(product.shape).clone()


class Probe(nn.Module):
    """One node of one model: returns its result, and what was heard at every address.

    Args:
        module: the model, traced.
        op, target: of the node.
        where: the node, as messages name it.
    """

    def __init__(
        self, module: nn.Module, op: str, target: Any, addresses: Collection[Address], where: str
    ) -> None:
        super().__init__()
        self.inner = module.get_submodule(target) if op == "call_module" else None
        self.op, self.target, self.addresses, self.where = op, target, tuple(addresses), where

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Mapping[Address, list[Tensor]]]:
        """Run the node with the fused paths off."""
        listen = _Listen(OwnedTensors(self.inner, (args, kwargs)), self.addresses)
        with decomposed(self.inner), listen:
            if self.inner is not None:
                result = self.inner(*args, **kwargs)
            elif self.op == "call_method":
                result = getattr(args[0], self.target)(*args[1:], **kwargs)
            else:
                result = self.target(*args, **kwargs)
        if not all(listen.heard.values()):
            raise ZipError(
                f"{self.where} does not compute on this batch what it computed on example_inputs: "
                "features that were found inside it are not met; pass example_inputs that take the "
                "same way through it as the calibration data"
            )
        return result, listen.heard
