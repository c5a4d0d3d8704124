"""Parametrized: weights that modules compute from others (`torch.nn.utils.parametrize`).

What a layer works with is the weight that comes out, so that is what is matched, fused and
refitted: in the traced copy of a model it stands in the place of its parametrization.  The merge
has the parametrization again (`computed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zipfx.errors import ZipError, first_line
from zipfx.model.callables import without_addresses
from zipfx.model.contents import CODE, attributes

LIST = "parametrizations"  # torch's name for the child that holds them


def own_parametrizations(
    model: nn.Module,
) -> Iterator[tuple[str, str, parametrize.ParametrizationList]]:
    """(path of a module, name of a tensor of it, how that is computed)."""
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for name, how in module.parametrizations.items():
                yield path, name, how


def how_computed(model: nn.Module) -> dict[str, str]:
    """By the name of a tensor that a model computes, the kinds and settings of how."""
    found = {}
    for path, name, how in own_parametrizations(model):
        kinds = ", ".join(type(m).__qualname__ for m in how.modules())
        known = attributes(how, tensors=False).items()
        settings = sorted((key, text) for key, text in known if not key.startswith(CODE))
        found[f"{path}.{name}".lstrip(".")] = without_addresses(f"{kinds}: {settings}")
    return found


def _is_computing(module: nn.Module) -> bool:
    """Whether it is the module itself that computes its tensors, not the graph around it."""
    if not parametrize.is_parametrized(module):
        return False
    names: Any = module.parametrizations
    return any(name in vars(type(module)) for name in names)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without its parametrizations."""
    cls = type(module)
    return cls.__bases__[0] if _is_computing(module) else cls


def is_computing(path: str) -> bool:
    """Whether something of this path belongs to a parametrization."""
    return LIST in path.split(".")


def tensor_of(path: str) -> str:
    """The name of the tensor that the parametrization at this path gives."""
    *home, _, name = path.split(".")
    return ".".join((*home, name))


def fold(model: nn.Module) -> None:
    """Put plain tensors in the place of those that the modules of a copy compute.

    What shares its tensors with something else is left as it is: it is tied to that.

    Raises:
        ZipError: one can not be computed.
    """
    shared = _shared(model)
    for path, module in model.named_modules():
        if not _is_computing(module):
            continue
        lists = dict(module.parametrizations.items())
        parts = [p for how in lists.values() for p in (*how.modules(), *_tensors(how))]
        if any(id(part) in shared for part in parts):
            continue
        module.__class__ = plain_class(module)
        del module._modules[LIST]
        for name, how in lists.items():
            try:
                with torch.no_grad():
                    value = how().detach().clone()
            except Exception as error:
                raise ZipError(
                    f"module {path!r} fails to compute its {name!r}: {first_line(error)}"
                ) from error
            if any(isinstance(t, nn.Parameter) for t in _tensors(how)):
                learned = any(t.requires_grad for t in _tensors(how))
                module.register_parameter(name, nn.Parameter(value, learned))
            else:
                module.register_buffer(name, value)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _shared(model: nn.Module) -> set[int]:
    """ids of tensors, and of modules with tensors, that have more than one place."""
    places: Counter[int] = Counter()
    for module in model.modules():
        children = [m for m in module._modules.values() if m is not None and _tensors(m)]
        tensors = [*module._parameters.values(), *module._buffers.values()]
        places.update(id(part) for part in (*children, *tensors) if part is not None)
    return {part for part, count in places.items() if count > 1}
