"""Match, the fourth stage: statistics say which features become one.

Takes the statistics of each space, or the models' weights. Gives a `Matching` of every space (M and
U of the paper), and from these the maps along each axis of each parameter.
"""

from zipfx.match.axis_maps import AxisMap, Move, is_pattern, made_matrix, plan, read_maps
from zipfx.match.by_weights import Weights, check_finite, match_weights
from zipfx.match.matchers.kmeans import KMeans
from zipfx.match.matchers.matching import LinearMerge, Matching, Merge, Pairs, merged_variance
from zipfx.match.matchers.one_to_one import Identity, Permute
from zipfx.match.matchers.optimal import Optimal
from zipfx.match.matchers.protocol import Matcher, wanted
from zipfx.match.matchers.svd import Svd
from zipfx.match.matchers.zip import Zip
from zipfx.match.registry import resolve
from zipfx.match.spaces import Matched, comparable, match_spaces, observed, unknown

__all__ = [
    "AxisMap",
    "Identity",
    "KMeans",
    "LinearMerge",
    "Matched",
    "Matcher",
    "Matching",
    "Merge",
    "Move",
    "Optimal",
    "Pairs",
    "Permute",
    "Svd",
    "Weights",
    "Zip",
    "check_finite",
    "comparable",
    "is_pattern",
    "made_matrix",
    "match_spaces",
    "match_weights",
    "merged_variance",
    "observed",
    "plan",
    "read_maps",
    "resolve",
    "unknown",
    "wanted",
]
