"""Match, the fourth stage: statistics say which features become one.

Takes the statistics of each space, or the models' weights. Gives a `Matching` of every space (M and
U of the paper), and from these the maps along each axis of each parameter.
"""

from zipfx.match.by_weights import Weights
from zipfx.match.matchers.kmeans import KMeans
from zipfx.match.matchers.one_to_one import Identity, Permute
from zipfx.match.matchers.optimal import Optimal
from zipfx.match.matchers.protocol import Matcher, wanted
from zipfx.match.matchers.svd import Svd
from zipfx.match.matchers.zip import Zip
from zipfx.match.registry import resolve

__all__ = [
    "Identity",
    "KMeans",
    "Matcher",
    "Optimal",
    "Permute",
    "Svd",
    "Weights",
    "Zip",
    "resolve",
    "wanted",
]
