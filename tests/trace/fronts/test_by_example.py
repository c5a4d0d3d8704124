"""Forward asks Python about its inputs: answered on the example, and noted where that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

import zipfx
from tests.helpers.given import ROWS, Given, by_name, filled
from tests.helpers.laws import error, run, unharmed
from tests.helpers.models import NETS
from zipfx.trace.record import record_of
from zipfx.trace.tracing import trace

FOLLOWED: dict[str, tuple[Callable[..., Any], Any]] = {
    "bool": (lambda m, x: m.net(x) * 2 if x.shape[1] % 2 == 0 else x, ROWS),
    "len": (lambda m, x: m.net(x) * len(x.shape), ROWS),
    "int": (lambda m, x: m.net(x) * int(x.shape[1] / 2), ROWS),
    "float": (lambda m, x: m.net(x) / float(x.shape[1]), ROWS),
    "index": (lambda m, x: [1, 2, 3, 4, 5][x.shape[1]] * m.net(x), ROWS),
    "range": (lambda m, x: sum(m.net(x)[:, i] for i in range(x.shape[1])), ROWS),
    "round": (lambda m, x: m.net(x).view(-1, round(x.shape[1] / 2)), ROWS),
    "divmod": (lambda m, x: m.net(x).view(-1, *divmod(x.shape[1], 2)[:1]), ROWS),
    "min": (lambda m, x: m.net(x)[:, : min(x.shape[1], 3)], ROWS),
    "star": (lambda m, x: m.net(x).view(*x.shape, 1), ROWS),
    "chunks": (lambda m, x: torch.cat(list(m.net(x).chunk(2, 1))[::-1], 1), ROWS),
    "pairs": (lambda m, x: sum(a * b for a, b in zip(x.chunk(2, 1), m.net(x).chunk(2, 1))), ROWS),
    "in shape": (lambda m, x: m.net(x) * 2 if 4 in x.shape else x, ROWS),
    "dtype": (lambda m, x: m.net(x) if x.dtype == torch.float32 else m.net(x.float()), ROWS),
    "text": (lambda m, x: m.net(x) if x.device.type != "abacus" else x, ROWS),
    "assert": (lambda m, x: m.net(x) if check(x) else x, ROWS),
    "attribute": (lambda m, x: m.net(x) if len(x) and not hasattr(x, "tensors") else x, ROWS),
    "filled": (filled, ROWS),
    "parameter": (lambda m, x: m.net(x) + m.scale.expand(len(x.shape) and x.shape[0], -1), ROWS),
    "buffer": (lambda m, x: m.net(x) if m.flag else x, ROWS),
    "buffer item": (lambda m, x: m.net(x) * int(m.flag.item()), ROWS),
    "attribute tensor": (lambda m, x: m.net(x) + m.table.to(x.device) * len(x.shape), ROWS),
    "list": (lambda m, x: sum(m.net(y) for y in x) / len(x), [ROWS, ROWS + 1]),
    "nested": (lambda m, x: [m.net(y) for y, _ in x], [(ROWS, 1), (ROWS + 1, 2)]),
    "dict": (by_name, {"u": ROWS, "v": ROWS + 1}),
}


def check(x: Tensor) -> bool:
    assert x.shape[1] == 4
    return True


def enlarged(inputs: Any) -> Any:
    return tree_map(lambda t: torch.cat([t, -t, 2 * t]) if isinstance(t, Tensor) else t, inputs)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FOLLOWED)
def test_python_is_answered_and_the_batch_stays_free(name: str) -> None:
    forward, inputs = FOLLOWED[name]
    model = Given(forward)
    seen: list[fx.GraphModule] = []
    unharmed([model], lambda: seen.append(trace(model, inputs=(inputs,))))
    (traced,) = seen
    assert [n.name for n in traced.graph.nodes if n.op == "placeholder"] == ["x", "mask"]
    for x in (inputs, enlarged(inputs)):
        assert error(run(model, (x,)), run(traced, (x,))) == 0
    assert all(dict(model.named_parameters())[n] is p for n, p in traced.named_parameters())
    assert error(run(model, (inputs,)), run(model, (inputs,))) == 0


@pytest.mark.parametrize(
    ("forward", "inputs", "about"),
    [
        (FOLLOWED["bool"][0], ROWS, "a shape"),
        (FOLLOWED["range"][0], ROWS, "a shape"),
        (FOLLOWED["list"][0], [ROWS, ROWS], "a shape"),
        (lambda m, x: torch.stack([m.net(row) for row in x]), ROWS, "a shape"),
        (lambda m, x: m.net(x) if len(x) > 1 else x, ROWS, "a shape"),
        (lambda m, x: torch.stack(list(m.net(x).unbind(0))), ROWS, "a shape"),
        (FOLLOWED["dtype"][0], ROWS, "a dtype"),
        (FOLLOWED["buffer"][0], ROWS, "the state of the model"),
        (FOLLOWED["buffer item"][0], ROWS, "the state of the model"),
        (lambda m, x: m.net(x[0]) if x[1] == "yes" else x, (ROWS, "yes"), None),
    ],
)
def test_what_was_taken_for_granted_is_noted(forward: Any, inputs: Any, about: str | None) -> None:
    notes = record_of(trace(Given(forward), inputs=(inputs,))).notes
    assert "traced with mask=None, as in the example inputs" in notes
    shapes = [tuple(t.shape) for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    ending = f"; traced for inputs of shape {shapes}"
    (note,) = [n for n in notes if n.startswith("forward branches on ") and n.endswith(ending)]
    assert __file__ in note
    assert about is None or f"branches on {about} at " in note


@pytest.mark.parametrize("name", ["chunks", "star", "filled", "assert", "dict"])
def test_what_holds_for_every_size_is_not_noted(name: str) -> None:
    forward, inputs = FOLLOWED[name]
    notes = record_of(trace(Given(forward), inputs=(inputs,))).notes
    assert notes == ("traced with mask=None, as in the example inputs",)


def test_notes_reach_the_space_map_and_the_report() -> None:
    models = [Given(FOLLOWED["bool"][0]) for _ in range(2)]
    note = "forward branches on a shape at"
    assert any(note in n for n in zipfx.analyze(models[0], ROWS).notes)
    report = zipfx.zip(models, [torch.randn(8, 4)], progress=False).meta["zipfx"]
    assert len([n for n in report.notes if note in n]) == 1
    assert note in str(report)


def test_an_argument_that_is_none_is_none_and_one_that_is_given_is_not() -> None:
    model = Given(lambda m, x: m.net(x))
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    assert error(run(model, (x,)), run(trace(model, inputs=(x,)), (x,))) == 0
    traced = trace(model, inputs=(x, mask))
    assert error(run(model, (x, mask)), run(traced, (x, mask))) == 0
    assert record_of(traced).notes == ()


class Unions(nn.Module):
    """Takes a tensor or a list of them; the answer to `isinstance` is no for every symbol."""

    def forward(self, x: Any, again: Any = None) -> Tensor:
        if again is not None:
            return x
        return x * 2 if isinstance(x, Tensor) else x * 1


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_refused() -> None:
    says = r"the traced graph does not compute what Unions computes .*\(outputs have other values\)"
    with pytest.raises(zipfx.ZipError, match=says):
        trace(Unions(), inputs=(ROWS,), front="symbolic")
    right = trace(Unions(), inputs=(ROWS,))  # torch.export needs no symbols
    assert error(run(right, (ROWS,)), ROWS * 2) == 0
    assert record_of(right).front == "export"
    wrong = trace(Unions())
    assert error(run(wrong, (ROWS,)), ROWS) == 0


def test_symbols_are_kept_where_none_makes_no_difference() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask)

    traced = trace(Attention(), inputs=(torch.randn(2, 3, 4),))
    assert record_of(traced).notes == ()
    x, mask = torch.randn(2, 3, 4), torch.ones(3, 3).tril().bool()
    assert error(run(Attention(), (x, mask)), run(traced, (x, mask))) == 0


def test_what_plain_tracing_can_follow_stays_as_it_is() -> None:
    net = NETS["BufferScale"]
    model = net.build()
    graphs = [trace(model).graph, trace(model, inputs=net.inputs(3)).graph]
    assert str(graphs[0]) == str(graphs[1])


def test_forward_may_write_and_draw_without_harm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x += torch.rand(x.shape[1]) * 0
        m.flag.add_(1)
        with torch.no_grad():
            m.scale.mul_(2)
        return m.net(x) * m.scale if len(x) else x

    model, inputs = Given(forward), torch.randn(2, 4)
    before = inputs.clone()
    unharmed([model], lambda: trace(model, inputs=(inputs,)))
    assert torch.equal(inputs, before)
