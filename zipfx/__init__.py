"""zipfx: merge networks of different initialisations and tasks into one, without training.

merged = zipfx.zip([model_a, model_b], calib_loader, partial="layer3")
"""

from zipfx.analysis import (
    Axis,
    NodeInfo,
    Pinned,
    Place,
    Role,
    Space,
    SpaceMap,
    analyze,
    register_rule,
)
from zipfx.errors import ZipError
from zipfx.match import (
    Identity,
    KMeans,
    LinearMerge,
    Matcher,
    Matching,
    Optimal,
    Permute,
    Svd,
    Weights,
    Zip,
)
from zipfx.merge import head
from zipfx.observe import Statistics
from zipfx.pipeline import zip
from zipfx.repair import Refit, Refitted
from zipfx.report import Report, load, save, to_model
from zipfx.trace import Export
from zipfx.version import __version__

__all__ = [
    "Axis",
    "Export",
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
    "__version__",
    "analyze",
    "head",
    "load",
    "register_rule",
    "save",
    "to_model",
    "zip",
]
