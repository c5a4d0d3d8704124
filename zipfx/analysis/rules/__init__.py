"""Rules: how labels pass through the operations that compute.

Views and in-place writes need no rule (see `shadow`), data movement is the same operation run on
the labels, pointwise operations carry `torch.Tag.pointwise`. What is left is in this folder, by
kind. An operation without a rule pins what it touches and says so.
"""

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.labels import Labels
from zipfx.analysis.rules import (
    algebra,
    contraction,
    convolution,
    recurrent,
    reductions,
    spectral,
    vision,
)
from zipfx.analysis.rules.call import RULES, Call, functional, made_of_others, rule, rule_of
from zipfx.analysis.rules.movement import IDENTITY, MOVEMENT, UNIFORM, movement
from zipfx.analysis.rules.pointwise import ALSO_POINTWISE, join, pointwise
from zipfx.analysis.rules.register import TAUGHT, register_rule, taught
from zipfx.analysis.rules.spectral import paired

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
    "spectral",
    "taught",
    "vision",
]


def opaque(call: Call) -> None:
    """What is not understood pins everything it touches."""
    name, where = call.op.name(), call.ledger.where
    why = f"{name} is not understood ({where})"
    if any(isinstance(t, Tensor) for t in tree_leaves(call.result)) or call.op._schema.is_mutable:
        why += "; teach it with zipfx.register_rule, see docs/analysis.md"
    for t in call.tensors():
        call.ledger.pin(call.of(t).features, why)
