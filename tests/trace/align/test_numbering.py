"""What is computed has a number, whatever the weights and the code are."""

from __future__ import annotations

import torch

from tests.helpers.variants import WAYS, built
from zipfx.trace.align.numbering import number
from zipfx.trace.tracing import trace


def test_numbers_do_not_depend_on_weights() -> None:
    x = [torch.randn(2, 3, 8, 8).double()]
    found = [number(trace(built(net, seed), inputs=x), x) for seed, net in enumerate(WAYS)]
    assert len({numbers.gives[-1] for numbers in found}) == 1
    assert len({tuple(sorted(use.number for use in numbers.uses)) for numbers in found}) == 1
