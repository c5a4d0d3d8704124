"""Cells of recurrent layers on CUDA, where the gates of one step are a single operation.

On the CPU they are pointwise operations, which need no rule.
"""

from __future__ import annotations

from zipfx.labels import Labels, narrow, positions
from zipfx.rules.call import Call, rule
from zipfx.rules.pointwise import join


@rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _cell(call: Call) -> tuple[Labels, ...]:
    """All gates of a feature and its state are one feature; the work space is not read."""
    state = call.labels("cx" if "lstm" in str(call.op) else "hx")
    names = ("input_gates", "hidden_gates", "input_bias", "hidden_bias")
    given = [call.labels(name) for name in names if call.arg(name) is not None]
    shape, size = given[0].shape, state.shape[-1]
    gates = join(call.ledger, given, shape)
    parts = []
    for i in range(shape[-1] // size):
        cut = [
            tuple(narrow(s.narrow(-1, i * size, size)) if s.shape[-1] > 1 else s for s in group)
            for group in (gates.features, gates.fixed)
        ]
        parts.append(Labels(state.shape, cut[0], cut[1], gates.kind))
        call.ledger.event(parts[-1].features, i)
    y = join(call.ledger, [*parts, state], state.shape)
    work = tuple(call.result[-1].shape)
    return *(y,) * (len(call.result) - 1), Labels(work, (), positions(work))
