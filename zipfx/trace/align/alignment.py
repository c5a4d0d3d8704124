"""Alignment: models that compute the same, but are written differently, become one architecture.

Two checkpoints of one network may come from different code: another library, `nn.ReLU` or
`F.relu`, a dropout more or less, another eps of the BatchNorms.  What their graphs compute is
numbered (`numbering`), so that it is known which weights correspond.  Then every model gets the
graph and the modules of the first one, with its own weights, up to the cut; its head stays its own.
Whether that computes what the model computed is checked on the example inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from zipfx.errors import ZipError
from zipfx.model.graph_module import NAMED, plain
from zipfx.trace.align.adopt import Differs, Work, adopted
from zipfx.trace.align.correspond import differing, mismatch
from zipfx.trace.align.cut import last_node
from zipfx.trace.align.likeness import ambiguous, likened
from zipfx.trace.align.numbering import Numbers, number
from zipfx.trace.nodes import describe, module_paths


@dataclass(frozen=True)
class Aligned:
    """The models, with nodes that correspond one by one up to index `last`; notes of what was
    passed over."""

    modules: list[fx.GraphModule]
    last: int
    notes: list[str]


def aligned(
    modules: Sequence[fx.GraphModule], last: int, inputs: Sequence[Any], partial: str | None
) -> Aligned:
    """Give all models the nodes of the first one, up to the cut.

    Args:
        modules: traced models; last: index of the last node of the trunk, in the first of them.
        inputs: one value for each placeholder.

    Raises:
        ZipError: they do not compute the same; the message names the last cut that works.
    """
    odd = {k: m for k, m in enumerate(modules) if k and _is_odd(modules[0], m, last)}
    for k, module in odd.items():
        _check_inputs(modules[0], module, k)
    notes = [
        note
        for k, module in enumerate(modules)
        if k and k not in odd and partial is not None
        for note in _split(modules[0], module, k, last, partial)
    ]
    if not odd:
        return Aligned(list(modules), last, notes)
    ours = number(modules[0], inputs)
    theirs = {k: likened(modules[0], ours, m, inputs, last) for k, m in odd.items()}
    work = _Alignment(modules, ours, theirs, inputs)
    last, more = (last, []) if partial is None else _cut(work, partial, last)
    work.check(last)
    found = list(modules)
    for k, (module, told) in work.adopted(last).items():
        found[k] = module
        notes += told
    notes += more
    return Aligned(found, last, notes)


def _is_odd(first: fx.GraphModule, other: fx.GraphModule, last: int) -> bool:
    return mismatch(first, other, last) is not None or bool(_swapped(first, other, last))


def _swapped(first: fx.GraphModule, other: fx.GraphModule, last: int) -> list[tuple[str, str]]:
    """Names that two models of one graph have in other places: the order in which branches are
    evaluated may differ."""
    pairs = [
        (str(x.target), str(y.target))
        for x, y in zip(first.graph.nodes, other.graph.nodes, strict=False)
        if x.op in NAMED and y.op in NAMED
    ]
    ours, theirs = {x for x, _ in pairs}, {y for _, y in pairs}
    count = sum(node.op in NAMED for node in list(first.graph.nodes)[: last + 1])
    return [(x, y) for x, y in pairs[:count] if x != y and x in theirs and y in ours]


def _check_inputs(first: fx.GraphModule, other: fx.GraphModule, k: int) -> None:
    """Check that a model takes what the first one takes, one by one, with the same defaults."""
    ours, theirs = ([n for n in m.graph.nodes if n.op == "placeholder"] for m in (first, other))
    for x, y in zip(ours, theirs, strict=False):
        if (x.users or y.users) and str(x.args) != str(y.args):
            raise ZipError(
                f"models 0 and {k} do not correspond at their inputs {str(x.target)!r} and "
                f"{str(y.target)!r}: default {x.args} against {y.args}. Give them one signature"
            )
    for y in theirs[len(ours) :]:
        if y.users:
            raise ZipError(
                f"model {k} uses an input {str(y.target)!r}, and model 0 has no such: give them "
                "one signature"
            )


def _split(
    first: fx.GraphModule, other: fx.GraphModule, k: int, last: int, partial: str
) -> list[str]:
    """A note where a cut lies inside the stage of the same name in another model."""
    beyond = list(other.graph.nodes)[last + 1 :]
    if any(partial in module_paths(node) for node in beyond):
        return [f"the cut after {partial!r} of model 0 lies inside {partial!r} of model {k}"]
    return []


@dataclass(frozen=True)
class _Alignment:
    """Up to where models compute the same.

    ours: numbers of model 0; theirs: of those that are written differently from it; inputs: one
    value for each placeholder.
    """

    modules: Sequence[fx.GraphModule]
    ours: Numbers
    theirs: Mapping[int, Numbers]
    inputs: Sequence[Any]

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """Those of model 0."""
        return list(self.modules[0].graph.nodes)

    @cached_property
    def end(self) -> dict[int, int]:
        """The first node with a weight that a model does not use in this way."""
        known = {k: {use.number for use in found.uses} for k, found in self.theirs.items()}
        return {
            k: min(
                (u.node for u in self.ours.uses if u.number not in numbers),
                default=len(self.nodes),
            )
            for k, numbers in known.items()
        }

    def check(self, last: int) -> None:
        """Raise ZipError where the models compute different things before the cut."""
        whole = last == len(self.nodes) - 1
        for k, found in self.theirs.items():
            if self.end[k] <= last or (whole and self.ours.gives[-1] != found.gives[-1]):
                raise _different(self, k, last)

    def adopted(self, last: int) -> dict[int, tuple[fx.GraphModule, list[str]]]:
        """The models that are to have the nodes of model 0 up to the cut, and notes.

        Raises:
            ZipError: they would not compute what they compute; it names a cut at which they do.
        """
        try:
            return self._adopted(last)
        except Differs as error:
            works = self.last_that_works(last)
            advice = f"the last cut that works is partial={works!r}" if works else "no cut works"
            raise ZipError(f"{error}. Use one implementation for all, or {advice}") from None

    def _adopted(self, last: int) -> dict[int, tuple[fx.GraphModule, list[str]]]:
        first, found = self.modules[0], {}
        left = number(first, self.inputs, last)
        must = self._must_be_there(last)
        for k, numbers in self.theirs.items():
            why = mismatch(first, self.modules[k], last)
            if why is None:
                swapped = _swapped(first, self.modules[k], last)
                if not self._are_apart(k, swapped, last):
                    continue
                why = f"{swapped[0][1]!r} comes where model 0 has {swapped[0][0]!r}"
            work = Work(self.modules, k, last, self.ours, numbers, left, why)
            found[k] = adopted(work, self.inputs, must)
        return found

    def _must_be_there(self, last: int) -> list[int]:
        """The nodes of model 0 whose values every model must have: the cut, and what is read behind
        it and depends on weights of like use, of which it is not sure yet which is which."""
        at = {node: i for i, node in enumerate(self.nodes)}
        doubtful = ambiguous(self.modules[0], self.ours)
        return [
            i
            for i, node in enumerate(self.nodes[: last + 1])
            if node.op not in ("placeholder", "get_attr")
            and any(at[user] > last for user in node.users)
            and (i == last or i in doubtful)
        ]

    def _are_apart(self, k: int, swapped: Sequence[tuple[str, str]], last: int) -> bool:
        """Whether other weights correspond than those in the same places of the two graphs."""
        other = {use.number: use.name for use in self.theirs[k].uses}
        pairs = {(u.name, other.get(u.number, "")) for u in self.ours.uses if u.node <= last}
        return any(_is_in(a, x) and not _is_in(b, y) for x, y in swapped for a, b in pairs)

    def last_that_works(self, last: int) -> str | None:
        """The outermost module of model 0 that ends last among those that could be the cut."""
        first = min(last, *self.end.values())
        ends: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            ends.update({path: i for path in module_paths(node) if path})
        start = min((use.node for use in self.ours.uses), default=last)
        for end in sorted({end for end in ends.values() if start <= end < first}, reverse=True):
            if self._works(end):
                paths = [path for path, found in ends.items() if found == end]
                return min(paths, key=lambda path: path.count("."))
        return None

    def _works(self, end: int) -> bool:
        try:
            self._adopted(end)
        except (Differs, ZipError):
            return False
        return True


def _is_in(name: str, path: str) -> bool:
    return name == plain(path) or name.startswith(f"{plain(path)}.")


def _cut(work: _Alignment, partial: str, last: int) -> tuple[int, list[str]]:
    """The last node of the trunk: an earlier one where a stage of the same name is shorter in
    another model."""
    ends, notes = [last], []
    for k in work.theirs:
        if work.end[k] > last:
            notes += _split_by_number(work, k, partial, last)
            continue
        shorter = _shorter(work, k, partial, last)
        if shorter is not None:
            ends.append(shorter)
            notes.append(
                f"{partial!r} of model {k} is shorter than that of model 0: the cut lies "
                f"inside the latter, after {describe(work.nodes[shorter])}"
            )
    return min(ends), notes


def _shorter(work: _Alignment, k: int, partial: str, last: int) -> int | None:
    """The node of model 0 that computes what the stage of this name gives in model k."""
    try:
        end = last_node(work.modules[k], partial)
    except ZipError:
        return None
    value = work.theirs[k].gives[end]
    found = [
        i
        for i in range(min(last, work.end[k] - 1) + 1)
        if work.ours.gives[i] == value and partial in module_paths(work.nodes[i])
    ]
    return max(found, default=None)


def _split_by_number(work: _Alignment, k: int, partial: str, last: int) -> list[str]:
    """As `_split`, of a model that is written differently."""
    nodes, gives = work.modules[k].graph.nodes, work.theirs[k].gives
    known = set(work.ours.gives[: last + 1])
    late = [n for n, v in zip(nodes, gives, strict=True) if v not in known]
    if any(partial in module_paths(n) for n in late if n.op == "call_module"):
        return [f"the cut after {partial!r} of model 0 lies inside {partial!r} of model {k}"]
    return []


def _different(work: _Alignment, k: int, last: int) -> ZipError:
    """What to say of models that compute different things before the cut."""
    first, other = work.modules[0], work.modules[k]
    ours, theirs = work.ours.gives, work.theirs[k].gives
    known, mine, nodes = set(theirs), set(ours), list(other.graph.nodes)
    i = next((i for i, v in enumerate(ours[: last + 1]) if v not in known), last)
    j = next((j for j, v in enumerate(theirs) if v not in mine), len(nodes) - 1)
    x, y = work.nodes[i], nodes[j]
    what = differing(first, x, other, y)
    works = work.last_that_works(last)
    advice = (
        f"Up to there they are alike: the last cut that works is partial={works!r}"
        if works
        else "They have no layer in common that could be shared: only models of one "
        "architecture can be zipped"
    )
    if what is None:  # what they do is the same, but not with which weights
        shared = mismatch(first, other, last)
        return ZipError(
            f"models 0 and {k} do not correspond: {shared}. Tie or untie them alike. {advice}"
        )
    return ZipError(
        f"models 0 and {k} do not correspond at {describe(x)} of model 0 and "
        f"{describe(y)} of model {k}: {what}. {advice}"
    )
