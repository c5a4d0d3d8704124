"""Callables: what one computes, as a digest that tells it from others of the same name.

Of a function: its bytecode, constants, defaults, what it keeps from where it was defined, and the
constants and functions among the globals that it reads; of an object also its class and its fields.
What comes with Python, or with torch, is known by its name.  The same source gives the same digest
in every process; another version of Python compiles it to something else, so that `dialect` belongs
to a digest.  Scripts have a graph and attributes in place of code.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


_LONGEST = 200  # a report has a line for it


def without_addresses(text: str) -> str:
    """A text such as `repr` gives, with nothing in it that another process would not say.

    >>> without_addresses("<function f at 0x7f12ab34>")
    '<function f>'
    """
    return _ADDRESS.sub("", text)


def name_of_callable(value: Any) -> str:
    """What to call a function, or anything else that can be called, in a report.

    Functions, classes and methods have their qualified names; a `functools.partial` names its
    arguments too; other objects are what `repr` says, where that is more than an address.

    >>> name_of_callable(functools.partial(round, ndigits=2))
    'partial(builtins.round, ndigits=2)'
    >>> name_of_callable(re.compile("a").match), name_of_callable(lambda x: x)
    ("re.compile('a').match", 'zipfx.model.callables.<lambda>')
    """
    if isinstance(value, functools.partial):
        named = sorted(value.keywords.items())
        given = [*map(_named, value.args), *(f"{key}={_named(v)}" for key, v in named)]
        return f"partial({', '.join([name_of_callable(value.func), *given])})"
    owner, name = getattr(value, "__self__", None), getattr(value, "__name__", None)
    qualified = getattr(value, "__qualname__", None)
    bound = owner is not None and not isinstance(owner, type(functools)) and isinstance(name, str)
    if bound:  # a method of an object, or of a class
        return f"{name_of_callable(owner)}.{name}"
    if isinstance(qualified, str):
        module = getattr(value, "__module__", None)
        return f"{module}.{qualified}" if isinstance(module, str) else qualified
    return _shown(value)


def _named(value: Any) -> str:
    """An argument: by name if it is a function, else as it is written."""
    return name_of_callable(value) if callable(value) else _shown(value)


def _shown(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    try:
        text = repr(value)
    except Exception:  # of somebody else's making
        return kind
    if text == object.__repr__(value):
        return kind
    text = without_addresses(" ".join(text.split()))
    if callable(value) and type(value).__name__ not in text:
        text = f"{kind}: {text}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


Text = Callable[[Any], str]
_KNOWN = {"torch", "torchvision", "torchaudio", "numpy", "zipfx"} | set(sys.stdlib_module_names)
_DEPTH = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_SCRIPTS = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
#: where a script was written, and what tells classes of one name apart within one process
_NOISE = re.compile(r"#[^\n]*|\.?___torch_mangle_\d+| at 0x[0-9a-f]+|\btraining = \w+")
#: of a class: what it is called and where it lies, not what it does
_IDLE = {"__init__", "__new__", "__repr__", "extra_repr", "__init_subclass__"}


def dialect(value: Any) -> str:
    """In what a digest is written: another Python, or another torch, would write it otherwise."""
    if isinstance(value, _SCRIPTS):
        return f"torch {torch.__version__.partition('+')[0]}"
    optimized = f" -O{sys.flags.optimize}" * bool(sys.flags.optimize)
    return f"{sys.implementation.cache_tag}{optimized}"


def program(value: Any, text: Text) -> str | None:
    """The digest of all that a value can run (None: nothing that its name does not say).

    text: describes other values.

    >>> times = eval("lambda k: lambda x: k * x", {"__name__": "a module of the caller's"})
    >>> program(times(2), repr) == program(times(2), repr) != program(times(3), repr)
    True
    >>> program(torch.relu, repr), program(3, repr)
    (None, None)
    """
    found = list(_Reader(text).read(value))
    if not found:
        return None
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()


class _Reader:
    """Goes through all that a value can run, once."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.seen: dict[int, Any] = {}  # kept, so that no other one gets its id

    def read(self, value: Any, depth: int = _DEPTH) -> Iterator[str]:
        """Lines about a value; none if there is nothing to run in it."""
        if isinstance(value, (*_PLAIN, Tensor)) or not depth or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        inner = functools.partial(self.read, depth=depth - 1)
        if isinstance(value, _SCRIPTS):
            yield from _of_script(value, self.text)
        elif isinstance(value, fx.GraphModule):
            yield value.code
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value, depth)
        elif isinstance(value, types.MethodType):
            yield from inner(value.__func__)
            if not isinstance(value.__self__, nn.Module):  # whose settings are compared anyway
                yield from inner(value.__self__)
        elif isinstance(value, functools.partial):
            yield from inner(value.func)
            yield from inner([*value.args, value.keywords])
        elif isinstance(value, type):
            yield from self._of_class(value, depth)
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from inner(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from inner(item)
        elif not isinstance(value, types.ModuleType):
            yield from self._of_object(value, depth)

    def _of_object(self, value: Any, depth: int) -> Iterator[str]:
        wrapped = getattr(value, "__wrapped__", None)  # functools.cache and the like
        if wrapped is not None:
            yield from self.read(wrapped, depth - 1)
        if callable(value):
            yield from self._of_class(type(value), depth)
        fields = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
        if not _is_known(type(value)):
            yield from self.read(dict(fields), depth - 1)

    def _of_class(self, cls: type, depth: int) -> Iterator[str]:
        for base in cls.__mro__:
            if _is_known(base) or (base is not cls and id(base) in self.seen):
                continue
            self.seen[id(base)] = base
            for name, value in sorted(vars(base).items()):
                if name in _IDLE or (name.startswith("__") and name != "__call__"):
                    continue
                parts = [getattr(value, part, None) for part in ("__func__", "fget", "func")]
                found = next((part for part in parts if part is not None), value)
                if isinstance(found, _PLAIN):
                    yield f"{name} = {found!r}"
                else:
                    yield f"{name}:"
                    yield from self.read(found, depth - 1)

    def _of_function(self, function: types.FunctionType, depth: int) -> Iterator[str]:
        if _is_known(function):
            return
        yield from _of_code(function.__code__)
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not filled yet
                held.append(None)
        for value in held:
            yield from self._held(value, depth)
        for name in sorted(_globals_read(function.__code__)):
            if name in function.__globals__:
                value = function.__globals__[name]
                if _is_constant(value) or isinstance(value, (types.FunctionType, *_SCRIPTS)):
                    yield f"{name}:"
                    yield from self._held(value, depth)

    def _held(self, value: Any, depth: int) -> Iterator[str]:
        """What a function has kept: by what it is, and by what it can run."""
        if isinstance(value, type) or id(value) in self.seen:  # such as that of `super()`
            yield getattr(value, "__qualname__", "again")
            return
        yield self.text(value)
        yield from self.read(value, depth - 1)


def _is_known(value: Any) -> bool:
    """Whether something is part of Python or of torch."""
    return str(getattr(value, "__module__", None) or "builtins").split(".")[0] in _KNOWN


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN)


def _of_code(code: types.CodeType) -> Iterator[str]:
    """Without names of files and lines, which say where the source was."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    table = getattr(code, "co_exceptiontable", b"")
    yield f"{counts} {code.co_flags} {code.co_code.hex()} {table.hex()} {code.co_names}"
    yield from map(_of_constant, code.co_consts)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _of_code(inner)


def _of_constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return "code"
    if isinstance(value, frozenset):  # which has no order
        return f"frozenset {sorted(map(_of_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_of_constant, value))})"
    return repr(value)


def _globals_read(code: types.CodeType) -> set[str]:
    """The globals that a function reads, but for those that it also writes, and of Python."""
    read, written = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(str(step.argval))
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(str(step.argval))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            read |= _globals_read(inner)
    return {name for name in read - written if not name.startswith("__")}


def _of_script(script: Any, text: Text) -> Iterator[str]:
    """The graphs of a script, with all that they call, and the values that it holds."""
    if isinstance(script, torch.jit.ScriptModule):
        whole: Any = script._c
        graphs = [whole._get_method(name).inlined_graph for name in sorted(whole._method_names())]
        yield _NOISE.sub("", whole.dump_to_str(False, True, False))
    else:
        graphs = [script.inlined_graph]
    for graph in graphs:
        yield _NOISE.sub("", str(graph))
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                yield text(node.t("value"))
