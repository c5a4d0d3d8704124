"""Rules: how labels pass through the operations that compute.

Views and in-place writes need no rule (see `shadow`), data movement is the same operation run on
the labels, pointwise operations carry `torch.Tag.pointwise`. What is left is in this folder, about
40 operations in four files. An operation without a rule pins what it touches and says so.
"""

from zipfx.rules import contraction, recurrent, spatial, together
from zipfx.rules.call import RULES, Call, rule
from zipfx.rules.movement import IDENTITY, MOVEMENT, UNIFORM, movement
from zipfx.rules.pointwise import ALSO_POINTWISE, join, pointwise

__all__ = [
    "ALSO_POINTWISE",
    "IDENTITY",
    "MOVEMENT",
    "RULES",
    "UNIFORM",
    "Call",
    "contraction",
    "join",
    "movement",
    "opaque",
    "pointwise",
    "recurrent",
    "rule",
    "spatial",
    "together",
]


def opaque(call: Call) -> None:
    """What is not understood pins everything it touches."""
    for t in call.tensors():
        call.ledger.pin(call.of(t).features, f"{call.op} is not understood")
