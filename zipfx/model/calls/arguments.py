"""Arguments: what a model's forward is given, as values that a graph takes one by one.

A graph has one placeholder for each value.  `*args` and `**kwargs` have none of their own: what
they hold on the example inputs are further placeholders, under their own names.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure

from zipfx.model.copies import structural_copy, views
from zipfx.model.running import untouched
from zipfx.model.tensors import leaves, map_tensors
from zipfx.modes import as_caller

#: what batches hold for a loss, going by its name
_LABELS = re.compile(r"(^|_)(labels?|targets?|label_ids)$|^(start|end)_positions$")
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Argument:
    """One value that forward is given; default: () or (value,), as in a placeholder; by_name: it
    can not be given by its place; annotation: of its type, if there is one."""

    name: str
    default: tuple[Any, ...] = ()
    by_name: bool = False
    annotation: Any = None


def in_order(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """One value for every argument of forward, defaults included, as a graph takes them, and the
    names of the last of them, those that can only be given by name.

    Raises:
        TypeError: they are not its arguments.

    >>> in_order(lambda x, y=2, *, flag=True, **others: None, [1], {"more": 4})
    ((1, 2, True, 4), ('flag', 'more'))
    """
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values()), tuple(bound.kwargs)


def spelled(
    forward: Callable[..., Any], values: Sequence[Any], by_name: Sequence[str]
) -> list[Argument]:
    """The arguments of forward that these values are (as `in_order` gives them).

    Raises:
        TypeError: they are not its arguments.
    """
    count = len(values) - len(by_name)
    signature = inspect.signature(forward)
    bound = signature.bind(*values[:count], **dict(zip(by_name, values[count:], strict=True)))
    bound.apply_defaults()
    found: list[Argument] = []
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        known = parameter.default is not inspect.Parameter.empty
        default = (parameter.default,) if known else ()
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found += [Argument(f"{name}_{i}") for i in range(len(value))]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found += [Argument(key, by_name=True) for key in value]
        else:
            by_place = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            typed = parameter.annotation is not inspect.Parameter.empty
            annotation = parameter.annotation if typed else None
            found.append(Argument(name, default, not by_place, annotation))
    return found


def call(function: Callable[..., Any], values: Sequence[Any], arguments: Sequence[Argument]) -> Any:
    """What a function gives for these values."""
    pairs = list(zip(values, arguments, strict=True))
    return function(
        *(v for v, a in pairs if not a.by_name), **{a.name: v for v, a in pairs if a.by_name}
    )


def surplus(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[set[str], list[str]]:
    """Which entries of a batch are no inputs of the merged model, and notes that say so.

    What forward does not take is left out, and so is what it can do without and gives a loss for:
    entries that are called labels, and those without which it gives the same outputs, only fewer.
    Else they would be needed wherever the merged model is called.
    """
    unknown, labels = left_out(model.forward, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in unknown | labels}
    parameters = inspect.signature(model.forward).parameters
    spare = [k for k in rest if k not in parameters or parameters[k].default is None]
    asked = [k for k in spare if rest[k] is not None]
    more = _tried(model, args, rest) if spare else None
    for name in asked:
        fewer = _tried(model, args, {k: v for k, v in rest.items() if k != name})
        if _adds_outputs(more, fewer):
            labels.add(name)
            del rest[name]
            more = fewer
    idle = {
        k
        for k in rest
        if k not in parameters and _same(more, _tried(model, args, {**rest, k: _Unread()}))
    }
    notes = []
    if unknown:
        notes.append(f"forward takes no {_list(unknown)}, which batches hold: left out")
    if labels:
        notes.append(
            f"batches hold {_list(labels)}, without which forward gives its outputs as well (they "
            "are for a loss): left out, so that the merged model is called without"
        )
    if idle:
        notes.append(f"batches hold {_list(idle)}, which forward takes and does not read: left out")
    return unknown | labels | idle, notes


def left_out(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Which entries of a batch forward does not take, and which it can do without and are called
    labels."""
    parameters = inspect.signature(forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind not in _SEVERAL}
    unknown = {name for name in kwargs if name not in named} if not open_ended else set()
    spare = (
        name
        for name, value in kwargs.items()
        if name not in unknown
        and value is not None
        and (named[name].default is None if name in named else open_ended)
    )
    return unknown, {name for name in spare if _LABELS.search(name)}


def given(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """The names of the arguments that forward is given, but for those that are None.

    Raises:
        TypeError: they are not its arguments.

    >>> sorted(given(lambda x, mask=None, **more: None, [1], {"mask": None, "n": 2}))
    ['n', 'x']
    """
    signature = inspect.signature(forward)
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        several = signature.parameters[name].kind
        if several is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif several is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}_{i}": v for i, v in enumerate(value)}
        else:
            found[name] = value
    return {name for name, value in found.items() if value is not None}


#: the structure and the tensors that a run gives; None: it fails
_Given = tuple[Any, list[Tensor]] | None


class _Unread:
    """In the place of a value that nobody looks at."""


def _tried(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Given:
    """The structure and the tensors that forward gives; None: it fails."""
    home = next((t.device for t in model.parameters()), None)
    twin = structural_copy(model)
    own = copy.deepcopy(twin, views(twin))
    mine = map_tensors(lambda t: t.to(home, copy=True), (tuple(args), dict(kwargs)))
    weights = [*twin.parameters(), *twin.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), untouched(weights), as_caller():
            result = own(*mine[0], **mine[1])
    except Exception:  # whatever it can not do without, or not with
        return None
    return tree_structure(result), [t for t in leaves(result) if isinstance(t, Tensor)]


def _list(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _same(ours: _Given, theirs: _Given) -> bool:
    """Whether two runs are known to have given the same."""
    if ours is None or theirs is None:
        return False
    return ours[0] == theirs[0] and all(map(torch.equal, ours[1], theirs[1]))


def _adds_outputs(more: _Given, fewer: _Given) -> bool:
    """Whether a run gave more tensors with an argument than one without, on the same batch."""
    if more is None or fewer is None:  # nothing is known
        return False
    shapes, left = ([t.shape for t in tensors] for _, tensors in (more, fewer))
    return more[0] != fewer[0] and len(shapes) > len(left) and _subsequence(left, shapes)


def _subsequence(few: Sequence[Any], many: Sequence[Any]) -> bool:
    left = iter(many)
    return all(any(x == y for y in left) for x in few)
