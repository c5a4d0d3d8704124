"""Fused: a merge whose weights are fused, and what the later stages ask about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zipfx.analysis import Analysis
from zipfx.match import Matches
from zipfx.merge.assemble import Assembly
from zipfx.merge.derived.computed import (
    Computed,
    Limit,
    constrained,
    find_computed,
    limits,
    put_back,
)
from zipfx.merge.derived.singular import renew
from zipfx.merge.heads import HeadPlan
from zipfx.merge.module import MergedModule, copy_modes, homes
from zipfx.trace import TracedModels


@dataclass(frozen=True, eq=False)
class Fused:
    """A merge, its weights plain until `finish`.

    assembly: where the features of the models lie in it; plans: of the heads; computed: tensors
    that the models compute from others, by name; kept: those of them that the merge will; notes:
    for the report.
    """

    module: MergedModule
    assembly: Assembly
    plans: Sequence[HeadPlan]
    computed: Mapping[str, Computed]
    kept: Mapping[str, Computed]
    notes: tuple[str, ...]

    def limits(self, others: Sequence[Tensor] = ()) -> list[tuple[Tensor, Limit]]:
        """Tensors that can not have every value, and what gives the nearest one that they can."""
        return limits(self.module, self.computed, self.kept, others)

    def finish(self, models: Sequence[nn.Module], home: torch.device) -> list[str]:
        """Compute what the models compute, on their device and in their modes; notes."""
        notes = put_back(self.module, self.kept)
        self.module.to(home)
        copy_modes(self.module, models)
        return notes


def fuse_models(
    traced: TracedModels,
    analysis: Analysis,
    matches: Matches,
    models: Sequence[nn.Module],
    device: torch.device,
) -> Fused:
    """Fuse the weights of all models, W* = sum_k M_k W_k U_k, into one module with heads.

    Args:
        models: as the caller has them.
        device: where the merge is to live until it is finished.

    Raises:
        ZipError: the heads can not be built behind this cut.
    """
    assembly = Assembly(traced.modules, analysis, matches.by_space, traced.inputs)
    module, plans, notes = assembly.full() if traced.cut is None else assembly.partial()
    module.to(device)
    computed = find_computed(module, models, homes(len(models), traced.cut))
    kept, told = constrained(module, computed)
    notes = [*notes, *told, *renew(module, models)]
    return Fused(module, assembly, plans, computed, kept, tuple(notes))
