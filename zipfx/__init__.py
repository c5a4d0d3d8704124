"""zipfx: merge networks of different initialisations and tasks into one, without training.

merged = zipfx.zip([model_a, model_b], calib_loader, partial="layer3")
"""

from zipfx.analysis.analysis import analyze
from zipfx.analysis.rules import register_rule
from zipfx.analysis.spaces.space_map import SpaceMap
from zipfx.analysis.spaces.values import Axis, NodeInfo, Pinned, Place, Role, Space
from zipfx.errors import ZipError
from zipfx.match.matchers.matching import LinearMerge, Matching
from zipfx.match.registry import Identity, KMeans, Matcher, Optimal, Permute, Svd, Weights, Zip
from zipfx.merge.module import head
from zipfx.observe.statistics import Statistics
from zipfx.pipeline import zip
from zipfx.repair.layerwise import Refit, Refitted
from zipfx.report.files.files import load, save
from zipfx.report.report import Report

__all__ = [
    "Axis",
    "Identity",
    "KMeans",
    "LinearMerge",
    "Matcher",
    "Matching",
    "NodeInfo",
    "Optimal",
    "Permute",
    "Pinned",
    "Place",
    "Refit",
    "Refitted",
    "Report",
    "Role",
    "Space",
    "SpaceMap",
    "Statistics",
    "Svd",
    "Weights",
    "Zip",
    "ZipError",
    "analyze",
    "head",
    "load",
    "register_rule",
    "save",
    "zip",
]
