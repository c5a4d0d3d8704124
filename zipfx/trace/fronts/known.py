"""Known: what is known of nodes on example inputs, and what Python asks about it.

`Evaluation` computes a node when it is recorded. `Questions` holds the nodes whose values Python
needed to go on: where they depend on the inputs, each leaves a note.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.trace.fronts.symbolic import is_tracing_code
from zipfx.trace.nodes import name_of

#: values that leave for Python where torch can not see it
_ESCAPES = ("tolist", "numpy")
#: results with as many items as their input has rows or pieces
_COUNTED = ("split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit")
_SHAPE = "a shape"


@dataclass(frozen=True)
class Known:
    """What is known of a node.

    value: as the model would see it; given: whether it comes from the inputs at all, not from
    parameters alone; free: whether the number, or the shape, is decided by the data of a tensor;
    about: what a branch on it is a branch on.
    """

    value: Any
    given: bool
    free: bool
    about: str


class NodeCall(NamedTuple):
    """What a node does, with values where the node has other nodes."""

    kind: str
    target: Any
    args: Any
    kwargs: Any


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


class Evaluation:
    """Computes nodes on example inputs, in the order in which they are recorded.

    shapes: those of the inputs; shapes_only: whether nothing is computed but shapes, since there
    are inputs on the "meta" device; runs: whether a node is computed at the moment.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        self.shapes = [tuple(t.shape) for t in tensors]
        self.shapes_only = any(t.is_meta for t in tensors)
        self.runs = False
        self._left = list(inputs)  # one for each placeholder to come

    def known(self, root: nn.Module, call: NodeCall, used: Sequence[Known]) -> Known:
        """Carry out a call; used: what is known of the nodes that it reads."""
        watch = _Watch()
        self.runs = True
        try:
            with torch.no_grad(), watch, self._device():
                value = self._run(root, call)
        finally:
            self.runs = False
        given = call.kind == "placeholder" or any(known.given for known in used)
        number = not any(isinstance(t, Tensor) for t in tree_leaves(value))
        escapes = watch.number or name_of(call.target) in _ESCAPES
        free = watch.shape or (number and escapes) or any(known.free for known in used)
        return Known(value, given, free, _about(call, number, given, used))

    def _device(self) -> AbstractContextManager[Any]:
        """Where tensors are made that are made of numbers."""
        return torch.device("meta") if self.shapes_only else nullcontext()

    def _run(self, root: nn.Module, call: NodeCall) -> Any:
        kind, target, args, kwargs = call
        if kind == "placeholder":
            return self._left.pop(0) if self._left else args[0]
        if kind == "get_attr":
            return operator.attrgetter(target)(root)
        if kind == "call_module":
            return root.get_submodule(target)(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


def _about(call: NodeCall, number: bool, given: bool, used: Sequence[Known]) -> str:
    """What a branch on the result is a branch on; number: whether there is no tensor in it."""
    if number and call.kind == "placeholder":
        return f"argument {call.target!r}"
    if number and call.target is getattr and call.args[1] in ("dtype", "device"):
        return f"a {call.args[1]}"
    if number and given:
        return next((k.about for k in used if k.given and k.about != _SHAPE), _SHAPE)
    return _SHAPE if given else "the state of the model"


class Questions:
    """What Python asked about nodes while forward was traced.

    shapes: those of the inputs; asked: the nodes; notes: where forward went by a size, and by
    which.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = list(shapes)
        self.asked: set[fx.Node] = set()
        self._notes: dict[str, None] = {}
        self._fresh: list[tuple[fx.Node, str]] = []  # those that may be taken back

    @property
    def notes(self) -> list[str]:
        self.keep()
        return list(self._notes)

    def note(self, text: str) -> None:
        self._notes[text] = None

    def value(self, node: fx.Node, known: Known, root: nn.Module) -> Any:
        """The value of a node, which Python needs; it may depend on shapes, not on data."""
        data = known.free or isinstance(known.value, Tensor)
        if data and (known.given or _learned(node, root)):
            raise TraceError(
                f"Python needs the value of node {node.name!r}, which depends on the data "
                "of a tensor: it is another one for every input, or for every model"
            )
        if data or known.given:
            self._ask(node, known.about)
        return known.value

    def length(self, node: fx.Node, known: Known) -> Any:
        """The value of a node of which Python needs only the length."""
        if known.free and known.given:
            raise TraceError(
                f"Python needs the length of node {node.name!r}, which depends on the data "
                "of a tensor: it is another one for every input"
            )
        if known.given and _counted(node, known.value):
            self._ask(node, known.about)
        return known.value

    def _ask(self, node: fx.Node, about: str) -> None:
        """Note the line of forward that needs to know a node."""
        self.asked.add(node)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_tracing_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            note = f"forward branches on {about} at {file}:{line}; traced for inputs of shape"
            if not linecache.getline(file, line).lstrip().startswith("assert"):
                self._fresh.append((node, f"{note} {self.shapes}"))

    def take_back(self, nodes: set[fx.Node]) -> None:
        """Forget what was asked about these nodes since the last node was recorded.

        torch's own argument parser looks at numbers before it hands a call over to be recorded.
        """
        self._fresh = [(node, note) for node, note in self._fresh if node not in nodes]

    def keep(self) -> None:
        """Keep what was asked up to now: the next node is about to be recorded."""
        self._notes.update(dict.fromkeys(note for _, note in self._fresh))
        self._fresh = []


def _counted(node: fx.Node, value: Any) -> bool:
    """Whether another input may well have another number of items."""
    name = name_of(node.target)
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    listed = node.op == "placeholder" and not isinstance(value, (Mapping, str))
    return isinstance(value, Tensor) or name in _COUNTED or listed


def _learned(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node that needs no input comes from parameters, not from flags in buffers."""
    if node.op == "get_attr":
        return node.target in dict(root.named_parameters())
    return node.op == "call_module" or any(_learned(n, root) for n in node.all_input_nodes)
