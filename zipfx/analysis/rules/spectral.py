"""Complex numbers and Fourier transforms.

A complex number carries one feature, as a real one does. Most operations on them are those on real
numbers; here is what is left.
"""

from __future__ import annotations

from zipfx.analysis.labels.constraints import Ledger
from zipfx.analysis.labels.labels import Labels, beyond, place, positions
from zipfx.analysis.rules.call import Call, carried, rule
from zipfx.analysis.rules.convolution import slide


def paired(ledger: Ledger, pairs: Labels) -> Labels:
    """Labels of complex numbers whose real and imaginary parts lie along the last dimension.

    Where these are two features, as in a rotary embedding, the pair moves as a whole.
    """
    last = len(pairs.shape) - 1
    x = slide(ledger, pairs, {last}, "two features are one complex number: they keep their order")
    shape = pairs.shape[:-1]
    features = tuple(s.squeeze(last) for s in x.features)
    fixed = tuple(s.squeeze(last) for s in beyond(x.fixed, {last}))
    return Labels(shape, features, fixed, pairs.kind)


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(call: Call) -> Labels:
    """Every frequency is a sum over all of an axis, each term with a factor of its own."""
    x, shape = call.labels("self"), tuple(call.result.shape)
    along = {d % len(shape) for d in call.arg("dim")}
    reason = f"{call.op.name()} mixes all that lies along an axis, in its order"
    x = slide(call.ledger, x, along, reason)
    return Labels(shape, x.features, (*beyond(x.fixed, along), *positions(shape, along)), x.kind)


@rule("unfold_backward")
def _overlapping_sum(call: Call) -> Labels:
    """Windows, (..., count, ..., width), are added up where they lie, as at the end of an istft."""
    x, shape = call.labels("grad_in"), tuple(call.result.shape)
    dim, last = call.arg("dim") % len(shape), len(shape)
    x = slide(call.ledger, x, {dim, last})
    keep = {d: d for d in range(last)}
    fixed = (place(s, keep, last) for s in beyond(x.fixed, {dim, last}))
    features = tuple(carried(x.features, keep, last))
    return Labels(shape, features, (*fixed, *positions(shape, [dim])), x.kind)
