"""Stored: the tensors of a module by name, as files hold them, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zipfx.errors import ZipError, first_line
from zipfx.report.format.container import DTYPES
from zipfx.trace import own_tensors

_PLAIN = (Tensor, nn.Parameter)


def named(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module by all of their names, those that are plain attributes included."""
    return {
        f"{path}.{name}" if path else name: t
        for path, part in module.named_modules(remove_duplicate=False)
        for name, t in own_tensors(part).items()
    }


def further_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every further name of a tensor -> its first name.

    >>> t = torch.ones(1)
    >>> further_names({"a": t, "b": torch.ones(1), "c": t})
    {'c': 'a'}
    """
    first: dict[int, str] = {}
    return {
        name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name
    }


def kind(t: Tensor) -> str:
    """What a tensor can not change into and still be in its place."""
    return "float" if t.is_floating_point() else "complex" if t.is_complex() else "integer"


def strides(t: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense, but not in the usual order (None: it is)."""
    dense = torch.empty_like(t, device="meta").stride()
    return None if dense == torch.empty(t.shape, device="meta").stride() else dense


def check_storable(name: str, t: Tensor) -> None:
    """Check that a tensor is its entries, and nothing else that a file can not say.

    Raises:
        ZipError: it is not; the message says what to do.
    """
    made_by = f"{type(t).__module__}.{type(t).__qualname__}"
    dtype = t.dtype.to_real() if t.dtype.is_complex else t.dtype
    for wrong, what in (
        (type(t) not in _PLAIN, f"is a {made_by}: put plain tensors in place of such"),
        (torch._is_functional_tensor(t), "is a wrapper of torch.func: save outside of that"),
        (torch._C._functorch.is_functorch_wrapped_tensor(t), "is a wrapper of torch.func: save "
         "outside of that"),
        (t.is_meta, 'is on the device "meta": it holds no values'),
        (t.layout != torch.strided, f"is of layout {t.layout}: make it dense (t.to_dense())"),
        (t.is_nested, "is nested: pad it"),
        (t.is_quantized, "is quantized: save before that (t.dequantize())"),
        (dtype not in DTYPES, f"is of {t.dtype}, for which there is no name in safetensors"),
    ):  # fmt: skip
        if wrong:
            raise ZipError(f"{name!r} {what}")
    if t.untyped_storage().nbytes() < _span(t):
        raise ZipError(f"the memory of {name!r} was freed: bring its values back first")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ZipError(f"the name {name!r} is no text in UTF-8: rename it") from error
    if name == "__metadata__":
        raise ZipError(f"the name {name!r} has a meaning of its own in safetensors: rename it")


def _span(t: Tensor) -> int:
    """Bytes of memory that a tensor reaches into."""
    if not t.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1) * t.itemsize


def stored(t: Tensor) -> Tensor:
    """The entries of a tensor, contiguous and on the CPU; a complex one is a pair of real ones."""
    t = t.detach().resolve_conj().resolve_neg()
    t = t.clone() if t._is_zerotensor() else t
    return (torch.view_as_real(t) if t.is_complex() else t).cpu().contiguous()


def restored(name: str, t: Tensor, strides: tuple[int, ...] | None, is_complex: bool) -> Tensor:
    """A copy of what was stored as it was before, on the CPU.

    Raises:
        ZipError: it never was.
    """
    try:
        # in a file, complex numbers need not lie where the processor wants them
        t = torch.view_as_complex(t.clone()) if is_complex else t
        strides = t.stride() if strides is None else strides
        like = torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta")
        if torch.empty_like(like).stride() != strides:
            raise ValueError(f"strides {strides} for shape {tuple(t.shape)}")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ZipError(f"{name!r} is damaged ({first_line(error)}); save it again") from error
    return torch.empty_like(like, device="cpu").copy_(t)
