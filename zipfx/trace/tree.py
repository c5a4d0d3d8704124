"""Tree: the modules, parameters and buffers of a merge, under all of the names that a model has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.model.graph_module import (
    EXTRA,
    Kept,
    attribute,
    extra_state,
    has_extra_state,
    module_at,
    plain,
)
from zipfx.model.memory import is_dense, partners, span
from zipfx.model.tensors import named_tensors
from zipfx.trace.nodes import tensors_at

ValueOf = Callable[[str, Tensor], Tensor]  # the value to store for a tensor of that name


class Tree:
    """Collects modules, parameters and buffers of a source model under the same names.

    value_of(name, tensor) gives the tensor to store for a qualified name of the source; tensors
    that the source ties stay tied.
    """

    def __init__(
        self,
        source: nn.Module,
        value_of: ValueOf,
        root: nn.Module | None = None,
    ) -> None:
        self.source, self.value_of = source, value_of
        self.root = _container(source) if root is None else root
        self._made: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}  # by id of the source's
        self._copied: set[int] = set()  # ids of those that are the source's own kind, in whole
        # tensors that share elements with others of the source, and what was made of them
        named = named_tensors(source)
        self._shared = {id(named[name]) for family in partners(named) for name in family}
        self._partners: list[tuple[Tensor, Tensor]] = []

    def _parent(self, path: str) -> nn.Module:
        """The container at `path`, made along the way with the container type of the source."""
        here, there = self.root, self.source
        for part in path.split(".") if path else []:
            there = there._modules[part]  # type: ignore[assignment]
            if part not in here._modules:
                if id(there) not in self._modules:
                    self._modules[id(there)] = _container(there)
                here._modules[part] = self._modules[id(there)]
            here = here._modules[part]  # type: ignore[assignment]
        return here

    def module(self, path: str) -> None:
        """Make a place for the module at `path`, with nothing in it."""
        self._parent(path)

    def leaf(self, path: str) -> None:
        """Copy the module at `path`, with every tensor replaced by its new value."""
        parent, _, name = path.rpartition(".")
        holder = self._parent(parent)
        if name in holder._modules:
            return
        source = module_at(self.source, path)
        memo: dict[int, Any] = dict(self._modules)
        for prefix, module in source.named_modules():
            full = ".".join(p for p in (path, prefix) if p)
            for key, t in own_tensors(module).items():
                memo[id(t)] = self._new(f"{full}.{key}", t)
        holder._modules[name] = copy.deepcopy(source, memo)
        for module in source.modules():
            self._modules[id(module)] = memo[id(module)]
            self._copied.add(id(module))

    def tensor(self, path: str) -> None:
        """Copy the parameter or buffer (or constant) at `path`."""
        parent, _, name = path.rpartition(".")
        holder, t = self._parent(parent), attribute(self.source, path)
        if name in holder._parameters or name in holder._buffers:
            return
        if isinstance(t, nn.Parameter):
            new = self._new(path, t)
            assert isinstance(new, nn.Parameter)
            holder._parameters[name] = new
        elif isinstance(t, Tensor):
            owner = module_at(self.source, parent)
            lasting = name not in owner._non_persistent_buffers_set and name in owner._buffers
            _put_buffer(holder, name, self._new(path, t), lasting)
        else:
            setattr(holder, name, copy.deepcopy(t))

    def has(self, module: nn.Module) -> bool:
        """Whether there is something in the place of a module of the source."""
        return module is self.source or id(module) in self._modules

    def name_all(self, source: nn.Module, here: nn.Module) -> None:
        """Give what there is inside a module all of the names that it has in the source, in the
        order of the source: a layer, or a tensor, may have several."""
        for name, child in source._modules.items():
            if child is None or name in here._modules:
                continue
            if not self.has(child) and any(map(self.has, child.modules())):
                self._modules[id(child)] = _container(child)  # of what has another name
            if self.has(child):
                here._modules[name] = self._modules[id(child)]
        for name, p in source._parameters.items():
            if p is not None and name not in here._parameters and id(p) in self._made:
                here._parameters[name] = self._made[id(p)]  # type: ignore[assignment]
        for name, b in source._buffers.items():
            if b is not None and name not in here._buffers and id(b) in self._made:
                lasting = name not in source._non_persistent_buffers_set
                _put_buffer(here, name, self._made[id(b)], lasting)
        for kind in ("_modules", "_parameters", "_buffers"):
            ours = vars(here)[kind]
            names = [n for n in vars(source)[kind] if n in ours]
            names += [n for n in ours if n not in names]
            ours.update({name: ours.pop(name) for name in names})
        for name, child in source._modules.items():
            inner = here._modules.get(name)
            if child is not None and inner is not None and id(child) not in self._copied:
                self.name_all(child, inner)

    def _new(self, path: str, t: Tensor) -> Tensor:
        if id(t) not in self._made:
            value = self.value_of(path, t).to(t.device)
            value = value.clone() if value.data_ptr() == t.data_ptr() else value
            value = self._tied(t, value) if id(t) in self._shared else value
            self._made[id(t)] = (
                nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
            )
        return self._made[id(t)]

    def _tied(self, t: Tensor, value: Tensor) -> Tensor:
        """The value, on the memory of another tensor that has the same elements in the source."""
        if not is_dense(t):
            return value
        for other, new in self._partners:
            if span(t) == span(other):
                seen = new.as_strided(t.shape, t.stride())
                if torch.equal(seen, value):
                    return seen
        own = torch.empty_strided(t.shape, t.stride(), dtype=value.dtype, device=value.device)
        self._partners.append((t, own.copy_(value)))
        return own


def _put_buffer(holder: nn.Module, name: str, t: Tensor, lasting: bool) -> None:
    """As `register_buffer`, which knows names that it does not take."""
    holder._buffers[name] = t
    if not lasting:
        holder._non_persistent_buffers_set.add(name)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and other tensors that are attributes of a module itself."""
    entries = (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
    return {name: t for name, t in entries if isinstance(t, Tensor)}


class Sequential(nn.Sequential):
    """A container whose forward is none of torch.jit.script's business.

    The graph runs what is in it. What is in it need not run by itself: a container of a class that
    was traced has no forward, and behind a cut some of its modules are elsewhere.
    """

    @torch.jit.unused
    def forward(self, input: Any) -> Any:
        """As in `nn.Sequential`."""
        return super().forward(input)  # type: ignore[no-untyped-call]


class KeptModule(Kept, nn.Module):
    """A container with the extra state of a module whose class is gone."""


class KeptSequential(Kept, Sequential):
    """As `KeptModule`."""


class KeptList(Kept, nn.ModuleList):
    """As `KeptModule`."""


class KeptDict(Kept, nn.ModuleDict):
    """As `KeptModule`."""


_CONTAINERS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    nn.Sequential: (Sequential, KeptSequential),
    nn.ModuleList: (nn.ModuleList, KeptList),
    nn.ModuleDict: (nn.ModuleDict, KeptDict),
    nn.Module: (nn.Module, KeptModule),
}


def _container(source: nn.Module) -> nn.Module:
    """An empty module in the place of one that the graph runs, with what loading it goes by."""
    keeps = has_extra_state(source)
    made = next(of[keeps] for kind, of in _CONTAINERS.items() if isinstance(source, kind))()
    made.training = source.training
    if made._version != source._version:
        made._version = source._version
    if keeps:
        vars(made)[EXTRA] = extra_state(source)
    return made


def used_names(nodes: Sequence[fx.Node]) -> tuple[list[str], list[str]]:
    """Targets of the leaf modules and of the attributes that the nodes use."""
    leaves = dict.fromkeys(plain(str(n.target)) for n in nodes if n.op == "call_module")
    tensors = dict.fromkeys(plain(str(n.target)) for n in nodes if n.op == "get_attr")
    return list(leaves), list(tensors)


def plant(tree: Tree, nodes: Sequence[fx.Node]) -> None:
    """Bring all that the nodes use into the tree."""
    leaves, tensors = used_names(nodes)
    for path in leaves:
        tree.leaf(path)
    for path in tensors:
        tree.tensor(path)


def plant_unused(tree: Tree, source: fx.GraphModule, *, whole: bool = False) -> list[str]:
    """Bring in the parameters that no node uses (auxiliary heads, say), so that none is lost.

    whole: everything else that the state of the source has comes in, too: further places of tensors
    that are used, modules with nothing but extra state.

    Returns:
        The names of tensors that no node uses.
    """
    used = {id(t) for node in source.graph.nodes for t in tensors_at(source, node)}
    kept = []
    for path, module in source.named_modules():
        own = {
            k: t
            for k, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        }
        idle = [k for k, t in own.items() if id(t) not in used]
        more = whole and not tree.has(module)
        wanted = list(own) if more else idle
        standard = module.__module__.startswith("torch.nn") and not list(module.children())
        if path and wanted and len(wanted) == len(own) and standard:
            tree.leaf(path)
        else:
            for key in wanted:
                tree.tensor(f"{path}.{key}" if path else key)
        if more and has_extra_state(module):
            tree.module(path)
        kept += [f"{path}.{key}" if path else key for key in idle]
    tree.name_all(tree.source, tree.root)
    return kept
