"""Recipe: a merged graph as plain values, and a merged module from a recipe and traced models.

Each node of a merge copies a node of a model, or is one of a few that were put between trunk and
head. So a recipe need not say what a node is, only which one it copies and what that reads:
functions, layers and settings are those of the models at hand, and nothing in a recipe is ever run.
What it says of them beyond that is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList

from zipfx.calls import EXPECTATIONS, expect_equal
from zipfx.errors import ZipError
from zipfx.graphs import attribute, plain
from zipfx.hidden import attributes
from zipfx.naming import name_of_callable, without_addresses
from zipfx.parametrized import is_computing, plain_class, tensor_of
from zipfx.rewrite import (
    HEAD_KEY,
    HEADS,
    INSERTED,
    SOURCE_KEY,
    MergedModule,
    Part,
    build,
    planted,
)
from zipfx.tracers import name_of
from zipfx.tree import ValueOf

#: the value of a tensor of the merge, by its name, and the tensor of a model that it is in place of
Take = Callable[[str, Tensor | None], Tensor]

_OWN = re.compile(r"unmerge_[0-9]+")  # buffers that heads have and models do not
_NAMED = ("call_module", "get_attr")
_MOST = 64  # dimensions that a tensor has
_ONE, _SEVERAL = {(2, 1)}, {(2, n) for n in range(1, _MOST)}
#: how many nodes an inserted one reads, and along how many dimensions it works
_SIZES = {
    "clone_tensors": {(1, 0)},
    "clone": {(1, 0)},
    "index_select": _ONE,
    "select": _SEVERAL,
    "mix": _SEVERAL,
}


#: checks of inputs, and how many values each compares with
_CHECKS: dict[str, tuple[Callable[..., None], int]] = {
    check.__name__: (check, int(check is expect_equal)) for check in EXPECTATIONS
}


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
class Step:
    """A node of a merge: of which part it is, the names of the nodes that it reads, in the order of
    its arguments, and the node of the model that it copies (None: it was inserted, see `dims`)."""

    name: str
    part: int | None
    source: str | None
    reads: tuple[str, ...]
    does: Does
    dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A merged graph. heads: those it has, of all models (none: a full zip); results: what it
    returns, one step for each head; several make a tuple."""

    models: int
    heads: tuple[int, ...]
    steps: tuple[Step, ...]
    results: tuple[Step, ...]

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
        Step("output", k, "output", _reads(value), Does("output", "output", _text(value)))
        for k, value in zip(heads or (None,), values, strict=True)
    )
    return Recipe(models, heads, tuple(_step(merged, node) for node in nodes), results)


def _step(merged: fx.GraphModule, node: fx.Node) -> Step:
    part, source = node.meta.get(HEAD_KEY), node.meta.get(SOURCE_KEY)
    does, reads = _does(merged, node, part), _reads((node.args, node.kwargs))
    given: Any = ()
    if source is None:
        if node.target in EXPECTATIONS:
            wanted = json.dumps(node.args[2:])
            does = replace(does, settings={"wanted": wanted}, arguments="")
        elif node.target in INSERTED:
            given = node.args[1] if len(node.args) > 1 else ()
        elif not (node.op == "get_attr" and part is not None and _OWN.fullmatch(does.target)):
            raise ZipError(f"node {node.name!r} ({node.op} {does.target}) was put into its graph")
    dims = given if isinstance(given, (tuple, list)) else (given,)
    return Step(node.name, part, source, reads, does, tuple(dims))


def _does(module: fx.GraphModule, node: fx.Node, part: Part = None) -> Does:
    target = name_of(node.target)
    target = plain(target) if node.op in _NAMED else target
    if part is not None and node.op in _NAMED:
        target = target.removeprefix(f"{HEADS}.{part}.")
    text = _text((node.args, node.kwargs))
    if node.op not in _NAMED:
        return Does(node.op, target, text)
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
        if callable(value) and callable(getattr(type(module), name, None))
    }


class _Blank:
    """A node as an argument, or what depends on the machine."""

    def __repr__(self) -> str:
        return "_"


def _text(arguments: Any) -> str:
    def blank(a: Any) -> Any:
        return _Blank() if isinstance(a, (fx.Node, torch.device)) else a

    return without_addresses(str(fx.node.map_aggregate(arguments, blank)))


def _reads(arguments: Any) -> tuple[str, ...]:
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
            if found is not None:
                return f"at node {step.source!r} ({step.does.op} {step.does.target}): {found}"
    output = next(iter(reversed(module.graph.nodes)))
    for step in recipe.results:
        if step.part in parts and step.does.arguments != _text(output.args[0]):
            return f"it returns {_text(output.args[0])}, not {step.does.arguments}"
    return None


def rebuilt(recipe: Recipe, modules: Mapping[int, fx.GraphModule], take: Take) -> MergedModule:
    """The merged module.

    Args:
        modules: the traced models that `recipe.needs`, without a `misfit`; left unchanged.

    Raises:
        ZipError: the recipe does not make sense.
    """
    nodes = {k: {node.name: node for node in m.graph.nodes} for k, m in modules.items()}
    parts: tuple[Part, ...] = (None, *recipe.heads)
    sources: dict[Part, list[fx.Node]] = {part: [] for part in parts}
    if [step.part for step in recipe.results] != list(parts[1:] or parts):
        raise ZipError(f"{len(recipe.results)} results are not one for each part of {parts}")
    for step in recipe.steps:
        if step.part not in sources:
            raise ZipError(f"node {step.name!r} is of head {step.part}, which is not there")
        if step.source is not None:
            sources[step.part].append(nodes[step.part or 0][step.source])
    values: dict[Part, ValueOf] = {part: _values(part, take) for part in parts}
    root, _ = planted(modules, sources, values)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    origins = _Origins(sources)
    for step in recipe.steps:
        if step.name in made:
            raise ZipError(f"there are two nodes {step.name!r}")
        if step.source is None:
            made[step.name] = _inserted(graph, root, step, made, take)
            origins.insert(step)
        else:
            source = nodes[step.part or 0][step.source]
            made[step.name] = _copied(graph, source, step, made)
            origins.copy(step, _reads((source.args, source.kwargs)))
    results = []
    for step in recipe.results:
        output = next(iter(reversed(modules[step.part or 0].graph.nodes)))
        results.append(_with_reads(output.args[0], step, made))
        origins.copy(step, _reads(output.args[0]))
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return build(root, graph, type(modules[0]).__name__)


class _Origins:
    """Which nodes of models the values of a merge stand for, to see whether reads make sense.

    sources: the nodes of models that are copied, by part.
    """

    def __init__(self, sources: Mapping[Part, Sequence[fx.Node]]) -> None:
        self._own = {part: {node.name: node for node in nodes} for part, nodes in sources.items()}
        self._of: dict[str, tuple[Part, str]] = {}

    def insert(self, step: Step) -> None:
        """A node between trunk and head stands for what it reads first (if it reads anything)."""
        if step.reads and step.reads[0] in self._of:
            self._of[step.name] = self._of[step.reads[0]]

    def copy(self, step: Step, expected: Sequence[str]) -> None:
        """A copy reads what stands for the nodes that its source reads.

        Raises:
            ZipError: it does not.
        """
        for name, wanted in zip(step.reads, expected, strict=True):
            if not self._stands_for(name, wanted, step.part):
                raise ZipError(f"node {step.name!r} reads {name!r}, which is not its {wanted!r}")
        self._of[step.name] = step.part, str(step.source)

    def _stands_for(self, name: str, wanted: str, reader: Part) -> bool:
        if name not in self._of:
            return False
        part, source = self._of[name]
        if part == reader:
            return source == wanted
        if part is not None or wanted in self._own[reader]:
            return False
        # what a head reads of the trunk has the names of model 0; it may be what was written to
        trunk = self._own[None]
        return reader != 0 or wanted not in trunk or source in _ancestors(trunk[wanted])


def _ancestors(node: fx.Node) -> set[str]:
    """Names of a node and of all that it depends on."""
    found, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - found
        found |= new
        stack += new
    return {n.name for n in found}


def _values(part: Part, take: Take) -> ValueOf:
    prefix = "" if part is None else f"{HEADS}.{part}."
    return lambda path, t: take(prefix + path, t)


def _copied(graph: fx.Graph, source: fx.Node, step: Step, made: Mapping[str, fx.Node]) -> fx.Node:
    args, kwargs = _with_reads((source.args, source.kwargs), step, made)
    target: Any = source.target
    if step.part is not None and source.op in _NAMED:
        target = f"{HEADS}.{step.part}.{plain(target)}"
    node = graph.create_node(source.op, target, args, kwargs, step.name, source.type)
    node.meta = {**source.meta, SOURCE_KEY: source.name}
    node.meta.pop(HEAD_KEY, None)
    if step.part is not None:
        node.meta[HEAD_KEY] = step.part
    return node


def _inserted(
    graph: fx.Graph, root: nn.Module, step: Step, made: Mapping[str, fx.Node], take: Take
) -> fx.Node:
    functions: dict[str, Any] = {f.__name__: f for f in INSERTED}
    home, does = f"{HEADS}.{step.part}", step.does
    if does.target in _CHECKS:
        return _expected(graph, step, made)
    if step.part is None:
        raise ZipError(f"node {step.name!r} copies no node of a model")
    if does.op == "get_attr" and _OWN.fullmatch(does.target) and not (step.reads or step.dims):
        by = take(f"{home}.{does.target}", None)
        root.get_submodule(home).register_buffer(does.target, by)
        node = graph.create_node("get_attr", f"{home}.{does.target}", name=step.name)
    elif (len(step.reads), len(step.dims)) in _SIZES.get(does.target, ()):
        x, *others = (_read(name, step, made) for name in step.reads)
        if not all(-_MOST <= dim < _MOST for dim in step.dims):
            raise ZipError(f"node {step.name!r} works along dimensions {step.dims}")
        for other in others:
            _check_unmerge(root, other, step)
        one = does.target == "index_select"  # the others take several dimensions
        args = (x, step.dims[0] if one else step.dims, *others) if others else (x,)
        node = graph.create_node("call_function", functions[does.target], args, name=step.name)
    else:
        raise ZipError(f"node {step.name!r} copies no node of a model")
    node.meta[HEAD_KEY] = step.part
    return node


def _expected(graph: fx.Graph, step: Step, made: Mapping[str, fx.Node]) -> fx.Node:
    """A check of one of the inputs."""
    try:
        found = json.loads((step.does.settings or {}).get("wanted", "null"))
    except (ValueError, RecursionError):
        found = None
    inputs = [_read(name, step, made) for name in step.reads]
    plain = isinstance(found, list) and all(isinstance(v, (bool, int, float, str)) for v in found)
    check, count = _CHECKS[step.does.target]
    if (
        not plain
        or len(found) != count
        or [n.op for n in inputs] != ["placeholder"]
        or step.part is not None
        or step.dims
    ):
        raise ZipError(f"node {step.name!r} checks no input of the models")
    args = (inputs[0], str(inputs[0].target), *found)
    return graph.create_node("call_function", check, args, name=step.name)


def _check_unmerge(root: nn.Module, node: fx.Node, step: Step) -> None:
    """Check that what an inserted node goes by is an index, or for `mix` a matrix."""
    by = attribute(root, str(node.target)) if node.op == "get_attr" else None
    if isinstance(by, Tensor) and step.does.target == "mix":
        known = by.ndim == 2 and by.is_floating_point()
    else:
        known = isinstance(by, Tensor) and by.ndim == 1 and by.dtype == torch.int64
    if not known:
        raise ZipError(f"node {step.name!r} reads {node.name!r}, which is no unmerge matrix")


def _with_reads(arguments: Any, step: Step, made: Mapping[str, fx.Node]) -> Any:
    """The arguments of a model's node, with the nodes that the step reads in place of its own."""
    reads = [_read(name, step, made) for name in step.reads]
    if len(_reads(arguments)) != len(reads):
        raise ZipError(f"node {step.name!r} reads {len(reads)} nodes, that of the model does not")
    return fx.node.map_arg(arguments, lambda _: reads.pop(0))


def _read(name: str, step: Step, made: Mapping[str, fx.Node]) -> fx.Node:
    if name not in made:
        raise ZipError(f"node {step.name!r} reads node {name!r}, which does not come before it")
    return made[name]
