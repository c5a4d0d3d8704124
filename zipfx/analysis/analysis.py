"""Analysis: trace, interpret, group, verify; the feature spaces of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from zipfx.analysis.grouping.build_map import find_spaces
from zipfx.analysis.grouping.classes import group
from zipfx.analysis.grouping.grouping import Grouping
from zipfx.analysis.interpret import interpret
from zipfx.analysis.labels.facts import Facts
from zipfx.analysis.labels.labels import Kind
from zipfx.analysis.spaces.space_map import SpaceMap
from zipfx.analysis.spaces.values import NodeInfo
from zipfx.analysis.verify import failing_spaces
from zipfx.checks import flag, whole
from zipfx.errors import ZipError, first_line
from zipfx.model.calls.arguments import in_order
from zipfx.model.contents import check_visible
from zipfx.model.graph_module import plain
from zipfx.modes import own_modes
from zipfx.trace import Front, TracedModels, front_of, trace, unpacked, unwrapped
from zipfx.trace.nodes import module_path


@dataclass(frozen=True)
class Analysis:
    """A traced model, the facts of its interpretation, and the spaces that they give.

    held: labels that are pinned for other reasons than labels know, and why; crossing: nodes whose
    values leave the trunk.
    """

    module: fx.GraphModule
    facts: Facts
    grouping: Grouping
    spaces: SpaceMap
    held: Mapping[int, str] = field(default_factory=dict)

    crossing: tuple[int, ...] = ()

    def cut(self, last: int) -> Analysis:
        """The same facts, seen only by the trunk that ends with the node of index `last`."""
        nodes = list(self.module.graph.nodes)
        at = {node: i for i, node in enumerate(nodes)}
        left = self.facts.until(last).nodes
        crossing = tuple(
            i
            for i, node in enumerate(nodes[: last + 1])
            if left[i].kind == Kind.DATA and any(at[user] > last for user in node.users)
        )
        return replace(self, crossing=crossing)._regroup(last)

    @property
    def writes_inputs(self) -> bool:
        """Whether the model writes into what it is given."""
        nodes = list(self.module.graph.nodes)
        inputs = {i for i, n in enumerate(nodes) if n.op == "placeholder"}
        return any(inputs & fact.writes for fact in self.facts.nodes)

    def pin(self, names: Collection[str], reason: str) -> Analysis:
        """The same analysis with the features of these spaces left where they are."""
        chosen = [i for i, space in enumerate(self.spaces) if space.name in names]
        of = self.grouping.space[self.grouping.vertex]
        held = dict.fromkeys(np.flatnonzero(np.isin(of, chosen)).tolist(), reason)
        size = {s.name: s.size for s in self.spaces}
        note = tuple(f"space {name!r} ({size[name]} features): {reason}" for name in sorted(names))
        facts = replace(self.facts, notes=(*self.facts.notes, *note))
        return replace(self, facts=facts, held={**self.held, **held})._regroup(self.grouping.last)

    def _regroup(self, last: int) -> Analysis:
        grouping = group(self.facts, last, self.held, self.crossing)
        spaces = _find_spaces(self.module, self.facts, grouping, self.held)
        return replace(self, grouping=grouping, spaces=spaces)


def as_inputs(example_inputs: Any) -> tuple[Any, ...]:
    """Positional arguments: a tuple as it is, anything else is the only argument."""
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


@own_modes()
def analyze(
    model: nn.Module,
    example_inputs: Any,
    *,
    verify: bool = True,
    seed: int = 0,
    tracer: fx.Tracer | None = None,
    front: str | Front = "auto",
) -> SpaceMap:
    """Find the feature spaces of a model; the model is left unchanged.

    Args:
        model: a module that `torch.fx` or `torch.export` can trace, or an `ExportedProgram`.
        example_inputs: the input (a tensor), a tuple of positional arguments, or a dict of
            arguments by name. Any batch size.
        verify: permute every space in float64 and compare; what changes the function is pinned.
        seed: of the permutations that verification draws (global RNG state is left alone).
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
        front: what makes a graph of the model, see `zip`.

    Returns:
        A `SpaceMap`: an iterable of spaces; `.pinned` says what is left fixed and why.

    Raises:
        ZipError: the model can not be traced or copied, or fails on `example_inputs`.

    Source: the label interpretation replaces the hand-written graphs of ZipIt! (Stoica et al.,
    ICLR 2024, section 4.3).

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> [(s.name, s.size) for s in analyze(net, torch.randn(4, 3))]
    [('0', 8)]
    """
    (model,) = unwrapped([model])
    check_visible(model, "the model")
    verify = flag("verify", verify)
    seed = whole("seed", seed) % 2**64
    named = isinstance(example_inputs, Mapping)
    args, kwargs = ((), example_inputs) if named else (as_inputs(example_inputs), {})
    try:
        inputs, by_name = in_order(model.forward, args, kwargs)
    except TypeError as error:
        raise ZipError(f"example_inputs do not fit the model's forward: {error}") from error
    module = trace(model, tracer, inputs=inputs, by_name=by_name, front=front_of(front))
    return run_analysis(module, inputs, verify=verify, seed=seed).spaces


def run_analysis(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    verify: bool = True,
    seed: int = 0,
    given: str = "example_inputs",
) -> Analysis:
    """`analyze` for a traced module, keeping the facts that later stages need; given: what messages
    call the inputs."""
    devices = sorted({t.device.index or 0 for t in module.parameters() if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            facts = interpret(module, inputs)
        except ZipError:
            raise
        except Exception as error:
            raise ZipError(
                f"the traced model fails on {given}: {first_line(error)}. Pass inputs that the "
                "model itself accepts"
            ) from error
        grouping = group(facts)
        found = Analysis(module, facts, grouping, _find_spaces(module, facts, grouping, {}))
        return checked(found, inputs, seed=seed) if verify else found


def analyze_trunk(traced: TracedModels, *, verify: bool = True, seed: int = 0) -> Analysis:
    """`run_analysis` of the first of K models that correspond, as seen by their trunk; this may end
    some nodes later, where a tuple that it makes has been taken apart."""
    module, given = traced.modules[0], traced.given
    if traced.last == len(module.graph.nodes) - 1:
        return run_analysis(module, traced.inputs, verify=verify, seed=seed, given=given)
    found = run_analysis(module, traced.inputs, verify=False, given=given)
    tuples = [i for i, f in enumerate(found.facts.nodes) if f.values and not f.is_tensor]
    found = found.cut(unpacked(traced.modules, traced.last, tuples))
    return checked(found, traced.inputs, seed=seed) if verify else found


def _find_spaces(
    module: fx.GraphModule, facts: Facts, grouping: Grouping, held: Mapping[int, str]
) -> SpaceMap:
    spaces = find_spaces(module.graph, facts, grouping, held)
    return replace(spaces, nodes=_data_nodes(module, facts))


def _data_nodes(module: fx.GraphModule, facts: Facts) -> tuple[NodeInfo, ...]:
    """The nodes that data runs through: not those of shapes, constants and weights."""
    pairs = zip(module.graph.nodes, facts.nodes, strict=True)
    kept = {node: _label(module, node) for node, fact in pairs if fact.kind == Kind.DATA}
    return tuple(
        NodeInfo(
            node.name,
            label,
            module_path(node),
            tuple(i.name for i in node.all_input_nodes if i in kept),
        )
        for node, label in kept.items()
    )


def _label(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{type(module.get_submodule(str(node.target))).__name__} {plain(str(node.target))}"
    if node.op == "placeholder":
        return f"input {node.target}"
    if isinstance(node.target, str):  # a method, a buffer, the output
        return plain(node.target)
    name = str(getattr(node.target, "__name__", node.target))
    return name.removesuffix(".default")


def checked(found: Analysis, inputs: Sequence[Any], *, seed: int = 0) -> Analysis:
    """Permute every space numerically; pin and report those that change the function.

    Of a trunk the values that leave it are compared, in their new order.
    """
    if not len(found.spaces):
        return found
    nodes = list(found.module.graph.nodes)
    keep = [nodes[i].name for i in found.crossing if found.facts.nodes[i].is_tensor] or None
    last = nodes[found.grouping.last].name if keep else None
    written = found.facts.written(len(nodes) - 1)

    def failing(*, wide: bool) -> set[str]:
        return failing_spaces(
            found.module, found.spaces, inputs, written, keep, last, seed, wide=wide
        )

    try:
        bad = failing(wide=True)
    except ZipError:
        raise
    except Exception as error:  # of code of others, which may want another dtype
        try:
            bad = failing(wide=False)
        except Exception:
            raise ZipError(
                "the analysis can not be checked numerically, since the model does not run in "
                f"float64: {first_line(error)}. Pass verify=False to do without the check"
            ) from error
        note = f"checked in its own dtype, as it does not run in float64: {first_line(error)}"
        found = replace(found, facts=replace(found.facts, notes=(*found.facts.notes, note)))
        found = found._regroup(found.grouping.last)
    reason = "pinned by the numeric check: permuting it changed the function"
    return found.pin(bad, reason) if bad else found
