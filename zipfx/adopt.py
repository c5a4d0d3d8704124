"""Adopt: a model in the graph and the modules of another one, with its own weights.

What corresponds to what has been found (`numbering`, `alike`).  Here the weights are put where they
belong, and whether that computes what the model computed is checked on the example inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.correspond import mismatch
from zipfx.errors import ZipError
from zipfx.graphs import GraphModule, plain
from zipfx.modes import as_caller
from zipfx.numbering import Numbers, Use
from zipfx.precision import inexact, widened
from zipfx.tensors import clone_tensors, leaves, map_tensors, named_tensors
from zipfx.trace import EXPECTS, NOTES, SETS
from zipfx.tree import Tree, plant, plant_unused
from zipfx.untouched import untouched
from zipfx.verify import Wide

TRUNK = "zipfx_trunk"  # where a model with a head of its own has the modules of the first model
_EXACT, _CLOSE = 1e-9, 1e-4  # relative, in float64, and in the model's own dtype


def adopted(
    modules: Sequence[fx.GraphModule],
    k: int,
    last: int,
    ours: Numbers,
    theirs: Numbers,
    left: Numbers,
    inputs: Sequence[Any],
) -> tuple[fx.GraphModule, list[str]]:
    """Model k with the nodes and modules of the first model up to the cut, and notes.

    Args:
        left: the numbers of the first model after node `last`.
        inputs: one value for each placeholder, on which the result is compared with the model.

    Raises:
        ZipError: it does not compute the same.
    """
    first, own = modules[0], modules[k]
    weights, exact, told = _weights(first, own, last, ours, theirs, k)
    named = named_tensors(first)
    adopted = {id(named[name]): t for name, t in weights.items()}
    nodes = list(first.graph.nodes)
    whole = last == len(nodes) - 1
    trunk = Tree(first, lambda _, t: adopted.get(id(t), t.detach()))
    plant(trunk, nodes[: last + 1])
    if whole:
        plant_unused(trunk, first, whole=True)
        root, graph = trunk.root, copy.deepcopy(first.graph)
    else:
        root, graph = _with_head(nodes[: last + 1], trunk.root, own, theirs, left)
    module = GraphModule(root, graph, type(own).__name__)
    module.meta.update({key: own.meta[key] for key in (NOTES, SETS, EXPECTS)})
    module.eval()
    module.graph.lint()
    _check_same(module, own, k, inputs, {weights[n].data_ptr(): t for n, t in exact.items()})
    note = (
        f"model {k} is written differently from model 0 ({mismatch(first, own, last)}), and "
        "computes the same up to the cut: there it has the modules of model 0, with its own weights"
    )
    return module, [note, *told]


def _weights(
    first: fx.GraphModule, own: fx.GraphModule, last: int, ours: Numbers, theirs: Numbers, k: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The weights of model k under the names, and in the layout, of the first model; those that
    were computed, before they were rounded; and notes."""
    target, source = named_tensors(first), named_tensors(own)
    uses = {use.number: use for use in theirs.uses}
    found: dict[str, Tensor] = {}
    covered: dict[str, int] = {}
    origin: dict[str, Use] = {}
    for use in (u for u in ours.uses if u.node <= last):
        other = uses[use.number]
        origin.setdefault(use.name, other)
        new = found.setdefault(use.name, torch.empty_like(target[use.name]).detach())
        _window(new, use).copy_(_window(source[other.name].detach(), other))
        covered[use.name] = covered.get(use.name, 0) + _window(new, use).numel()
    for name, count in covered.items():
        if count != target[name].numel():
            raise ZipError(
                f"models 0 and {k} are written differently, and of {name!r} of model 0 only "
                f"{count} of {target[name].numel()} entries are used: it can not be told which "
                "weights correspond"
            )
    changed, exact = [], dict[str, Tensor]()
    for name, (eps, scale) in ours.eps.items():
        if name in origin:
            theirs_eps = theirs.eps[origin[name].name][0]
            if theirs_eps != eps:
                exact |= _fold_eps(found, name, scale, theirs_eps, eps)
                changed.append((theirs_eps, eps))
    told = [
        f"BatchNorm's eps is {a:g} in model {k} and {b:g} in model 0, in {changed.count((a, b))} "
        "layers: made up for in the statistics"
        for a, b in dict.fromkeys(changed)
    ]
    return found, exact, told


def _window(t: Tensor, use: Use) -> Tensor:
    size, stride, offset = use.window
    return t.as_strided(size, stride, int(t.storage_offset()) + offset)


def _fold_eps(
    found: dict[str, Tensor], name: str, scale: str | None, theirs: float, ours: float
) -> dict[str, Tensor]:
    """Make a norm with another eps compute the same: in its variance, and in its weight for
    features whose variance would become negative, or too small for its dtype.

    Returns:
        what was changed, in float64, before it was rounded.
    """
    stored = found[name]
    variance = stored.double()
    wanted = variance + theirs
    fits = wanted - ours >= 0 if ours > 0 else wanted > 0
    # else it stays; it is 1 where the graph would divide by zero
    kept = torch.where(variance + ours > 0, variance, 1.0)
    exact = torch.where(fits, wanted - ours, kept)
    rounded = exact.to(stored.dtype)
    factor = ((rounded.double() + ours) / wanted).sqrt()
    fine = fits & ((factor - 1).abs() <= torch.finfo(stored.dtype).eps)
    stored.copy_(rounded)
    if bool(fine.all()):
        return {name: exact}
    if scale is None or scale not in found:
        raise ZipError(
            f"the eps of a BatchNorm ({name!r} of model 0) is {ours:g}, in another model "
            f"{theirs:g}, and its variance is too small to make up for that: set both to one eps, "
            "or put the model with the smaller eps first"
        )
    weight = found[scale].double() * torch.where(fine, 1.0, factor)
    found[scale].copy_(weight)
    return {name: torch.where(fine, exact, rounded.double()), scale: weight}


def _with_head(
    trunk_nodes: Sequence[fx.Node],
    trunk: nn.Module,
    own: fx.GraphModule,
    theirs: Numbers,
    left: Numbers,
) -> tuple[nn.Module, fx.Graph]:
    """The trunk of the first model, and what of a model's own graph is not in it."""
    graph, copies = fx.Graph(), dict[int, fx.Node]()
    seen: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(trunk_nodes):
        copies[i] = seen[node] = graph.node_copy(node, seen.__getitem__)
        if node.op in ("call_module", "get_attr"):
            copies[i].target = f"{TRUNK}.{plain(str(node.target))}"
    given = {value: i for i, value in left.left.items() if trunk_nodes[i].op != "get_attr"}
    inputs = [n for n in trunk_nodes if n.op == "placeholder"]
    nodes = list(own.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    needed, stack = {len(nodes) - 1}, [len(nodes) - 1]
    crossing: dict[tuple[int, int], int] = {}
    while stack:
        i = stack.pop()
        for source in nodes[i].all_input_nodes:
            j = at[source]
            value = theirs.reads[i][j]
            tensors = any(isinstance(part, tuple) for part in value)
            if tensors and value in given and source.op != "get_attr":
                crossing[i, j] = given[value]
            elif source.op == "placeholder":
                ours = [n.op for n in nodes[: j + 1]].count("placeholder") - 1
                crossing[i, j] = trunk_nodes.index(inputs[ours])
            elif j not in needed:
                needed.add(j)
                stack.append(j)
    head = [nodes[i] for i in sorted(needed)]
    tree = Tree(own, lambda _, t: t.detach())
    plant(tree, head)
    plant_unused(tree, own)
    tree.root.add_module(TRUNK, trunk)
    made: dict[int, fx.Node] = {}

    def mapped(i: int) -> Callable[[fx.Node], fx.Node]:
        return lambda n: copies[crossing[i, at[n]]] if (i, at[n]) in crossing else made[at[n]]

    for node in head:
        made[at[node]] = graph.node_copy(node, mapped(at[node]))
    return tree.root, graph


def _check_same(
    new: fx.GraphModule,
    old: fx.GraphModule,
    k: int,
    inputs: Sequence[Any],
    exact: Mapping[int, Tensor],
) -> None:
    """Check that a model computes what it computed, on the example inputs.

    exact: by address of a weight that was computed, what it was before it was rounded.
    """
    try:
        found = [_run(m, inputs, torch.float64, exact) for m in (new, old)]
        bound = _EXACT
    except Exception:  # it asks for its own dtype
        found, bound = [_run(m, inputs, None) for m in (new, old)], _close(old)
    for a, b in zip(*found, strict=True):
        if not _agree(a, b, bound):
            raise ZipError(
                f"models 0 and {k} are written differently, and the weights of model {k} in the "
                "graph of model 0 do not compute the same; use one implementation for both"
            )


def _close(module: fx.GraphModule) -> float:
    """What counts as equal in a model's own dtype: some roundings apart."""
    steps = [torch.finfo(t.dtype).eps for t in named_tensors(module).values() if inexact(t)]
    return max([_CLOSE, *(16 * step for step in steps)])


def _agree(a: Tensor, b: Tensor, bound: float) -> bool:
    """Whether two tensors are the same, but for a part of the largest entry."""
    if a.shape != b.shape:
        return False
    gap = float((a - b).abs().max()) if a.numel() else 0.0
    return gap <= bound * max(float(b.abs().max()) if b.numel() else 0.0, 1e-30)


def _run(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    dtype: torch.dtype | None,
    exact: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """The output's tensors, in float64."""
    wide, given = module, clone_tensors(tuple(inputs))
    if dtype is not None:
        values = [(exact or {}).get(t.data_ptr(), t) for t in named_tensors(module).values()]
        wide, given = copy.deepcopy(module), map_tensors(widened, given)
        for t, value in zip(named_tensors(wide).values(), values, strict=True):
            t.data = widened(value.data)  # `to` would drop imaginary parts
    with torch.no_grad(), untouched(named_tensors(wide).values()), as_caller(), Wide(dtype):
        result = fx.Interpreter(wide).run(*given)
    tensors = [t for t in leaves(result) if isinstance(t, Tensor)]
    return [widened(t) if inexact(t) else t.double() for t in tensors]
