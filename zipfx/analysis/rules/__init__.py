"""Rules: how labels pass through the operations that compute.

Views and in-place writes need no rule (see `shadow`), data movement is the same operation run on
the labels, pointwise operations carry `torch.Tag.pointwise`. What is left is in this folder, by
kind. An operation without a rule pins what it touches and says so.
"""

from zipfx.analysis.labels.labels import Labels
from zipfx.analysis.rules import algebra, contraction, convolution, recurrent, reductions
from zipfx.analysis.rules.algebra import paired
from zipfx.analysis.rules.call import RULES, Call, functional, made_of_others, opaque, rule, rule_of
from zipfx.analysis.rules.movement import IDENTITY, MOVEMENT, UNIFORM, movement
from zipfx.analysis.rules.pointwise import ALSO_POINTWISE, join, pointwise
from zipfx.analysis.rules.register import TAUGHT, register_rule, taught

__all__ = [
    "ALSO_POINTWISE",
    "IDENTITY",
    "MOVEMENT",
    "RULES",
    "TAUGHT",
    "UNIFORM",
    "Call",
    "Labels",
    "algebra",
    "contraction",
    "convolution",
    "functional",
    "join",
    "made_of_others",
    "movement",
    "opaque",
    "paired",
    "pointwise",
    "recurrent",
    "reductions",
    "register_rule",
    "rule",
    "rule_of",
    "taught",
]
