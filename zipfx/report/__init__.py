"""Report: what was done, as values and text, and merges as files.

Takes what every stage gave. Gives a `Report`; `save` and `load` write and read a merge.
"""

from zipfx.report.files.files import load, save
from zipfx.report.measure import Stages, count_flops
from zipfx.report.notes import Done
from zipfx.report.report import Report

__all__ = ["Done", "Report", "Stages", "count_flops", "load", "save"]
