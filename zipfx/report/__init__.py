"""Report: what was done, as values and text, and merges as files.

Takes what every stage gave. Gives a `Report`; `save` and `load` write and read a merge, `to_model`
makes a model of the caller's class of it.
"""

from zipfx.report.files.files import load, save
from zipfx.report.into_class import to_model
from zipfx.report.measure import Stages, count_flops
from zipfx.report.notes import Done
from zipfx.report.report import Report

__all__ = ["Done", "Report", "Stages", "count_flops", "load", "save", "to_model"]
