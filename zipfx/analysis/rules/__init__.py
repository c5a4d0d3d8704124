"""Rules: how labels pass through the operations that compute.

Views and in-place writes need no rule (see `labels.storages`), data movement is the same operation
run on the labels, pointwise operations carry `torch.Tag.pointwise`. What is left is in this folder,
by kind. An operation without a rule pins what it touches and says so.
"""

from zipfx.analysis.labels.labels import Labels
from zipfx.analysis.rules import algebra as _algebra
from zipfx.analysis.rules import contraction as _contraction
from zipfx.analysis.rules import convolution as _convolution
from zipfx.analysis.rules import recurrent as _recurrent
from zipfx.analysis.rules import reductions as _reductions
from zipfx.analysis.rules.call import RULES, Call, rule
from zipfx.analysis.rules.pointwise import join
from zipfx.analysis.rules.reductions import together
from zipfx.analysis.rules.register import register_rule

#: files that fill the table of rules
TABLES = (_algebra, _contraction, _convolution, _recurrent, _reductions)

__all__ = ["RULES", "TABLES", "Call", "Labels", "join", "register_rule", "rule", "together"]
