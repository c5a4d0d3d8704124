"""Merge, the fifth stage: matchings become one module with heads.

Takes the traced models, their analysis and the matchings. Gives a `MergedModule`, whose weights are
W* = sum_k M_k W_k U_k, with a head for each model behind the cut.
"""

from zipfx.merge.assemble import Assembly
from zipfx.merge.derived.computed import Limit, find_computed, put_back_as_saved
from zipfx.merge.fused import Fused, fuse_models
from zipfx.merge.heads import HeadPlan
from zipfx.merge.module import (
    BAKED,
    HEADS,
    INSERTED,
    MergedModule,
    Part,
    build,
    head,
    homes,
    planted,
)
from zipfx.merge.origin import mark, origin_of

__all__ = [
    "BAKED",
    "HEADS",
    "INSERTED",
    "Assembly",
    "Fused",
    "HeadPlan",
    "Limit",
    "MergedModule",
    "Part",
    "build",
    "find_computed",
    "fuse_models",
    "head",
    "homes",
    "mark",
    "origin_of",
    "planted",
    "put_back_as_saved",
]
