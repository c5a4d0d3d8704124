"""Module: the merged GraphModule, with the model's own module tree and names.

The trunk keeps model 0's names (`merged.layer1[0].conv1`); what follows the cut lies in
`merged.task_heads[k]` under the names of model k.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from zipfx.analysis import mix, select
from zipfx.errors import ZipError
from zipfx.merge.origin import origin_of
from zipfx.model.calls.expect import EXPECTATIONS
from zipfx.model.graph_module import GraphModule
from zipfx.model.tensors import clone_tensors
from zipfx.modes import own_modes
from zipfx.trace import Tree, ValueOf, plant, plant_unused

HEADS = "task_heads"
BAKED = "baked"  # what parameters are called that take the place of computed weights
#: functions that a merge puts between trunk and head, and behind its inputs
INSERTED = (clone_tensors, torch.clone, torch.index_select, select, mix, *EXPECTATIONS)

Part = int | None  # of a merge: a head, by its number, or the trunk


class MergedModule(GraphModule):
    """What `zip` makes of a model, with the module tree of that."""


def build(root: nn.Module, graph: fx.Graph, name: str) -> MergedModule:
    """A graph module that owns exactly the tree of `root`."""
    for node in graph.nodes:  # annotations that were not evaluated mean nothing in other code
        node.type = None if isinstance(node.type, str) else node.type
    module = MergedModule(root, graph, name)
    graph.lint()
    return module


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
        return tree.root, {0: plant_unused(tree, modules[0], whole=True)}
    tree.name_all(tree.source, tree.root)
    if any(HEADS in names for names in vars(tree.root).values() if isinstance(names, dict)):
        raise ZipError(
            f"the models have something named {HEADS!r} before the cut, which is where zipfx puts "
            "the heads of a partial zip; rename it, or zip the heads of it one by one"
        )
    homes = nn.ModuleList()
    tree.root.add_module(HEADS, homes)
    unused = {}
    for k in heads:
        twig = Tree(modules[k], values[k])
        homes.add_module(str(k), twig.root)
        plant(twig, nodes[k])
        unused[k] = plant_unused(twig, modules[k])
    return tree.root, unused


def homes(models: int, partial: str | None) -> dict[str, list[int]]:
    """Prefix of names in a merge -> the models that became one there; it has the names of the
    first."""
    heads = {f"{HEADS}.{k}.": [k] for k in range(models)} if partial is not None else {}
    return {"": list(range(models)), **heads}


def copy_modes(merged: nn.Module, models: Sequence[nn.Module]) -> None:
    """Train or eval mode of every module as in the models."""
    modes = {name: m.training for name, m in models[0].named_modules(remove_duplicate=False)}
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
    if not isinstance(merged, fx.GraphModule):
        raise ZipError(f"merged is a {type(merged).__name__}, and no result of zipfx.zip")
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
        if origin_of(node).head not in (None, k) or theirs or foreign & set(node.all_input_nodes):
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
