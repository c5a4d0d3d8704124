"""Rewrite: build the merged GraphModule, with the model's own module tree and names.

The trunk keeps model 0's names (`merged.layer1[0].conv1`); what follows the cut lies in
`merged.task_heads[k]` under the names of model k.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.calls import EXPECTATIONS, Expectation
from zipfx.correspond import attribute, tensors_at
from zipfx.errors import ZipError
from zipfx.heads import HeadPlan
from zipfx.memory import is_dense, partners, span
from zipfx.modes import own_modes
from zipfx.spaces import mix, select
from zipfx.tensors import clone_tensors, named_tensors

HEADS = "task_heads"
HEAD_KEY = "zipfx_head"
SOURCE_KEY = "zipfx_source"  # name of the node that a node was copied from
BAKED = "baked"  # what parameters are called that take the place of computed weights
BAKED_KEY = "zipfx_baked"  # marks the nodes that read them
#: functions that a merge puts between trunk and head, and behind its inputs
INSERTED = (clone_tensors, torch.clone, torch.index_select, select, mix, *EXPECTATIONS)

Part = int | None  # of a merge: a head, by its number, or the trunk
ValueOf = Callable[[str, Tensor], Tensor]  # the value to store for a tensor of that name

_TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class MergedModule(fx.GraphModule):
    """A GraphModule whose module tree (containers, unused parameters) survives `copy.deepcopy`, and
    whose report survives `torch.save`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MergedModule:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, MergedModule)
        for name in _TREE:
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        for (_, old), (_, new) in zip(self.named_modules(), twin.named_modules(), strict=True):
            new.training = old.training
        type(twin).__name__ = type(self).__name__  # of a class that is this one's alone
        return twin

    def __reduce__(self) -> Any:
        return _restored, (*super().__reduce__(), self.meta)


def _restored(
    make: Callable[..., fx.GraphModule], args: Any, meta: dict[str, Any]
) -> fx.GraphModule:
    """A GraphModule as fx makes it from its pickle, which does not bring its meta along."""
    module = make(*args)
    module.meta.update(meta)
    return module


def build(root: nn.Module, graph: fx.Graph, name: str) -> MergedModule:
    """A GraphModule that owns exactly the tree of `root`."""
    for node in graph.nodes:  # annotations that were not evaluated mean nothing in other code
        node.type = None if isinstance(node.type, str) else node.type
    module = MergedModule(root, graph, name)
    for kind in _TREE:
        module.__dict__[kind] = root.__dict__[kind]
    module.training = root.training
    graph.lint()
    return module


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
        self.root = nn.Module() if root is None else root
        self._made: dict[int, Tensor] = {}
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
                here.add_module(part, _container(there))
            here = here._modules[part]  # type: ignore[assignment]
        return here

    def leaf(self, path: str) -> None:
        """Copy the module at `path`, with every tensor replaced by its new value."""
        parent, _, name = path.rpartition(".")
        holder = self._parent(parent)
        if name in holder._modules:
            return
        source = self.source.get_submodule(path)
        memo: dict[int, Any] = {}
        for prefix, module in source.named_modules():
            full = ".".join(p for p in (path, prefix) if p)
            for key, t in own_tensors(module).items():
                memo[id(t)] = self._new(f"{full}.{key}", t)
        holder.add_module(name, copy.deepcopy(source, memo))

    def tensor(self, path: str) -> None:
        """Copy the parameter or buffer (or constant) at `path`."""
        parent, _, name = path.rpartition(".")
        holder, t = self._parent(parent), attribute(self.source, path)
        if name in holder._parameters or name in holder._buffers:
            return
        if isinstance(t, nn.Parameter):
            new = self._new(path, t)
            assert isinstance(new, nn.Parameter)
            holder.register_parameter(name, new)
        elif isinstance(t, Tensor):
            owner = self.source.get_submodule(parent)
            lasting = name not in owner._non_persistent_buffers_set and name in owner._buffers
            holder.register_buffer(name, self._new(path, t), persistent=lasting)
        else:
            setattr(holder, name, copy.deepcopy(t))

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


def _container(source: nn.Module) -> nn.Module:
    kinds = {nn.Sequential: Sequential, nn.ModuleList: nn.ModuleList, nn.ModuleDict: nn.ModuleDict}
    made = next((make() for kind, make in kinds.items() if isinstance(source, kind)), nn.Module())
    made.training = source.training
    return made


def used_names(nodes: Sequence[fx.Node]) -> tuple[list[str], list[str]]:
    """Targets of the leaf modules and of the attributes that the nodes use."""
    leaves = dict.fromkeys(str(n.target) for n in nodes if n.op == "call_module")
    tensors = dict.fromkeys(str(n.target) for n in nodes if n.op == "get_attr")
    return list(leaves), list(tensors)


def plant(tree: Tree, nodes: Sequence[fx.Node]) -> None:
    """Bring all that the nodes use into the tree."""
    leaves, tensors = used_names(nodes)
    for path in leaves:
        tree.leaf(path)
    for path in tensors:
        tree.tensor(path)


def plant_unused(tree: Tree, source: fx.GraphModule) -> list[str]:
    """Bring in the parameters that no node uses (auxiliary heads, say), so that none is lost."""
    used = {id(t) for node in source.graph.nodes for t in tensors_at(source, node)}
    kept = []
    for path, module in source.named_modules():
        own = {
            k: t
            for k, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        }
        idle = [k for k, t in own.items() if id(t) not in used]
        standard = module.__module__.startswith("torch.nn") and not list(module.children())
        if path and idle and len(idle) == len(own) and standard:
            tree.leaf(path)
        else:
            for key in idle:
                tree.tensor(f"{path}.{key}" if path else key)
        kept += [f"{path}.{key}" if path else key for key in idle]
    return kept


def planted(
    modules: Mapping[int, fx.GraphModule],
    nodes: Mapping[Part, Sequence[fx.Node]],
    values: Mapping[Part, ValueOf],
) -> tuple[nn.Module, dict[int, list[str]]]:
    """The module tree of a merge, and what it keeps of each model though no node uses it.

    nodes: those of model 0 that are the trunk, and those of model k that are head k (a full zip has
    none); values: of the tensors of each part.
    """
    tree = Tree(modules[0], values[None])
    plant(tree, nodes[None])
    heads = [k for k in nodes if k is not None]
    if not heads:
        return tree.root, {0: plant_unused(tree, modules[0])}
    if HEADS in tree.root._modules:
        raise ZipError(
            f"the models have a module named {HEADS!r} before the cut, which is where zipfx puts "
            "the heads of a partial zip; rename it, or zip the heads of it one by one"
        )
    homes = nn.ModuleList()
    tree.root.add_module(HEADS, homes)
    unused = {}
    for k in heads:
        twig = Tree(modules[k], values[k], nn.Module())
        homes.add_module(str(k), twig.root)
        plant(twig, nodes[k])
        unused[k] = plant_unused(twig, modules[k])
    return tree.root, unused


def copy_trunk(
    graph: fx.Graph, nodes: Sequence[fx.Node], expects: Sequence[Expectation] = ()
) -> dict[fx.Node, fx.Node]:
    """Copy nodes with their names and targets; checks of what is expected of the inputs come behind
    these."""
    seen: dict[fx.Node, fx.Node] = {}
    left = list(expects)
    for node in nodes:
        if node.op != "placeholder":
            inputs = {str(n.target): copied for n, copied in seen.items() if n.op == "placeholder"}
            for e in left:
                graph.call_function(e.check, (inputs[e.name], *e.arguments))
            left = []
        seen[node] = graph.node_copy(node, seen.__getitem__)
        seen[node].meta.pop(HEAD_KEY, None)
        seen[node].meta[SOURCE_KEY] = node.name
    return seen


def copy_head(
    graph: fx.Graph,
    root: nn.Module,
    nodes: Sequence[fx.Node],
    trunk: Mapping[int, fx.Node],
    plan: HeadPlan,
    k: int,
) -> Any:
    """Copy the head of model k behind the trunk; return its output value.

    nodes: all nodes of model k; trunk: the copies of those up to the cut, by index.
    """
    at = {n: i for i, n in enumerate(nodes)}
    home = root.get_submodule(f"{HEADS}.{k}")
    made: dict[int, fx.Node] = {}
    restored: dict[int, fx.Node] = {}
    own = set(plan.nodes)

    def add(kind: str, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        node = graph.create_node(kind, target, args, {}, name=name)
        node.meta[HEAD_KEY] = k
        return node

    def value(j: int) -> fx.Node:
        if j in own or j in made:
            return made[j]
        if j in plan.cloned:
            how = torch.clone if plan.cloned[j] else clone_tensors
            made[j] = add("call_function", how, (trunk[j],), f"copy{k}_{nodes[j].name}")
            return made[j]
        return trunk[j]

    def source(j: int, i: int) -> fx.Node:
        j = plan.same.get(j, j)
        if (j, i) not in plan.edges or not plan.restored[j]:
            return value(j)
        if j not in restored:
            node = value(j)
            for unmerge in plan.restored[j]:
                name = f"unmerge_{len([n for n in home._buffers if n.startswith('unmerge_')])}"
                home.register_buffer(name, unmerge.by)
                by = add("get_attr", f"{HEADS}.{k}.{name}", (), f"head{k}_{name}")
                one = len(unmerge.dims) == 1 and unmerge.by.ndim == 1
                how = torch.index_select if one else select if unmerge.by.ndim == 1 else mix
                args = (node, unmerge.dims[0] if one else unmerge.dims, by)
                node = add("call_function", how, args, f"head{k}_features")
            restored[j] = node
        return restored[j]

    result: Any = None
    for i in plan.nodes:
        node = nodes[i]
        if node.op == "output":
            result = fx.node.map_arg(node.args[0], lambda n: source(at[n], i))  # noqa: B023
            continue
        own_path = node.op in ("call_module", "get_attr")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: source(at[n], i))  # noqa: B023
        made[i] = graph.create_node(
            node.op,
            f"{HEADS}.{k}.{node.target}" if own_path else node.target,
            args,
            kwargs,
            name=f"head{k}_{node.name.lstrip('_')}",
            type_expr=node.type,
        )
        made[i].meta = {**node.meta, HEAD_KEY: k, SOURCE_KEY: node.name}
    return result


def homes(models: int, partial: str | None) -> dict[str, list[int]]:
    """Prefix of names in a merge -> the models that became one there; it has the names of the
    first."""
    heads = {f"{HEADS}.{k}.": [k] for k in range(models)} if partial is not None else {}
    return {"": list(range(models)), **heads}


def copy_modes(merged: nn.Module, models: Sequence[nn.Module]) -> None:
    """Train or eval mode of every module as in the models."""
    modes = {name: m.training for name, m in models[0].named_modules()}
    for name, module in merged.named_modules():
        module.training = modes.get(name, models[0].training)
    for k, model in enumerate(models):
        own = {f"{HEADS}.{k}.{name}": m.training for name, m in model.named_modules()}
        for name, module in merged.named_modules():
            module.training = own.get(name, module.training)


@own_modes()
def head(merged: fx.GraphModule, k: int) -> fx.GraphModule:
    """The part of a partial zip that computes task k only; `merged` is left unchanged.

    Args:
        merged: the result of `zipfx.zip(..., partial=...)`.
        k: index of the model, in the order given to `zip`.

    Returns:
        A GraphModule with model k's output structure. Its tensors are copies.

    Raises:
        ZipError: there is no such head.
    """
    heads = merged._modules.get(HEADS)
    count = 0 if heads is None else len(list(heads.children()))
    if not isinstance(k, int) or not 0 <= k < count:
        raise ZipError(
            f"there is no head {k!r}: the merged model has {count} heads"
            + ("" if count else "; a full zip has one output for all tasks")
        )
    twin = copy.deepcopy(merged)
    graph = twin.graph
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][k],)
    foreign: set[fx.Node] = set()
    for node in graph.nodes:  # the mark of its head is lost when a module is pickled
        path = str(node.target).split(".")
        theirs = path[0] == HEADS and path[1] != str(k)
        if node.meta.get(HEAD_KEY, k) != k or theirs or foreign & set(node.all_input_nodes):
            foreign.add(node)
    for node in reversed(list(graph.nodes)):
        if node in foreign:
            graph.erase_node(node)
    for other in range(count):
        if other != k:
            del twin.get_submodule(HEADS)._modules[str(other)]
    graph.lint()
    twin.recompile()
    return twin
