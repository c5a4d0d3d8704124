"""Graph module: one in which the modules and tensors of a model keep any name that they have.

`torch.fx` uses some names of a graph module itself (`graph`, `code`, `meta`, ...), and so can not
have a module, parameter or buffer of such a name at its root. Here those are registered as all
others are, and the graph reads them by way of `OWN`, which leads to nothing but what is registered.
"""

from __future__ import annotations

import copy
import functools
import json
import keyword
from collections.abc import Mapping
from typing import Any

import torch.fx.graph_module
from torch import Tensor, fx, nn

from zipfx.errors import ZipError, first_line

#: in targets of nodes: the module itself, without the names that fx uses
OWN = "_zipfx_own"
#: attribute with the extra state of a module whose class is gone
EXTRA = "_zipfx_extra"
#: what a module has registered
TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
_KINDS = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}
#: the nodes whose target is the path of a module, or of a tensor
NAMED = ("call_module", "get_attr")


class Names(nn.Module):
    """A module that has nothing of its own but what is registered."""

    @property
    def _zipfx_own(self) -> nn.Module:
        return self


class Kept:
    """The extra state of a module, kept for who loads it; the code that it belongs to is gone."""

    def get_extra_state(self) -> Any:
        return vars(self)[EXTRA]

    def set_extra_state(self, state: Any) -> None:
        vars(self)[EXTRA] = state


def has_extra_state(module: nn.Module) -> bool:
    """Whether the class of a module says that there is more to its state than tensors.

    >>> has_extra_state(nn.Linear(2, 2))
    False
    """
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_state(module: nn.Module) -> Any:
    """A copy of what a module has besides tensors.

    Raises:
        ZipError: its code for that fails.
    """
    try:
        return copy.deepcopy(module.get_extra_state())
    except Exception as error:
        raise ZipError(
            f"get_extra_state of a {type(module).__name__} fails, or gives what can not be copied: "
            f"{first_line(error)}"
        ) from error


class GraphModule(fx.GraphModule):
    """A graph module with the tree of `root`, whose names may be any, and a graph that reads it.

    The dicts of names are its own, what is in them is not copied. Targets of nodes that begin with
    a name that fx uses get `OWN` before them (`plain` is the way back).
    """

    # which torch.jit would compile
    __jit_unused_properties__ = ["graph", "_boxed_call", OWN]  # noqa: RUF012

    def __init__(self, root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> None:
        super().__init__(nn.Module(), fx.Graph(), name)  # which sets attributes by their names
        found = {node.target for node in graph.nodes if node.op == "get_attr"}
        for kind in TREE:
            self.__dict__[kind] = copy.copy(root.__dict__[kind])
        for target in sorted(t for t in found if isinstance(t, str) and "." not in t):
            if not any(target in self.__dict__[kind] for kind in _KINDS):
                value = getattr(root, target)
                home = self._buffers if isinstance(value, Tensor) else self.__dict__
                home[target] = value
        self.training = root.training
        if root._version != self._version:
            self._version = root._version
        if has_extra_state(root):
            self._keep(extra_state(root))
        for node in graph.nodes:
            if node.op in NAMED:
                node.target = reached(str(node.target))
            if node.name == "self":  # in the code it would hide the module
                node._rename("own")
        self.graph = graph
        if graph._tracer_cls is not None and "<locals>" not in graph._tracer_cls.__qualname__:
            self._tracer_cls = graph._tracer_cls
        self._tracer_extras = graph._tracer_extras or {}

    @property
    def _zipfx_own(self) -> nn.Module:
        view = Names()
        view.__dict__.update({kind: self.__dict__[kind] for kind in TREE})
        return view

    def _keep(self, state: Any) -> None:
        self.__dict__[EXTRA] = state
        cls: Any = type(self)  # each graph module has a class of its own
        cls.get_extra_state, cls.set_extra_state = Kept.get_extra_state, Kept.set_extra_state

    def __setattr__(self, name: str, value: Any) -> None:
        """As in torch; a name that fx uses and that is registered, too, means what the value is."""
        own = self.__dict__
        if name in own or hasattr(type(self), name):
            for kind, cls in _KINDS.items():
                if isinstance(value, cls) and name in own.get(kind, ()):
                    own[kind][name] = value
                    return
            if not isinstance(value, (nn.Module, Tensor)):
                object.__setattr__(self, name, value)
                return
        super().__setattr__(name, value)

    def get_submodule(self, target: str) -> nn.Module:
        return self._zipfx_own.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        return self._zipfx_own.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        return self._zipfx_own.get_buffer(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _settle(twin, type(self).__name__)
        return twin

    def __copy__(self) -> GraphModule:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.__dict__.update({kind: copy.copy(self.__dict__[kind]) for kind in TREE})
        twin.__dict__["_graph"] = copy.deepcopy(self.graph)
        _settle(twin, type(self).__name__)
        return twin

    def __reduce__(self) -> Any:
        _, (state, imports) = super().__reduce__()
        return _restored, (state, imports, type(self).__name__)


def _settle(twin: GraphModule, name: str) -> None:
    """Make a new graph module of what has come into it."""
    type(twin).__name__ = name
    twin.graph.owning_module = twin
    twin.recompile()
    if EXTRA in twin.__dict__:
        twin._keep(twin.__dict__[EXTRA])


def _restored(state: dict[str, Any], imports: str, name: str) -> GraphModule:
    """A graph module from its pickle, which has the code and not the graph.

    As in fx, where it is no longer known what is put into the place of what.
    """
    known = vars(nn.Module())
    root = type("Root", (Names,), {})()
    root.__dict__.update({k: v for k, v in state.items() if k in known or k not in _taken()})
    source = imports + state["_code"]
    type(root).forward = torch.fx.graph_module._forward_from_src(source, {})
    base: Any = state.get("_tracer_cls") or fx.Tracer
    keeps = type("Keeps", (base,), {"is_leaf_module": lambda *_: True})
    graph: fx.Graph = keeps().trace(root, **state.get("_tracer_extras", {}))
    graph._tracer_cls = base
    module = GraphModule(root, graph, name)
    module.__dict__.update({k: v for k, v in state.items() if k not in module.__dict__})
    module.__dict__["meta"] = state["meta"]
    if EXTRA in state:
        module._keep(state[EXTRA])
    return module


@functools.cache
def _taken() -> frozenset[str]:
    """The names that a graph module can not have at its root."""
    set_later = {"_in_spec", "_out_spec", EXTRA}
    return frozenset({*dir(GraphModule(nn.Module(), fx.Graph())), *set_later})


def plain(target: str) -> str:
    """The name of what a node reads.

    >>> plain("_zipfx_own.meta.0"), plain("layer.meta")
    ('meta.0', 'layer.meta')
    """
    return target.removeprefix(f"{OWN}.")


class _Atom(str):
    """A part of a target that fx must not write into code as it is."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return False

    def __format__(self, form: str) -> str:
        """In double quotes, as fx writes it."""
        return json.dumps(str(self))[1:-1]


class _Target(str):
    """A target with parts that Python has another meaning for, such as `class`."""

    __slots__ = ()

    def split(self, *args: Any) -> list[str]:
        return [_Atom(part) if _is_odd(part) else part for part in super().split(*args)]


def _is_odd(part: str) -> bool:
    return keyword.iskeyword(part) or not part.isidentifier()


def reached(name: str) -> str:
    """What a node has as its target to read what has this name."""
    taken = name.partition(".")[0] in _taken() and not name.startswith(f"{OWN}.")
    name = f"{OWN}.{name}" if taken else str(name)
    odd = any(_is_odd(part) and not part.isdecimal() for part in name.split("."))
    return _Target(name) if odd else name


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module that is registered at a dotted path, whatever else has its name.

    >>> module_at(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    for part in path.split(".") if path else ():
        root = root._modules[part]  # type: ignore[assignment]
    return root


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path; what is registered comes first."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    for kind in _KINDS:
        if name in vars(owner).get(kind, ()):
            return vars(owner)[kind][name]
    return getattr(owner, name)


def tree_of(parts: Mapping[str, Any]) -> nn.Module:
    """A module with these parts at dotted paths.

    >>> tree_of({"meta.0": nn.ReLU()}).get_submodule("meta")
    Module(
      (0): ReLU()
    )
    """
    root = nn.Module()
    for path in sorted(parts, key=lambda path: path.count(".")):
        *above, name = path.split(".")
        here, value = root, parts[path]
        for part in above:
            here = here._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        kinds = [vars(here)[kind] for kind, cls in _KINDS.items() if isinstance(value, cls)]
        if not hasattr(here, name):  # as inside of a module that is a part as a whole
            (*kinds, vars(here))[0][name] = value
    return root


def check_names(module: nn.Module, graph: fx.Graph) -> None:
    """Check that a graph can get at all that it reads of a module.

    Raises:
        ZipError: something that it reads has the name of what every module has.
    """
    lost = [name for kind in _KINDS for name in vars(module)[kind] if name in (OWN, EXTRA)]
    for name in lost:
        raise ZipError(f"the model has something named {name!r}, which zipfx uses: rename it")
    hidden = hidden_names(module)
    for target in {plain(str(node.target)) for node in graph.nodes if node.op in NAMED}:
        for name in hidden:
            if f"{target}.".startswith(f"{name}."):
                raise ZipError(f"forward uses {name!r}, {HIDDEN}")


#: of a name
HIDDEN = "which is also the name of something that every torch.nn.Module has: rename it"


def hidden_names(model: nn.Module) -> list[str]:
    """What is registered in a model and can not be read by its name, since each module has
    something of that name."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, torch.jit.ScriptModule)  # which has other things in their place
        for kind in _KINDS
        for name in vars(module).get(kind, ())
        if hasattr(nn.Module, name)
    ]
