"""Match, the fourth stage: statistics say which features become one.

Takes the statistics of each space, or the models' weights. Gives a `Matching` of every space (M and
U of the paper), and from these the maps along each axis of each parameter.
"""

from zipfx.match.axis_maps import AxisMap, Move, is_pattern, made_matrix, plan, read_maps
from zipfx.match.by_needs import Matches, match_models
from zipfx.match.by_weights import Weights
from zipfx.match.matchers.kmeans import KMeans
from zipfx.match.matchers.matching import LinearMerge, Matching, Merge, Pairs, merged_variance
from zipfx.match.matchers.one_to_one import Identity, Permute
from zipfx.match.matchers.optimal import Optimal
from zipfx.match.matchers.protocol import Matcher, needs_of
from zipfx.match.matchers.svd import Svd
from zipfx.match.matchers.zip import Zip
from zipfx.match.registry import resolve

__all__ = [
    "AxisMap",
    "Identity",
    "KMeans",
    "LinearMerge",
    "Matcher",
    "Matches",
    "Matching",
    "Merge",
    "Move",
    "Optimal",
    "Pairs",
    "Permute",
    "Svd",
    "Weights",
    "Zip",
    "is_pattern",
    "made_matrix",
    "match_models",
    "merged_variance",
    "needs_of",
    "plan",
    "read_maps",
    "resolve",
]
