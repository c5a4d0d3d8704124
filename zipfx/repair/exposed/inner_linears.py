"""Inner linears: linear layers inside functions that stay one node of the graph.

A function that the tracer does not look into, such as the windowed attention of torchvision's Swin,
is given weights and hands them on to `F.linear`. To stop at such a layer the function runs up to
that call and no further; to go on, it runs with the outputs of the layers before as those calls'
results. It is not looked into, so it may do with them whatever it likes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zipfx.model.graph_module import attribute
from zipfx.model.running import Noting
from zipfx.model.tensors import clone_tensors, close, leaves

#: names of the arguments of a function that are the weight and the bias of a layer; None: it has
#: none, or one that is no parameter as it is, and that the function adds as before
Inner = tuple[str, str | None]


class _Reached(BaseException):
    """A function has come to the layer at which it is to stop; its own `except` shall not mind."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class _Linears(TorchFunctionMode):
    """Answers the calls of F.linear with weights of one's own; `meet` is told the number of the
    weight, its input and the bias, and returns the output, or None to compute it. elsewhere: the
    numbers of weights that other calls made something of."""

    def __init__(
        self,
        own: Sequence[Tensor],
        meet: Callable[[int, Tensor, Tensor | None], Tensor | None],
    ) -> None:
        super().__init__()
        self.own, self.meet = own, meet
        self.elsewhere: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            given = {**dict(zip(("input", "weight", "bias"), args)), **kwargs}
            for i, weight in enumerate(self.own):
                if given["weight"] is weight:
                    result = self.meet(i, given["input"], given.get("bias"))
                    if result is not None:
                        return result
        result = func(*args, **kwargs)
        if any(isinstance(t, Tensor) for t in tree_leaves(result)):
            read = {id(t) for t in tree_leaves((args, kwargs))}
            self.elsewhere |= {i for i, t in enumerate(self.own) if id(t) in read}
        return result


class Piece(nn.Module):
    """A function up to its next layer, or to its end.

    forward takes the outputs of the layers that came before, in the order of their calls, and the
    function's other arguments by name.

    Args:
        function: to run.
        inner: all its layers, in the order in which it calls them.
        tensors: their weights and biases, by argument. They are kept out of the module's own.
        stops: whether it ends at the next layer, with what that reads; else with the result.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inner: Sequence[Inner],
        tensors: Mapping[str, Tensor],
        *,
        stops: bool,
    ) -> None:
        super().__init__()
        self.function, self.tensors, self.stops = function, dict(tensors), stops
        self.own = [tensors[w] for w, _ in inner]
        self.biased = [b is not None for _, b in inner]

    def forward(self, *made: Tensor, **arguments: Any) -> Any:
        met: set[int] = set()

        def meet(i: int, x: Tensor, bias: Tensor | None) -> Tensor | None:
            if i < len(made):
                if i in met:
                    raise self._astray()
                met.add(i)
                y = made[i].clone()  # the function may write to it
                return y if bias is None or self.biased[i] else y + bias
            if self.stops and i == len(made):
                raise _Reached(x)
            return None

        if self.stops:  # what it writes to its arguments it shall write once
            arguments = clone_tensors(arguments)
        try:
            with _Linears(self.own, meet):
                result = self.function(**arguments, **self.tensors)
        except _Reached as reached:
            return reached.x
        if self.stops:
            raise self._astray()
        return result

    def _astray(self) -> RuntimeError:
        return RuntimeError(
            f"{self.function.__name__} does not call F.linear here as on example_inputs; pass "
            "example_inputs that take the same way through it as the calibration data"
        )


def arguments_of(node: fx.Node) -> dict[str, Any] | None:
    """Of a call of a Python function, by name; None: it has none, or they are not known."""
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return None
    try:
        signature = inspect.signature(node.target)
        bound = signature.bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    return dict(bound.arguments) if kinds <= set(by_name) else None


def _parameters(module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are parameters of the module, and their paths."""
    nodes = {n: a for n, a in arguments.items() if isinstance(a, fx.Node) and a.op == "get_attr"}
    return {
        name: str(node.target)
        for name, node in nodes.items()
        if isinstance(attribute(module, str(node.target)), nn.Parameter)
    }


class _Listening(Noting):
    """Notes the layers inside functions, in the order of their calls."""

    def run_node(self, n: fx.Node) -> Any:
        arguments = arguments_of(n)
        own = {} if arguments is None else _parameters(self.module, arguments)
        if not own:
            return super().run_node(n)
        assert arguments is not None
        tensors = {name: self.env[arguments[name]] for name in own}
        values = map_arg(arguments, self.env.__getitem__)
        given = {**clone_tensors(dict(values)), **tensors}  # it may write to the others
        names = list(tensors)
        heard: list[Inner] = []

        def meet(i: int, x: Tensor, bias: Tensor | None) -> Tensor:
            weight = tensors[names[i]]
            whole = bias is not None and bias.shape == weight.shape[:1]
            same = [name for name, t in tensors.items() if whole and t is bias]
            heard.append((names[i], same[0] if same else None))
            return F.linear(x, weight, bias)

        with _Linears(list(tensors.values()), meet) as listening:
            result = super().run_node(n)
        calls = [name for pair in heard for name in pair if name is not None]
        free = {None, *names} - {names[i] for i in listening.elsewhere}
        inner = [
            (weight, bias)
            for weight, bias in heard
            if max(calls.count(weight), calls.count(bias or "")) == 1
            and {weight, bias} <= free
            and tensors[weight].ndim == 2
        ]
        if inner and _faithful(n.target, inner, given, result):
            self.found[n.name] = inner
        return result


def _faithful(
    function: Any, inner: Sequence[Inner], arguments: Mapping[str, Any], expected: Any
) -> bool:
    """Whether pieces do together what a function does, such as not if it draws random numbers."""
    names = {name for pair in inner for name in pair}
    tensors = {name: t for name, t in arguments.items() if name in names}
    others = {name: value for name, value in arguments.items() if name not in names}
    before, after = (Piece(function, inner, tensors, stops=stops) for stops in (True, False))
    made: list[Tensor] = []
    try:
        for weight, bias in inner:
            x = before(*made, **others)
            made.append(F.linear(x, tensors[weight], None if bias is None else tensors[bias]))
        found = leaves(after(*made, **others))
        pairs = list(zip(leaves(expected), found, strict=True))
        return all(close(a, b) for a, b in pairs if isinstance(a, Tensor))
    except Exception:  # in many ways: it takes no names, uses vmap or autocast
        return False


def inner_layers(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, list[Inner]]:
    """By name of a node: the linear layers inside the function that it calls, each called once.

    >>> import torch
    >>> def mixed(x, weight, bias):
    ...     return F.linear(x.flip(-1), weight, bias) + x
    >>> graph = fx.Graph()
    >>> nodes = [graph.placeholder("x"), graph.get_attr("weight"), graph.get_attr("bias")]
    >>> _ = graph.output(graph.call_function(mixed, tuple(nodes)))
    >>> net = fx.GraphModule(nn.Linear(3, 3), graph)
    >>> inner_layers(net, [torch.ones(2, 3)])
    {'mixed': [('weight', 'bias')]}
    """
    if not any(
        _parameters(module, arguments)
        for node in module.graph.nodes
        if (arguments := arguments_of(node)) is not None
    ):
        return {}
    return _Listening(module).noted(inputs)
