"""Kinds: which modules are layers, and of what kind."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from zipfx.merge import Limit
from zipfx.model.tensors import is_batch_norm, runs_as
from zipfx.repair.layers.convolution import Convolution, Transposed
from zipfx.repair.layers.layer import Layer
from zipfx.repair.layers.linear import LinearLayer
from zipfx.repair.layers.scaled import BatchNorm, GroupNorm, LayerNorm

KINDS: dict[type[nn.Module], type[Layer]] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
    nn.Linear: LinearLayer,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Conv3d: Convolution,
    nn.ConvTranspose1d: Transposed,
    nn.ConvTranspose2d: Transposed,
    nn.ConvTranspose3d: Transposed,
}


def layer_of(
    module: nn.Module, norm: nn.Module | None = None, limit: Limit | None = None
) -> Layer | None:
    """The module as a layer; None: it is of no known kind, or has a forward of its own, or computes
    its weight, which then can not be stored, or is complex."""
    both = [m for m in (module, norm) if m is not None]
    if any(is_parametrized(m) or any(p.is_complex() for p in m.parameters()) for m in both):
        return None
    for kind, view in KINDS.items():
        if isinstance(module, kind) and runs_as(module, kind):
            return view(module, norm, limit) if module.weight is not None else None
    known = is_batch_norm(module) and module.affine and limit is None
    return BatchNorm(module) if known else None
