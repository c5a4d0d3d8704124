"""Analysis, the second stage: a graph becomes feature spaces.

Takes a traced model and example inputs. The graph runs once on labels (`labels`, `rules`), what
they met is grouped (`grouping`), and the map of all spaces (`spaces`) is checked in numbers.
Gives an `Analysis`: the `SpaceMap`, and the facts of every node.
"""

from zipfx.analysis.analysis import Analysis, analyze, analyze_trunk, run_analysis
from zipfx.analysis.grouping.grouping import Grouping
from zipfx.analysis.labels.facts import Facts, NodeFacts
from zipfx.analysis.labels.inside import Probe
from zipfx.analysis.labels.labels import Kind, overlapping
from zipfx.analysis.rules.register import register_rule
from zipfx.analysis.spaces.reorder import by_rows, mix, select
from zipfx.analysis.spaces.space_map import SpaceMap, pinned_lines
from zipfx.analysis.spaces.values import Axis, NodeInfo, Pinned, Place, Role, Space

__all__ = [
    "Analysis",
    "Axis",
    "Facts",
    "Grouping",
    "Kind",
    "NodeFacts",
    "NodeInfo",
    "Pinned",
    "Place",
    "Probe",
    "Role",
    "Space",
    "SpaceMap",
    "analyze",
    "analyze_trunk",
    "by_rows",
    "mix",
    "overlapping",
    "pinned_lines",
    "register_rule",
    "run_analysis",
    "select",
]
