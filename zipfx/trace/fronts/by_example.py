"""By example: a tracer with an example value beside every node.

`ExampleTracer` computes every node on example inputs while it records them, so that it can answer
where Python needs to know: the length of a list, the number of rows to loop over, whether a size is
odd. The nodes stay symbolic; each answer that depends on the size of the inputs leaves a note, and
one that would depend on their data is refused.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError

from zipfx.model.calls.arguments import Argument
from zipfx.trace.fronts.known import Evaluation, Known, NodeCall, Questions
from zipfx.trace.fronts.symbolic import Tracer
from zipfx.trace.nodes import is_in_place

#: what makes tensors out of numbers: with unknown sizes these calls must become nodes
FACTORIES = """
    arange as_tensor empty eye full linspace logspace ones rand randint randn randperm
    scalar_tensor tensor tril_indices triu_indices zeros
""".split()


def with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with another tensor in place of each; what is tied stays tied.

    >>> twin = with_tensors(nn.Linear(2, 3), lambda t: t.to("meta"))
    >>> twin.weight.device, isinstance(twin.weight, nn.Parameter)
    (device(type='meta'), True)
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for t in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(t, nn.Parameter):
                memo[id(t)] = nn.Parameter(make(t.detach()), t.requires_grad)
            elif isinstance(t, Tensor):
                memo[id(t)] = make(t.detach())
    return copy.deepcopy(module, memo)


class ExampleProxy(fx.Proxy):
    """A proxy of a node that is known on the example inputs."""

    tracer: ExampleTracer
    known: Known

    def __getattr__(self, name: str) -> Any:
        if name in ("known", "node", "tracer"):  # not set yet
            raise AttributeError(name)
        record, value = self.tracer.create_proxy, self.known.value
        if name == "is_nested":
            return value.is_nested
        if isinstance(value, Mapping) and name in ("items", "values", "get"):
            return getattr({key: self[key] for key in value}, name)  # type: ignore[index]
        if callable(getattr(value, name)):
            return lambda *args, **kwargs: record("call_method", name, (self, *args), kwargs)
        return record("call_function", getattr, (self, name), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        return len(self.tracer.shape_of(self))

    def __contains__(self, item: Any) -> bool:
        value = self.known.value
        values = value if isinstance(value, Mapping) else self.tracer.answer(self)
        return (item.known.value if isinstance(item, ExampleProxy) else item) in values

    def __index__(self) -> int:
        return operator.index(self.tracer.answer(self))

    def __int__(self) -> int:
        return int(self.tracer.answer(self))

    def __float__(self) -> float:
        return float(self.tracer.answer(self))

    def __round__(self, *digits: int) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *digits), {})

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def _write(self, function: Callable[..., Any], other: Any) -> Any:
        """`x += y`, which is `x = x + y` to fx; that is another thing where x has a second name."""
        if not (self.tracer.writes and isinstance(self.known.value, Tensor)):
            return NotImplemented
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._write(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._write(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._write(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._write(operator.itruediv, other)

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        used: list[Any] = []
        map_aggregate((args or (), kwargs or {}), used.append)
        proxies = [p for p in used if isinstance(p, ExampleProxy)]
        proxies[0].tracer.questions.take_back({p.node for p in proxies})
        return super().__torch_function__(orig_method, types, args, kwargs)


class ExampleTracer(Tracer):
    """A `Tracer` that follows Python where it needs values, for the inputs it was given.

    It writes where the model writes: give it a model and inputs of its own. With inputs on the
    "meta" device nothing is computed but shapes; a model that asks for more can not be traced so.

    writes: whether `x += y` is to write into x, as it does in the model, instead of making a new
    tensor; notes: where forward went by a size, and by which; most: nodes that a graph may have.

    >>> class Rows(nn.Module):
    ...     def forward(self, x):
    ...         return sum(x[i] for i in range(x.shape[0]))
    >>> tracer = ExampleTracer([torch.ones(2, 3)])
    >>> [node.name for node in tracer.trace(Rows()).nodes if "getitem" in node.name]
    ['getitem', 'getitem_1', 'getitem_2']
    >>> tracer.notes[0].split("; ")[1]
    'traced for inputs of shape [(2, 3)]'
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        arguments: Sequence[Argument] | None = None,
        *,
        writes: bool = False,
        opened: bool = False,
        marked: bool = False,
    ) -> None:
        super().__init__(arguments, opened=opened, marked=marked)
        self.writes = writes
        self.evaluation = Evaluation(inputs)
        self.questions = Questions(self.evaluation.shapes)
        self.most: int | None = None

    @property
    def overfull(self) -> bool:
        """Whether there are more nodes than there may be."""
        graph = getattr(self, "graph", None)  # there is none before the first node
        return bool(graph and self.most is not None and len(graph.nodes) > self.most)

    @property
    def notes(self) -> list[str]:
        return self.questions.notes

    @property
    def runs(self) -> bool:
        """Whether operations are carried out at the moment, and not recorded."""
        return self.evaluation.runs

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module; `is_leaf_module` and the like are as in every `fx.Tracer`."""
        shapes_only = self.evaluation.shapes_only
        if shapes_only:
            root = with_tensors(root, lambda t: t.to("meta"))
        own = set(vars(root))
        with _recorded_factories(self):
            graph = super().trace(root, concrete_args)
        if shapes_only and (constants := set(vars(root)) - own):
            raise TraceError(f"forward makes constants, whose values it needs: {sorted(constants)}")
        return graph

    # ---------------------------------------------------------------- recording
    def proxy(self, node: fx.Node) -> ExampleProxy:
        return ExampleProxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        self.questions.keep()
        if self.overfull:
            raise TraceError(f"forward makes more than {self.most} nodes with these inputs")
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        assert isinstance(proxy, ExampleProxy)
        proxy.known = self._evaluated(kind, target, args, kwargs)
        if proxy.known.value is not None:
            return proxy
        if kind == "placeholder":
            self.questions.note(f"traced with {target}=None, as in the example inputs")
        return None  # `is None` can not be recorded

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self.runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.runs:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def _evaluated(self, kind: str, target: Any, args: Any, kwargs: Any) -> Known:
        used: list[ExampleProxy] = []

        def value_of(a: Any) -> Any:
            if isinstance(a, ExampleProxy):
                used.append(a)
                return a.known.value
            return a

        call = NodeCall(kind, target, *map_aggregate((args, kwargs), value_of))
        known = self.evaluation.known(self.root, call, [proxy.known for proxy in used])
        if used and is_in_place(target) and known.given:
            used[0].known = replace(used[0].known, given=True)
        return known

    # ---------------------------------------------------------------- answers
    def to_bool(self, obj: fx.Proxy) -> bool:
        assert isinstance(obj, ExampleProxy)
        if isinstance(obj.known.value, (Tensor, int, float)):
            return bool(self.answer(obj))
        return bool(self.shape_of(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        assert isinstance(obj, ExampleProxy)
        value = self.shape_of(obj)
        if isinstance(value, (Mapping, str)):
            return iter(value)
        if not hasattr(value, "__getitem__"):
            raise TraceError(f"a {type(value).__name__} is iterated, which has no items to name")
        return iter([obj[i] for i in range(len(value))])  # type: ignore[index]

    def keys(self, obj: fx.Proxy) -> Any:
        assert isinstance(obj, ExampleProxy)
        return obj.known.value.keys()

    def answer(self, proxy: ExampleProxy) -> Any:
        """The value of a node, which Python needs; it may depend on shapes, not on data."""
        return self.questions.value(proxy.node, proxy.known, self.root)

    def shape_of(self, proxy: ExampleProxy) -> Any:
        """The value of a node of which Python needs only the length."""
        return self.questions.length(proxy.node, proxy.known)


@contextmanager
def _recorded_factories(tracer: ExampleTracer) -> Iterator[None]:
    """All calls that make tensors become nodes, also those that torch's parser would refuse."""

    def recorded(factory: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if tracer.runs:
                return factory(*args, **kwargs)
            return tracer.create_proxy("call_function", factory, args, kwargs)

        return record

    factories = {name: getattr(torch, name) for name in FACTORIES}
    try:
        for name, factory in factories.items():
            setattr(torch, name, recorded(factory))
        yield
    finally:
        for name, factory in factories.items():
            setattr(torch, name, factory)
