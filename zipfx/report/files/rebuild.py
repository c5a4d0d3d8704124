"""Rebuild: a merged module from a recipe and traced models.

What a recipe says is checked before it is followed: nothing of it is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.errors import ZipError
from zipfx.merge import BAKED, HEADS, INSERTED, MergedModule, Part, build, mark, planted
from zipfx.model.calls.expect import (
    EXPECTATIONS,
    Expectation,
    expect_equal,
    expect_form,
    expect_parts,
)
from zipfx.model.calls.sizes import expect_sizes
from zipfx.model.graph_module import NAMED, attribute, plain
from zipfx.report.files.recipe import UNMERGE_NAME, GraphStep, Recipe, reads_of
from zipfx.trace import ValueOf
from zipfx.trace.nodes import ancestors

#: the value of a tensor of the merge, by its name, and the tensor of a model that it is in place of
TakeTensor = Callable[[str, Tensor | None], Tensor]

_BAKED = re.compile(rf"{BAKED}_[0-9]+")  # parameters that a merge has and models do not
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


#: checks of inputs
_WITH_VALUE = (expect_equal, expect_form, expect_parts)
_CHECKS: dict[str, Callable[..., None]] = {check.__name__: check for check in EXPECTATIONS}


def rebuilt(
    recipe: Recipe, modules: Mapping[int, fx.GraphModule], take: TakeTensor
) -> MergedModule:
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
    replaced = {(step.part, step.source) for step in recipe.steps if step.baked}
    kept = {p: [n for n in own if (p, n.name) not in replaced] for p, own in sources.items()}
    root, _ = planted(modules, kept, values)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    origins = _Origins(sources)
    for step in recipe.steps:
        if step.name in made:
            raise ZipError(f"there are two nodes {step.name!r}")
        if step.source is None:
            made[step.name] = _inserted(graph, root, step, made, take)
            origins.insert(step)
        elif step.baked:
            made[step.name] = _baked(graph, root, step, take)
            origins.copy(step, ())
        else:
            source = nodes[step.part or 0][step.source]
            made[step.name] = _copied(graph, source, step, made)
            origins.copy(step, reads_of((source.args, source.kwargs)))
    results = []
    for step in recipe.results:
        output = next(iter(reversed(modules[step.part or 0].graph.nodes)))
        results.append(_with_reads(output.args[0], step, made))
        origins.copy(step, reads_of(output.args[0]))
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return build(root, graph, type(modules[0]).__name__)


class _Origins:
    """Which nodes of models the values of a merge stand for, to see whether reads make sense.

    sources: the nodes of models that are copied, by part.
    """

    def __init__(self, sources: Mapping[Part, Sequence[fx.Node]]) -> None:
        self._own = {part: {node.name: node for node in nodes} for part, nodes in sources.items()}
        self._of: dict[str, tuple[Part, str]] = {}

    def insert(self, step: GraphStep) -> None:
        """A node between trunk and head stands for what it reads first (if it reads anything)."""
        if step.reads and step.reads[0] in self._of:
            self._of[step.name] = self._of[step.reads[0]]

    def copy(self, step: GraphStep, expected: Sequence[str]) -> None:
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
        if reader != 0 or wanted not in trunk:
            return True
        node = trunk[wanted]
        return source in {n.name for n in (node, *ancestors([node]))}


def _values(part: Part, take: TakeTensor) -> ValueOf:
    prefix = "" if part is None else f"{HEADS}.{part}."
    return lambda path, t: take(prefix + path, t)


def _copied(
    graph: fx.Graph, source: fx.Node, step: GraphStep, made: Mapping[str, fx.Node]
) -> fx.Node:
    args, kwargs = _with_reads((source.args, source.kwargs), step, made)
    target: Any = source.target
    if step.part is not None and source.op in NAMED:
        target = f"{HEADS}.{step.part}.{plain(target)}"
    node = graph.create_node(source.op, target, args, kwargs, step.name, source.type)
    node.meta = dict(source.meta)
    mark(node, head=step.part, source=source.name)
    return node


def _baked(graph: fx.Graph, root: nn.Module, step: GraphStep, take: TakeTensor) -> fx.Node:
    """A parameter of the merge, where the model computes a weight."""
    name, home = step.does.target, "" if step.part is None else f"{HEADS}.{step.part}"
    if not _BAKED.fullmatch(name) or step.dims or hasattr(root.get_submodule(home), name):
        raise ZipError(f"node {step.name!r} reads no parameter that took a weight's place")
    target = f"{home}.{name}".lstrip(".")
    value = take(target, None)
    if not value.is_floating_point():
        raise ZipError(f"{target!r} holds no real numbers")
    root.get_submodule(home).register_parameter(name, nn.Parameter(value.clone()))
    node = graph.create_node("get_attr", target, name=step.name)
    mark(node, head=step.part, source=step.source, baked=True)
    return node


def _inserted(
    graph: fx.Graph, root: nn.Module, step: GraphStep, made: Mapping[str, fx.Node], take: TakeTensor
) -> fx.Node:
    functions: dict[str, Any] = {f.__name__: f for f in INSERTED}
    home, does = f"{HEADS}.{step.part}", step.does
    if does.target in _CHECKS:
        return _expected(graph, step, made)
    if step.part is None:
        raise ZipError(f"node {step.name!r} copies no node of a model")
    if (
        does.op == "get_attr"
        and UNMERGE_NAME.fullmatch(does.target)
        and not (step.reads or step.dims)
    ):
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
    mark(node, head=step.part)
    return node


def _expected(graph: fx.Graph, step: GraphStep, made: Mapping[str, fx.Node]) -> fx.Node:
    """A check of one of the inputs."""
    try:
        found = json.loads((step.does.settings or {}).get("wanted", "null"))
    except (ValueError, RecursionError):
        found = None
    inputs = [_read(name, step, made) for name in step.reads]
    plain = isinstance(found, list) and all(isinstance(v, (bool, int, float, str)) for v in found)
    check = _CHECKS[step.does.target]
    several = check is expect_sizes
    texts = plain and all(isinstance(v, str) for v in found)
    fits = texts if several else plain and len(found) == int(check in _WITH_VALUE)
    if (
        not fits
        or any(n.op != "placeholder" for n in inputs)
        or (len(inputs) != 1 and not several)
        or step.part is not None
        or step.dims
    ):
        raise ZipError(f"node {step.name!r} checks no input of the models")
    by_name = {str(n.target): n for n in inputs}
    expected = Expectation(", ".join(by_name), check, tuple(found))
    return graph.create_node("call_function", check, expected.arguments(by_name), name=step.name)


def _check_unmerge(root: nn.Module, node: fx.Node, step: GraphStep) -> None:
    """Check that what an inserted node goes by is an index, or for `mix` a matrix."""
    by = attribute(root, str(node.target)) if node.op == "get_attr" else None
    if isinstance(by, Tensor) and step.does.target == "mix":
        known = by.ndim == 2 and by.is_floating_point()
    else:
        known = isinstance(by, Tensor) and by.ndim == 1 and by.dtype == torch.int64
    if not known:
        raise ZipError(f"node {step.name!r} reads {node.name!r}, which is no unmerge matrix")


def _with_reads(arguments: Any, step: GraphStep, made: Mapping[str, fx.Node]) -> Any:
    """The arguments of a model's node, with the nodes that the step reads in place of its own."""
    reads = [_read(name, step, made) for name in step.reads]
    if len(reads_of(arguments)) != len(reads):
        raise ZipError(f"node {step.name!r} reads {len(reads)} nodes, that of the model does not")
    return fx.node.map_arg(arguments, lambda _: reads.pop(0))


def _read(name: str, step: GraphStep, made: Mapping[str, fx.Node]) -> fx.Node:
    if name not in made:
        raise ZipError(f"node {step.name!r} reads node {name!r}, which does not come before it")
    return made[name]
