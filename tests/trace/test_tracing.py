from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_map

import zipfx
from tests.helpers.laws import error, run, unharmed
from tests.helpers.models import NETS, Net
from zipfx.trace.record import record_of
from zipfx.trace.tracing import trace

all_nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


@all_nets
def test_a_traced_model_computes_the_same_with_the_same_parameters(net: Net) -> None:
    model = net.build()
    traced = unharmed([model], lambda: trace(model))
    assert error(run(model, net.inputs(3)), run(traced, net.inputs(3))) == 0
    names = dict(model.named_parameters())
    assert all(names[name] is p for name, p in traced.named_parameters())


@pytest.mark.parametrize("name", ["BufferScale", "BufferAlone", "BufferPosition"])
def test_buffers_stay_nodes_and_are_copies(name: str) -> None:
    model = NETS[name].build()
    traced = trace(model)
    buffers = dict(model.named_buffers())
    assert {n.target for n in traced.graph.nodes if n.op == "get_attr"} == set(buffers)
    for key, buffer in traced.named_buffers():
        assert torch.equal(buffer, buffers[key])
        assert buffer.data_ptr() != buffers[key].data_ptr()


def test_modes_are_those_of_evaluation_and_hooks_do_not_run() -> None:
    def hook(*_: Any) -> None:
        raise AssertionError("a hook of the caller ran")

    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[0].register_forward_hook(hook)
    traced = unharmed([model], lambda: trace(model))
    x = torch.randn(4, 3)
    assert torch.equal(traced(x), traced(x))
    assert not any(m.training for m in traced.modules())


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 50)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.5, self.training)


def test_functional_dropout_is_off_whatever_the_mode_of_the_caller() -> None:
    model = FunctionalDropout().train()
    x = torch.randn(2, 4)
    assert torch.equal(trace(model)(x), model.eval()(x))


def test_long_chains_are_traced_and_analysed() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            for _ in range(1500):
                y = torch.relu(y)
            return self.h(y)

    assert [s.size for s in zipfx.analyze(Chain(), torch.randn(2, 3), verify=False)] == [4]


@pytest.mark.parametrize("old", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_computed_in_hooks_are_refused(old: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(old(nn.Linear(3, 4)), nn.Linear(4, 2))
    with pytest.raises(
        zipfx.ZipError, match=r"module '0' computes its weight in a hook .*parametrizations"
    ):
        trace(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_refused_unless_they_have_no_weights() -> None:
    plain, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    model = nn.Sequential(torch.jit.script(plain), nn.Linear(4, 2))
    with pytest.raises(zipfx.ZipError, match=r"module '0' .* was compiled by torch.jit .* zip the"):
        zipfx.analyze(model, x)
    model = nn.Sequential(plain[0], torch.jit.script(plain[1]), nn.Linear(4, 2))
    assert [s.size for s in zipfx.analyze(model, x)] == [4]


def test_parametrizations_are_followed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    (space,) = zipfx.analyze(model.double(), torch.randn(5, 3).double())
    assert {axis.parameter for axis in space.axes} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
        "0.bias",
        "2.weight",
    }


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Odd) or super().is_leaf_module(m, name)


def test_a_tracer_of_your_own_can_hold_leaves() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2))
    with pytest.raises(zipfx.ZipError, match="can not trace"):
        trace(model)
    assert [n.op for n in trace(model, Leaves()).graph.nodes].count("call_module") == 3
    x = torch.randn(5, 3)
    assert [s.size for s in zipfx.analyze(model, x, tracer=Leaves())] == [4]
    twin = nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2))
    merged = zipfx.zip([model, twin], [x], partial="0", tracer=Leaves(), progress=False)
    assert [tuple(y.shape) for y in merged(x)] == [(5, 2), (5, 2)]


def test_a_tracer_of_your_own_is_used_as_it_is() -> None:
    model = Given(lambda m, x: m.net(x) if len(x) else x)
    trace(model, inputs=(torch.randn(2, 4),))
    with pytest.raises(zipfx.ZipError, match=r"can not trace Given at .*: 'len' is not supported"):
        trace(model, fx.Tracer(), inputs=(torch.randn(2, 4),))


# ------------------------------------------------------------------ what example inputs can answer
class Given(nn.Module):
    """forward is a function of (module, *inputs); `net` has 4 inputs and 4 outputs."""

    flag: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.net = forward, nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(1, 4))
        self.register_buffer("flag", torch.tensor(1))
        self.table = torch.rand(1, 4)

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.body(self, x) if mask is None else self.body(self, x) * mask


def filled(m: Any, x: Tensor) -> Tensor:
    b, n = x.shape
    y = torch.zeros(b, n, dtype=x.dtype, device=x.device)
    y[:, : n // 2] = m.net(x)[:, : n // 2]
    y[x > 0] = 1
    return y + torch.arange(n) + torch.full((b, 1), 2.0)


def by_name(m: Any, d: dict[str, Tensor]) -> Tensor:
    y = sum(m.net(v) * len(k) for k, v in d.items())
    y = y + sum(d[k] for k in d) + sum(d.values()) + dict(**d)["u"]
    return y * 2 if "u" in d and "w" not in d and d.get("w") is None else y


ROWS = torch.randn(2, 4)
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


def test_a_graph_that_computes_something_else_is_refused() -> None:
    says = r"the traced graph does not compute what Unions computes .*\(outputs have other values\)"
    with pytest.raises(zipfx.ZipError, match=says):
        trace(Unions(), inputs=(ROWS,))
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


def test_answered_questions_leave_no_nodes() -> None:
    model = nn.Sequential(Even(), nn.Linear(4, 2))
    nodes = trace(model, inputs=(ROWS,)).graph.nodes
    assert [n.name for n in nodes] == ["input_1", "mul", "_1", "output"]


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 == 0 and x.dim() == 2:
            x = x * 2
        return x


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


# ------------------------------------------------------------------ other fronts
def test_a_graph_module_keeps_its_order_and_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    mine = fx.symbolic_trace(model)
    for i, node in enumerate(mine.graph.nodes):
        if node.op != "output":
            node.name = f"mine_{i}"
    mine.graph.eliminate_dead_code()
    mine.recompile()
    traced = trace(mine, inputs=(torch.randn(5, 3),))
    assert [n.name for n in traced.graph.nodes] == [n.name for n in mine.graph.nodes]
    assert traced.graph is not mine.graph
    assert all(dict(mine.named_parameters())[n] is p for n, p in traced.named_parameters())
    twin = copy.deepcopy(mine)
    merged = zipfx.zip([mine, twin], [torch.randn(8, 3)], partial="0", progress=False)
    assert [n.name for n in merged.graph.nodes][:2] == ["mine_0", "mine_1"]


def test_a_graph_module_from_a_file_can_be_cut_anywhere() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2))
    mine = pickle.loads(pickle.dumps(fx.symbolic_trace(model)))
    x = torch.randn(8, 3)
    merged = zipfx.zip([mine, copy.deepcopy(mine)], [x], partial="0", progress=False)
    assert error(run(mine, (x,)), run(merged, (x,))[0]) < 1e-5


def test_a_merged_model_is_a_model() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    x = torch.randn(8, 3)
    pairs = [zipfx.zip([net(), net()], [x], progress=False) for _ in range(2)]
    assert zipfx.zip(pairs, [x], progress=False)(x).shape == (8, 2)


@fx.wrap
def wrapped(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("forward", [
    lambda m, x: m.net(wrapped(x)),
    lambda m, x: m.net(wrapped(x)) * len(x.shape),
], ids=["plain", "followed"])  # fmt: skip
def test_wrapped_functions_are_nodes(forward: Callable[..., Any]) -> None:
    model, x = Given(forward), ROWS.abs()
    traced = trace(model, inputs=(x, x))
    assert [n.name for n in traced.graph.nodes].count("wrapped") == 1
    for y in (x, -x):
        assert error(run(model, (y, x)), run(traced, (y, x))) == 0


def test_registries_of_timm_are_honoured_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.SimpleNamespace(
        get_notrace_modules=lambda: [Odd], get_notrace_functions=lambda: [plain]
    )
    model = nn.Sequential(nn.Linear(3, 4), Odd(), Plain())
    monkeypatch.delitem(sys.modules, "timm.models._features_fx", raising=False)
    with pytest.raises(zipfx.ZipError, match="can not trace Sequential in module '1'"):
        trace(model)
    monkeypatch.setitem(sys.modules, "timm.models._features_fx", registry)
    assert [n.name for n in trace(model).graph.nodes] == ["input_1", "_0", "_1", "plain", "output"]


def plain(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plain(x)


@pytest.mark.parametrize("inputs", [None, (torch.randn(2, 3),)], ids=["symbolic", "example"])
def test_an_error_names_the_module_and_the_line(inputs: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), Odd()))
    says = (
        r"can not trace Sequential in module '1\.1' at .*test_tracing\.py:\d+ "
        r"\(return x \* 2 if x\.sum\(\) > 0 else x\): .* torch\.fx\.wrap, .*a leaf "
        r".*\(tracer=\.\.\.\), or zip a smaller module"
    )
    with pytest.raises(zipfx.ZipError, match=says):
        trace(model, inputs=inputs)


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> NoCopy:
        raise TypeError("never")


def test_a_model_that_can_not_be_copied() -> None:
    with pytest.raises(zipfx.ZipError, match=r"the NoCopy can not be copied \(never\)"):
        trace(NoCopy(2, 2))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Frozen(torch.autograd.Function):
    """Another one, whose forward is decorated as forwards of models may be."""

    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@fx.wrap
def sign(x: Tensor) -> Tensor:
    found: Tensor = Sign.apply(x)
    return found


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(3, 4), Sign.apply

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(self.a(x))
        return found


class Wrapped(Binary):
    def forward(self, x: Tensor) -> Tensor:
        return sign(self.a(x))


def test_a_backward_that_is_lost_is_noted() -> None:
    (note,) = record_of(trace(Binary())).notes
    assert "the backward of Sign is not part of the result" in note
    (note,) = record_of(trace(Binary(), inputs=[torch.randn(2, 3)])).notes
    assert "marked with torch.fx.wrap" in note
    assert record_of(trace(Decorated())).notes == ()
    kept = trace(Wrapped())
    assert record_of(kept).notes == ()
    kept(torch.randn(2, 3)).sum().backward()
    assert kept.a.weight.grad is not None
    assert kept.a.weight.grad.any()
