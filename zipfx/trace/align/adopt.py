"""Adopt: a model in the graph and the modules of another one, with its own weights.

What corresponds to what has been found (`numbering`, `likeness`).  Here the weights are put where
they belong, and whether that computes what the model computed is checked on the example inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.errors import ZipError
from zipfx.model.graph_module import NAMED, GraphModule, plain
from zipfx.model.running import Wide, decomposed, untouched
from zipfx.model.tensors import clone_tensors, inexact, leaves, map_tensors, named_tensors, widened
from zipfx.modes import as_caller
from zipfx.trace.align.numbering import Numbers, Use
from zipfx.trace.nodes import describe
from zipfx.trace.record import KEY, record_of
from zipfx.trace.tree import Tree, plant, plant_unused

TRUNK = "zipfx_trunk"  # where a model with a head of its own has the modules of the first model
_EXACT, _CLOSE = 1e-9, 1e-4  # relative, in float64, and in the model's own dtype


class Differs(Exception):  # noqa: N818
    """A model would not compute what it computes."""


@dataclass(frozen=True)
class Work:
    """What is to be done for model `k`: to get the nodes of model 0 up to index `last`.

    ours, theirs: numbers of model 0, and of model k; left: of model 0 after node `last`; why: in
    what the two are written differently.
    """

    modules: Sequence[fx.GraphModule]
    k: int
    last: int
    ours: Numbers
    theirs: Numbers
    left: Numbers
    why: str


def adopted(
    work: Work, inputs: Sequence[Any], must: Collection[int]
) -> tuple[fx.GraphModule, list[str]]:
    """A model with the nodes and modules of the first model up to the cut, and notes.

    Args:
        inputs: one value for each placeholder, on which the result is compared with the model.
        must: the nodes of the trunk whose values the model must compute as well.

    Raises:
        Differs: it would not compute the same.
    """
    first, own, last = work.modules[0], work.modules[work.k], work.last
    weights, exact, told = _weights(first, own, last, work.ours, work.theirs, work.k)
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
        root, graph = _with_head(nodes[: last + 1], trunk.root, own, work.theirs, work.left)
    module = GraphModule(root, graph, type(own).__name__)
    module.meta[KEY] = replace(record_of(own), constants=frozenset())
    module.eval()
    module.graph.lint()
    before = {weights[name].data_ptr(): t for name, t in exact.items()}
    places = {i: describe(nodes[i]) for i in must}
    _check_same(module, own, work, inputs, before, places)
    note = (
        f"model {work.k} is written differently from model 0 ({work.why}), and computes the same "
        "up to the cut: there it has the modules of model 0, with its own weights"
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
        if node.op in NAMED:
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
    work: Work,
    inputs: Sequence[Any],
    exact: Mapping[int, Tensor],
    places: Mapping[int, str],
) -> None:
    """Check that a model computes what it computed on the example inputs, and that what the trunk
    hands over is there in the model as it was: else its head would do without the trunk.

    exact: by address of a weight that was computed, what it was before it was rounded.
    places: nodes of the trunk whose values the model must have, as messages call them.
    """

    def both(
        dtype: torch.dtype | None, bound: float
    ) -> tuple[list[Tensor], list[Tensor], set[int]]:
        at_cut = _AtCut(work.last, places)
        ours = _run(new, inputs, dtype, at_cut, exact if dtype is not None else {})
        seeking = _Seeking(at_cut.values, bound)
        with seeking:
            theirs = _run(old, inputs, dtype)
        return ours, theirs, set(seeking.wanted)

    try:
        bound = _EXACT
        ours, theirs, missing = both(torch.float64, bound)
    except Exception:  # it asks for its own dtype
        bound = _close(old)
        ours, theirs, missing = both(None, bound)
    what = f"models 0 and {work.k} are written differently ({work.why}), and"
    if missing:
        raise Differs(
            f"{what} what {places[min(missing)]} of model 0 gives is computed nowhere in model "
            f"{work.k}, as far as it can be told which weights correspond"
        )
    if not all(_agree(a, b, bound) for a, b in zip(ours, theirs, strict=True)):
        raise Differs(
            f"{what} the weights of model {work.k} in the graph of model 0 do not compute the same"
        )


class _AtCut:
    """Keeps the values of some nodes, as they are when the trunk has run."""

    def __init__(self, last: int, places: Collection[int]) -> None:
        self.last, self.places = last, places
        self.values: dict[int, list[Tensor]] = {}

    def __call__(self, index: int, env: Mapping[fx.Node, Any]) -> None:
        if index == self.last:
            values = list(env.values())  # of the nodes that have run, in their order
            for i in self.places:
                found = [t for t in leaves(values[i]) if isinstance(t, Tensor)]
                self.values[i] = [t.clone() for t in found if t.numel()]


class _Seeking(TorchDispatchMode):
    """Looks for values among all that is computed, in any shape.

    wanted: what was not found yet.
    """

    def __init__(self, values: Mapping[int, list[Tensor]], bound: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted = {i: list(tensors) for i, tensors in values.items() if tensors}
        self.bound = bound

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.wanted:
            self.wanted = {
                i: left
                for i, tensors in self.wanted.items()
                if (left := [t for t in tensors if not self._is_in(t, result)])
            }
        return result

    def _is_in(self, wanted: Tensor, result: Any) -> bool:
        return any(
            isinstance(t, Tensor)
            and t.numel() == wanted.numel()
            and _agree(_wide(t).reshape(-1), _wide(wanted).reshape(-1), self.bound)
            for t in tree_leaves(result)
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
    after: Callable[[int, Mapping[fx.Node, Any]], None] | None = None,
    exact: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """The output's tensors, in float64; after: called when a node has run."""
    wide, given = module, clone_tensors(tuple(inputs))
    if dtype is not None:
        values = [(exact or {}).get(t.data_ptr(), t) for t in named_tensors(module).values()]
        wide, given = copy.deepcopy(module), map_tensors(widened, given)
        for t, value in zip(named_tensors(wide).values(), values, strict=True):
            t.data = widened(value.data)  # `to` would drop imaginary parts
    with torch.no_grad(), untouched(named_tensors(wide).values()), as_caller(), Wide(dtype):
        result = _Runner(wide, after).run(*given)
    return [_wide(t) for t in leaves(result) if isinstance(t, Tensor)]


class _Runner(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, after: Callable[[int, Mapping[fx.Node, Any]], None] | None
    ) -> None:
        super().__init__(module, garbage_collect_values=after is None)
        self.extra_traceback = False
        self.after = after
        self.at = {node: i for i, node in enumerate(self.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        with decomposed(leaf):
            result = super().run_node(n)
        if self.after is not None:
            self.env[n] = result
            self.after(self.at[n], self.env)
        return result


def _wide(t: Tensor) -> Tensor:
    return widened(t) if inexact(t) else t.double()
