"""What one interpretation learns of a small model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zipfx.analysis.analysis import Analysis, run_analysis
from zipfx.trace.tracing import trace


def analysed(model: nn.Module, *inputs: Any) -> Analysis:
    """Without the numeric check, which would hide what the labels get wrong."""
    return run_analysis(trace(model, inputs=inputs), inputs, verify=False)


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))))


def ids(*labels: int) -> Tensor:
    return torch.tensor(labels, dtype=torch.int64)
