"""Recipe: a merged graph as plain values (`rebuild` makes a module of them again).

Each node of a merge copies a node of a model, or is one of a few that were put between trunk and
head. So a recipe need not say what a node is, only which one it copies and what that reads:
functions, layers and settings are those of the models at hand, and nothing in a recipe is ever run.
What it says of them beyond that is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList

from zipfx.errors import ZipError
from zipfx.merge import BAKED, HEADS, INSERTED, Part, origin_of
from zipfx.model.callables import name_of_callable, without_addresses
from zipfx.model.calls.expect import EXPECTATIONS
from zipfx.model.contents import attributes, code_of
from zipfx.model.graph_module import NAMED, attribute, plain
from zipfx.model.parametrized import is_computing, plain_class, tensor_of
from zipfx.trace.nodes import name_of

UNMERGE_NAME = re.compile(r"unmerge_[0-9]+")  # buffers that heads have and models do not


@dataclass(frozen=True)
class Does:
    """What a node does, as text.

    target: qualified name of its module or attribute in the model, or name of its function;
    arguments: with _ for each node; layer: type of its module, and what is patched in it; settings:
    of that module.
    """

    op: str
    target: str
    arguments: str
    layer: str = ""
    settings: dict[str, str] | None = None

    def difference(self, other: Does) -> str | None:
        """What is not the same; settings that only one knows are those of another torch."""
        ours, theirs = self.settings or {}, other.settings or {}
        fields = ("op", "target", "layer", "arguments")
        pairs = [(f, getattr(self, f), getattr(other, f)) for f in fields]
        pairs += [(key, ours[key], theirs[key]) for key in ours if key in theirs]
        return next((f"{n} was {a} and is {b}" for n, a, b in pairs if a != b), None)


@dataclass(frozen=True)
class GraphStep:
    """A node of a merge: of which part it is, the names of the nodes that it reads, in the order of
    its arguments, and the node of the model that it copies (None: it was inserted, see `dims`), or
    that it reads a parameter in place of."""

    name: str
    part: int | None
    source: str | None
    reads: tuple[str, ...]
    does: Does
    dims: tuple[int, ...] = ()

    @property
    def baked(self) -> bool:
        """Whether it reads a parameter in place of what the model computes."""
        return self.source is not None and self.does.layer == BAKED and self.does.op == "get_attr"


@dataclass(frozen=True)
class Recipe:
    """A merged graph. heads: those it has, of all models (none: a full zip); results: what it
    returns, one step for each head; several make a tuple."""

    models: int
    heads: tuple[int, ...]
    steps: tuple[GraphStep, ...]
    results: tuple[GraphStep, ...]

    @property
    def needs(self) -> tuple[int, ...]:
        """The models that nodes are copied from."""
        return tuple(sorted({0, *self.heads}))


def recipe_of(merged: fx.GraphModule, models: int, partial: bool) -> Recipe:
    """The recipe of a merged module.

    Raises:
        ZipError: its graph is no longer the one that zip made.
    """
    homes = merged.get_submodule(HEADS)._modules if partial else {}
    heads = tuple(int(k) for k in homes)
    *nodes, output = merged.graph.nodes
    found = output.args[0]
    values: Sequence[Any] = found if len(heads) > 1 else (found,)
    if len(heads) > 1 and not (isinstance(found, tuple) and len(found) == len(heads)):
        raise ZipError(
            f"it no longer returns a tuple with one entry for each of {len(heads)} heads"
        )
    results = tuple(
        GraphStep("output", k, "output", reads_of(value), Does("output", "output", _text(value)))
        for k, value in zip(heads or (None,), values, strict=True)
    )
    return Recipe(models, heads, tuple(_step(merged, node) for node in nodes), results)


def _step(merged: fx.GraphModule, node: fx.Node) -> GraphStep:
    origin = origin_of(node)
    part = origin.head
    does, reads = _does(merged, node, part), reads_of((node.args, node.kwargs))
    given: Any = ()
    if origin.source is None:
        if node.target in EXPECTATIONS:
            wanted = json.dumps(node.args[2:])
            does = replace(does, settings={"wanted": wanted}, arguments="")
        elif node.target in INSERTED:
            given = node.args[1] if len(node.args) > 1 else ()
        elif not (
            node.op == "get_attr" and part is not None and UNMERGE_NAME.fullmatch(does.target)
        ):
            raise ZipError(f"node {node.name!r} ({node.op} {does.target}) was put into its graph")
    elif origin.baked:
        does = replace(does, layer=BAKED)
    dims = given if isinstance(given, (tuple, list)) else (given,)
    return GraphStep(node.name, part, origin.source, reads, does, tuple(dims))


def _does(module: fx.GraphModule, node: fx.Node, part: Part = None) -> Does:
    target = name_of(node.target)
    target = plain(target) if node.op in NAMED else target
    if part is not None and node.op in NAMED:
        target = target.removeprefix(f"{HEADS}.{part}.")
    text = _text((node.args, node.kwargs))
    if node.op not in NAMED:
        return Does(node.op, target, text, settings=code_of(target, node.target) or None)
    try:
        leaf = attribute(module, str(node.target))
    except AttributeError as error:
        raise ZipError(f"node {node.name!r} needs {target!r}, which is not there") from error
    if isinstance(leaf, ParametrizationList):  # which is traced as the tensor that it gives
        return Does("get_attr", tensor_of(target), text)
    if node.op == "get_attr":
        constant = None if isinstance(leaf, Tensor) else {"value": without_addresses(repr(leaf))}
        return Does(node.op, target, text, settings=constant)
    texts = attributes(leaf, tensors=False)  # those are in the file
    known = {key: without_addresses(v) for key, v in texts.items() if not is_computing(key)}
    layer = [plain_class(leaf).__name__]
    for path, inner in leaf.named_modules():
        layer += [f"{path}.{key}".lstrip(".") + f"={by}" for key, by in patched(inner).items()]
    return Does(node.op, target, text, " with ".join(layer), known)


def patched(module: nn.Module) -> dict[str, str]:
    """What a module has in place of methods of its class, by name, and what that is called."""
    return {
        name: name_of_callable(getattr(value, "__func__", value))
        for name, value in vars(module).items()
        if callable(value)
        and callable(getattr(type(module), name, None))
        and not isinstance(module, torch.jit.ScriptModule)  # which keeps its methods so
    }


class _Blank:
    """A node as an argument, or what depends on the machine."""

    def __repr__(self) -> str:
        return "_"


def _text(arguments: Any) -> str:
    def blank(a: Any) -> Any:
        return _Blank() if isinstance(a, (fx.Node, torch.device)) else a

    return without_addresses(str(fx.node.map_aggregate(arguments, blank)))


def reads_of(arguments: Any) -> tuple[str, ...]:
    found: list[str] = []
    fx.node.map_arg(arguments, lambda n: found.append(n.name))
    return tuple(found)


def misfit(recipe: Recipe, k: int, module: fx.GraphModule) -> str | None:
    """The first thing that model k, traced, does otherwise than the recipe says (None: nothing)."""
    nodes = {node.name: node for node in module.graph.nodes}
    parts = {k} | ({None} if k == 0 else set())
    for step in recipe.steps:
        if step.part in parts and step.source is not None:
            if step.source not in nodes:
                return f"it has no node {step.source!r} ({step.does.op} {step.does.target})"
            found = step.does.difference(_does(module, nodes[step.source]))
            if found is not None and not step.baked:
                return f"at node {step.source!r} ({step.does.op} {step.does.target}): {found}"
    output = next(iter(reversed(module.graph.nodes)))
    for step in recipe.results:
        if step.part in parts and step.does.arguments != _text(output.args[0]):
            return f"it returns {_text(output.args[0])}, not {step.does.arguments}"
    return None
