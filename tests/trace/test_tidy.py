"""What recording leaves in a graph, and what is cleared away."""

from __future__ import annotations

from torch import nn

from tests.helpers.given import ROWS, Even
from zipfx.trace.tracing import trace


def test_answered_questions_leave_no_nodes() -> None:
    model = nn.Sequential(Even(), nn.Linear(4, 2))
    nodes = trace(model, inputs=(ROWS,)).graph.nodes
    assert [n.name for n in nodes] == ["input_1", "mul", "_1", "output"]
