"""Symbolic: a tracer that knows no values, as in `torch.fx`; `by_example` has one that does."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from zipfx.model.calls.arguments import Argument, call

#: modules of torch that are made of others, and of nothing else
OPENED: tuple[type[nn.Module], ...] = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_TRACING = (
    "torch/fx/",
    "torch/nn/modules/module.py",
    "zipfx/trace/",
)


def is_tracing_code(filename: str) -> bool:
    """Whether a source file belongs to the tracing itself, not to the model."""
    return any(part in filename.replace("\\", "/") for part in _TRACING)


@contextmanager
def refusing_autocast(runs: Callable[[], bool]) -> Iterator[None]:
    """While forward is traced: an autocast in it would be no part of the graph.

    runs: whether operations are carried out at the moment, and not recorded.
    """
    enter: Any = torch.autocast.__enter__

    def refuse(self: Any) -> Any:
        if self._enabled and not runs():
            raise TraceError(
                "forward enters torch.autocast, which a graph does not hold; leave autocast to who "
                "calls the model"
            )
        return enter(self)

    try:
        torch.autocast.__enter__ = refuse  # type: ignore[method-assign]
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def _notrace(kind: str) -> tuple[Any, ...]:
    """What timm says must not be traced through, if the caller uses timm."""
    registry = sys.modules.get("timm.models._features_fx")
    return tuple(getattr(registry, f"get_notrace_{kind}")()) if registry else ()


def is_marked(m: nn.Module) -> bool:
    """Whether timm says that a module must not be traced through, although it is made of others."""
    return isinstance(m, _notrace("modules")) and any(True for _ in m.children())


def _forwards(base: Any) -> Iterator[tuple[CodeType, str]]:
    """The code of forward, and the name, of all classes derived from one."""
    for cls in base.__subclasses__():
        forward = inspect.unwrap(cls.forward)
        if "forward" in vars(cls) and hasattr(forward, "__code__"):
            yield forward.__code__, cls.__name__
        yield from _forwards(cls)


class Tracer(fx.Tracer):
    """`torch.fx.Tracer` that keeps buffers as nodes instead of folding them into constants.

    arguments: of forward, one placeholder each (None: as fx has them); opened: whether torch's
    transformers are looked into, which are leaves to fx (so that layers in them can be cuts, and be
    refitted); marked: whether modules are looked into that hold others, and that timm marks as
    leaves since a plain `torch.fx.Tracer` can not trace them; functions: names of the
    `torch.autograd.Function`s whose forward was traced; their backward is not part of the graph.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        arguments: Sequence[Argument] | None = None,
        *,
        opened: bool = False,
        marked: bool = False,
    ) -> None:
        super().__init__(autowrap_functions=_notrace("functions"))
        self.arguments = arguments
        self._leaves = _notrace("modules")
        self.opened = OPENED if opened else ()
        self.marked = marked
        self._closed: nn.Module | None = None
        self.functions: dict[str, None] = {}
        self._forwards = dict(_forwards(torch.autograd.Function))

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As in fx; notes whether it is an autograd function that makes the node."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._forwards:
                self.functions[self._forwards[frame.f_code]] = None
            frame = frame.f_back
        return super().create_node(*args, **kwargs)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """As in fx, which has one placeholder for all of `*args`, and for all of `**kwargs`."""
        if self.arguments is None or not is_module or concrete_args is not None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        arguments = self.arguments
        proxies = [
            self.create_proxy("placeholder", a.name, a.default, {}, type_expr=a.annotation)
            for a in arguments
        ]

        def function(root: nn.Module, *values: Any) -> Any:
            return call(functools.partial(root_fn, root), values, arguments)

        return function, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in self.opened and m is not self._closed:
            return False
        if self.marked and is_marked(m):
            return False
        known = isinstance(m, (*self._leaves, torch.jit.ScriptModule))
        if isinstance(m, nn.MultiheadAttention):  # also one that was only given another name
            known |= type(m).forward is nn.MultiheadAttention.forward
        return known or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As in fx; a transformer that is given a mask stays closed, since what it makes of padding
        depends on more than a graph knows."""
        if type(m) in self.opened:
            given = inspect.signature(m.forward).bind(*args, **kwargs).arguments.items()
            asked = [v for name, v in given if "mask" in name or "causal" in name]
            if any(v is not None and v is not False for v in asked):
                self._closed = m
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        """As in fx, which makes every kind of dict a plain one."""
        if not isinstance(a, OrderedDict):
            return super().create_arg(a)
        items = super().create_arg(dict(a))
        if dataclasses.is_dataclass(a):  # such as the outputs of transformers
            return self.create_node("call_function", type(a), (), items)
        return self.create_node("call_function", OrderedDict, (items,), {})
