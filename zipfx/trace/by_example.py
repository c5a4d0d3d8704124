"""Example: a tracer with an example value beside every node.

`ExampleTracer` computes every node on example inputs while it records them, so that it can answer
where Python needs to know: the length of a list, the number of rows to loop over, whether a size is
odd. The nodes stay symbolic; each answer that depends on the size of the inputs leaves a note, and
one that would depend on their data is refused.
"""

from __future__ import annotations

import copy
import linecache
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.model.calls import Argument
from zipfx.trace.nodes import is_in_place, name_of
from zipfx.trace.symbolic import Tracer, is_tracing_code

#: what makes tensors out of numbers: with unknown sizes these calls must become nodes
FACTORIES = """
    arange as_tensor empty eye full linspace logspace ones rand randint randn randperm
    scalar_tensor tensor tril_indices triu_indices zeros
""".split()
#: values that leave for Python where torch can not see it
_ESCAPES = ("tolist", "numpy")
#: results with as many items as their input has rows or pieces
_COUNTED = ("split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit")
_SHAPE = "a shape"


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
    """A proxy that knows the value of its node on the example inputs.

    value: as the model would see it; given: whether it comes from the inputs at all, not from
    parameters alone; free: whether the number, or the shape, is decided by the data of a tensor;
    about: what a branch on it is a branch on.
    """

    tracer: ExampleTracer
    value: Any
    given: bool
    free: bool
    about: str

    def __getattr__(self, name: str) -> Any:
        if name in ("value", "given", "free", "about", "node", "tracer"):  # not set yet
            raise AttributeError(name)
        record, value = self.tracer.create_proxy, self.value
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
        values = self.value if isinstance(self.value, Mapping) else self.tracer.answer(self)
        return (item.value if isinstance(item, ExampleProxy) else item) in values

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
        if not (self.tracer.writes and isinstance(self.value, Tensor)):
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
        proxies[0].tracer.take_back({p.node for p in proxies})
        return super().__torch_function__(orig_method, types, args, kwargs)


class _Watch(TorchDispatchMode):
    """Sees whether anything that ran let data decide over a shape or a Python number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = self.number = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags
        by_position = func is torch.ops.aten.index.Tensor and not any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        self.shape |= torch.Tag.dynamic_output_shape in tags and not by_position
        self.number |= torch.Tag.data_dependent_output in tags
        return func(*args, **(kwargs or {}))


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
    ) -> None:
        super().__init__(arguments, opened=opened)
        self.inputs, self.writes = list(inputs), writes
        self.shapes = [tuple(t.shape) for t in tree_leaves(self.inputs) if isinstance(t, Tensor)]
        self.asked: set[fx.Node] = set()
        self._fresh: list[tuple[fx.Node, str]] = []
        self._notes: dict[str, None] = {}
        self._runs = False
        self._shapes_only = any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(inputs))
        self.most: int | None = None

    @property
    def overfull(self) -> bool:
        """Whether there are more nodes than there may be."""
        graph = getattr(self, "graph", None)  # there is none before the first node
        return bool(graph and self.most is not None and len(graph.nodes) > self.most)

    @property
    def notes(self) -> list[str]:
        self._keep()
        return list(self._notes)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module; `is_leaf_module` and the like are as in every `fx.Tracer`."""
        if self._shapes_only:
            root = with_tensors(root, lambda t: t.to("meta"))
        own = set(vars(root))
        with self._recorded_factories():
            graph = super().trace(root, concrete_args)
        if self._shapes_only and (constants := set(vars(root)) - own):
            raise TraceError(f"forward makes constants, whose values it needs: {sorted(constants)}")
        return graph

    @property
    def runs(self) -> bool:
        """Whether operations are carried out at the moment, and not recorded."""
        return self._runs

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
        self._keep()
        if self.overfull:
            raise TraceError(f"forward makes more than {self.most} nodes with these inputs")
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        assert isinstance(proxy, ExampleProxy)
        self._evaluate(proxy, kind, target, args, kwargs)
        if kind == "placeholder" and proxy.value is None:
            self._notes[f"traced with {target}=None, as in the example inputs"] = None
        return proxy if proxy.value is not None else None  # `is None` can not be recorded

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self._runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._runs:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    @contextmanager
    def _recorded_factories(self) -> Iterator[None]:
        """All calls that make tensors become nodes, also those that torch's parser would refuse."""

        def recorded(factory: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                if self._runs:
                    return factory(*args, **kwargs)
                return self.create_proxy("call_function", factory, args, kwargs)

            return record

        factories = {name: getattr(torch, name) for name in FACTORIES}
        try:
            for name, factory in factories.items():
                setattr(torch, name, recorded(factory))
            yield
        finally:
            for name, factory in factories.items():
                setattr(torch, name, factory)

    # ---------------------------------------------------------------- values
    def _evaluate(
        self, proxy: ExampleProxy, kind: str, target: Any, args: Any, kwargs: Any
    ) -> None:
        used: list[ExampleProxy] = []

        def value_of(a: Any) -> Any:
            if isinstance(a, ExampleProxy):
                used.append(a)
                return a.value
            return a

        values, options = map_aggregate((args, kwargs), value_of)
        proxy.given = kind == "placeholder" or any(p.given for p in used)
        watch = _Watch()
        self._runs = True
        try:
            with torch.no_grad(), watch, self._device():
                proxy.value = self._run(kind, target, values, options)
        finally:
            self._runs = False
        name = name_of(target)
        number = not any(isinstance(t, Tensor) for t in tree_leaves(proxy.value))
        escapes = watch.shape or (number and (watch.number or name in _ESCAPES))
        proxy.free = escapes or any(p.free for p in used)
        proxy.about = _SHAPE if proxy.given else "the state of the model"
        if number and kind == "placeholder":
            proxy.about = f"argument {target!r}"
        elif number and target is getattr and args[1] in ("dtype", "device"):
            proxy.about = f"a {args[1]}"
        elif number and proxy.given:
            proxy.about = next((p.about for p in used if p.given and p.about != _SHAPE), _SHAPE)
        if used and is_in_place(target):
            used[0].given |= proxy.given

    def _device(self) -> AbstractContextManager[Any]:
        """Where tensors are made that are made of numbers."""
        return torch.device("meta") if self._shapes_only else nullcontext()

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            return self.inputs.pop(0) if self.inputs else args[0]
        if kind == "get_attr":
            return operator.attrgetter(target)(self.root)
        if kind == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    # ---------------------------------------------------------------- answers
    def to_bool(self, obj: fx.Proxy) -> bool:
        assert isinstance(obj, ExampleProxy)
        if isinstance(obj.value, (Tensor, int, float)):
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
        return obj.value.keys()

    def answer(self, proxy: ExampleProxy) -> Any:
        """The value of a node, which Python needs; it may depend on shapes, not on data."""
        data = proxy.free or isinstance(proxy.value, Tensor)
        if data and (proxy.given or self._learned(proxy.node)):
            raise TraceError(
                f"Python needs the value of node {proxy.node.name!r}, which depends on the data "
                "of a tensor: it is another one for every input, or for every model"
            )
        if data or proxy.given:
            self._ask(proxy)
        return proxy.value

    def shape_of(self, proxy: ExampleProxy) -> Any:
        """The value of a node of which Python needs only the length."""
        if proxy.free and proxy.given:
            raise TraceError(
                f"Python needs the length of node {proxy.node.name!r}, which depends on the data "
                "of a tensor: it is another one for every input"
            )
        if proxy.given and self._counted(proxy):
            self._ask(proxy)
        return proxy.value

    def _counted(self, proxy: ExampleProxy) -> bool:
        """Whether another input may well have another number of items."""
        node, value, name = proxy.node, proxy.value, name_of(proxy.node.target)
        while node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        listed = node.op == "placeholder" and not isinstance(value, (Mapping, str))
        return isinstance(value, Tensor) or name in _COUNTED or listed

    def _learned(self, node: fx.Node) -> bool:
        """Whether a node that needs no input comes from parameters, not from flags in buffers."""
        if node.op == "get_attr":
            return node.target in dict(self.root.named_parameters())
        return node.op == "call_module" or any(map(self._learned, node.all_input_nodes))

    # ---------------------------------------------------------------- notes
    def _ask(self, proxy: ExampleProxy) -> None:
        self.asked.add(proxy.node)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_tracing_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            note = f"forward branches on {proxy.about} at {file}:{line}; traced for inputs of shape"
            note = f"{note} {self.shapes}"
            if not linecache.getline(file, line).lstrip().startswith("assert"):
                self._fresh.append((proxy.node, note))

    def take_back(self, nodes: set[fx.Node]) -> None:
        """Forget what was asked about these nodes since the last call.

        torch's own argument parser looks at numbers before it hands a call over to be recorded.
        """
        self._fresh = [(node, note) for node, note in self._fresh if node not in nodes]

    def _keep(self) -> None:
        self._notes.update(dict.fromkeys(note for _, note in self._fresh))
        self._fresh = []
