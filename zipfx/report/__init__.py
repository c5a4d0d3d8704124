"""Report: what was done, as values and text, and merges as files.

Takes what every stage gave. Gives a `Report`; `save` and `load` write and read a merge.
"""

from zipfx.report.files.files import load, save
from zipfx.report.files.made import MADE, as_made
from zipfx.report.files.stand_ins import TRACED, Traced, described
from zipfx.report.measure import Stages, count_flops, count_layers
from zipfx.report.notes import (
    blind,
    few,
    hooks,
    not_loadable,
    unfitted,
    unlike_extras,
    unrepaired,
    unrepaired_norms,
)
from zipfx.report.report import Report, SpaceReport

__all__ = [
    "MADE",
    "TRACED",
    "Report",
    "SpaceReport",
    "Stages",
    "Traced",
    "as_made",
    "blind",
    "count_flops",
    "count_layers",
    "described",
    "few",
    "hooks",
    "load",
    "not_loadable",
    "save",
    "unfitted",
    "unlike_extras",
    "unrepaired",
    "unrepaired_norms",
]
