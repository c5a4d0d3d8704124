"""Recurrent: cells on CUDA, where the gates of one step are a single operation, and packing.

On the CPU cells are pointwise operations, which need no rule; nor does a loop over packed steps, or
unpacking them, which are slices and copies.
"""

from __future__ import annotations

from dataclasses import replace

from zipfx.analysis.labels.labels import Labels, narrow, place, positions
from zipfx.analysis.rules.call import Call, carried, pinned_along, rule
from zipfx.analysis.rules.pointwise import join


@rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _cell(call: Call) -> tuple[Labels, ...]:
    """All gates of a feature and its state are one feature; the work space is not read."""
    state = call.labels("cx" if "lstm" in str(call.op) else "hx")
    names = ("input_gates", "hidden_gates", "input_bias", "hidden_bias")
    given = [call.labels(name) for name in names if call.arg(name) is not None]
    shape, size = given[0].shape, state.shape[-1]
    gates = join(call.constraints, given, shape)
    parts = []
    for i in range(shape[-1] // size):
        cut = [
            tuple(narrow(s.narrow(-1, i * size, size)) if s.shape[-1] > 1 else s for s in group)
            for group in (gates.features, gates.fixed)
        ]
        parts.append(Labels(state.shape, cut[0], cut[1], gates.kind))
        call.constraints.event(parts[-1].features, i)
    y = join(call.constraints, [*parts, state], state.shape)
    work = tuple(call.result[-1].shape)
    return *(y,) * (len(call.result) - 1), Labels(work, (), positions(work))


@rule("_pack_padded_sequence")
def _packed(call: Call) -> tuple[Labels, ...]:
    """(B, T, *) or (T, B, *), and B lengths: the steps that are there, in one row after the other.

    What lies on the two axes is chosen by the lengths; what lies on others is left as it is.
    """
    reason, lengths = "lengths say which are there", call.labels("lengths")
    x = pinned_along(call.constraints, call.labels("input"), {0, 1}, reason)
    rows, sizes = (tuple(t.shape) for t in call.result)
    keep = {d: d - 1 for d in range(2, len(x.shape))}
    fixed = (place(s, keep, len(rows)) for s in x.fixed)
    features = tuple(carried(x.features, keep, len(rows)))
    data = Labels(rows, features, (*fixed, *positions(rows, [0])), x.kind)
    return data, replace(lengths, shape=sizes, features=(), fixed=positions(sizes))
