"""Merge, the fifth stage: matchings become one module with heads.

Takes the traced models, their analysis and the matchings. Gives a `MergedModule`, whose weights are
W* = sum_k M_k W_k U_k, with a head for each model behind the cut.
"""

from zipfx.merge.assemble import Assembly
from zipfx.merge.computed import (
    Limit,
    constrained,
    find_computed,
    limits,
    put_back,
    put_back_as_saved,
)
from zipfx.merge.heads import HeadPlan
from zipfx.merge.module import (
    BAKED,
    BAKED_KEY,
    HEAD_KEY,
    HEADS,
    INSERTED,
    SOURCE_KEY,
    MergedModule,
    Part,
    build,
    copy_modes,
    head,
    homes,
    planted,
)
from zipfx.merge.singular import renew

__all__ = [
    "BAKED",
    "BAKED_KEY",
    "HEADS",
    "HEAD_KEY",
    "INSERTED",
    "SOURCE_KEY",
    "Assembly",
    "HeadPlan",
    "Limit",
    "MergedModule",
    "Part",
    "build",
    "constrained",
    "copy_modes",
    "find_computed",
    "head",
    "homes",
    "limits",
    "planted",
    "put_back",
    "put_back_as_saved",
    "renew",
]
