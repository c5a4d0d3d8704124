"""Match, the fourth stage: statistics say which features become one.

Takes the statistics of each space, or the models' weights. Gives a `Matching` of every space (M and
U of the paper), and from these the maps along each axis of each parameter.
"""

from zipfx.match.registry import *
from zipfx.match.registry import __all__ as __all__
