"""Transfer: which rule applies to one aten call, as the abstract interpretation meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.labels import Kind, Labels, by_value, positions
from zipfx.analysis.rules.call import Call, aten, functional, opaque, rule_of
from zipfx.analysis.rules.movement import IDENTITY, MOVEMENT, UNIFORM, movement
from zipfx.analysis.rules.pointwise import ALSO_POINTWISE, join, pointwise
from zipfx.analysis.rules.register import TAUGHT, taught

_COPY = {aten.copy_.default}
_FILL = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_INDEXED = ("index", "index_select", "gather", "_unsafe_index", "take_along_dim")


def transfer(call: Call, operands: Sequence[Tensor], targets: Sequence[Tensor]) -> Sequence[Labels]:
    """The labels of what a call has made, or written to.

    operands: its tensors; targets: the tensors made or written to.
    """
    op = call.op
    kind = max((call.of(t).kind for t in operands), default=Kind.CONSTANT)
    if op in _FILL or op in UNIFORM or kind == Kind.CONSTANT:
        if torch.Tag.nondeterministic_seeded in op.tags:
            return [Labels(tuple(t.shape), (), positions(tuple(t.shape))) for t in targets]
        if "empty" in str(op):
            return [Labels(tuple(t.shape), kind=Kind.CONSTANT) for t in targets]
        return [by_value(t) for t in targets]
    if op in TAUGHT:
        return taught(call, targets)
    if op in _COPY:
        return [join(call.constraints, [call.of(operands[1])], tuple(targets[0].shape))]
    if op in IDENTITY:
        return [call.of(operands[0])]
    if rule_of(op) is None and op not in ALSO_POINTWISE:
        op = functional(op)  # what it gives, this one writes
        call = replace(call, op=op)
    if op in MOVEMENT and _steady(call):
        return [movement(call)]
    for i, t in enumerate(operands):
        call.constraints.event(call.of(t).features, i)
    own = rule_of(op)
    if own is not None:
        found = own(call)
        return found if isinstance(found, tuple) else (found,)
    if torch.Tag.pointwise in op.tags or op in ALSO_POINTWISE:
        return [pointwise(call)] * len(targets)
    opaque(call)
    return [Labels(tuple(t.shape), (), positions(tuple(t.shape))) for t in targets]


def _steady(call: Call) -> bool:
    """Indices that come from constants alone say the same for every input."""
    name = str(call.op).split(".")[1]
    if name not in _INDEXED:
        return True
    indices = tree_leaves((call.arg("indices"), call.arg("index")))
    return all(call.of(i).kind != Kind.DATA for i in indices if isinstance(i, Tensor))
