"""Register: teach the analysis an operation it does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from zipfx.analysis.labels.labels import Kind, Labels, positions
from zipfx.analysis.rules.call import Call, Rule, made_of_others, rule_of
from zipfx.analysis.rules.movement import IDENTITY, MOVEMENT, UNIFORM, movement
from zipfx.analysis.rules.pointwise import ALSO_POINTWISE, join, pointwise
from zipfx.errors import ZipError, first_line

#: rules of users; they come before everything that is built in
TAUGHT: dict[OpOverload, Rule] = {}

R = TypeVar("R", bound=Rule)


@overload
def register_rule(op: Any, rule: None = None, *, replace: bool = False) -> Callable[[R], R]: ...


@overload
def register_rule(op: Any, rule: Rule | str | OpOverload, *, replace: bool = False) -> Any: ...


def register_rule(op: Any, rule: Any = None, *, replace: bool = False) -> Any:
    """Teach the analysis how features pass through an operation, for the rest of the process.

    Args:
        op: an operator such as `torch.ops.mylib.scale.default`, or `torch.ops.mylib.scale` for
            all its overloads.
        rule: "pointwise": features pass, operands meet element by element after broadcasting;
            "movement": the op only moves elements (it is run on integer labels);
            another operator, such as `torch.ops.aten.linear.default`, one that is made of others
            (`torch.ops.aten.conv2d.default`) included: arguments of the same name mean the same
            (other numbers are ignored, other tensors are refused);
            or a function from a `Call` to the `Labels` of its result (a tuple for several), both in
            `zipfx.analysis.rules`. Left out: `register_rule(op)` decorates such a function.
        replace: whether the op may have a rule already.

    Returns:
        `rule`, or the decorator. What is taught wrongly is found by the numeric check of
        `zipfx.analyze` and pinned, as far as numbers can tell.

    Raises:
        ZipError: no such behaviour, not an operator, one that has a rule, or needs none.

    >>> import torch, zipfx
    >>> zipfx.register_rule(torch.ops.aten.relu.default, "pointwise")
    Traceback (most recent call last):
    zipfx.errors.ZipError: aten::relu has a rule already; pass replace=True to use yours instead
    """
    ops = _overloads(op)
    for each in ops:
        _check(each, replace)
    if rule is None:
        return lambda function: register_rule(op, function, replace=replace)
    made = {each: _as_rule(each, rule) for each in ops}
    TAUGHT.update(made)
    return rule


def taught(call: Call, targets: Sequence[Tensor]) -> tuple[Labels, ...]:
    """Labels of the tensors that a call makes or writes, by the rule registered for it, checked."""
    rule = TAUGHT[call.op]
    call = changed(call, result=targets[0] if len(targets) == 1 else tuple(targets))
    where = f"the rule registered for {call.op.name()} ({call.constraints.where})"
    try:
        found = rule(call)
    except ZipError:
        raise
    except Exception as error:
        raise ZipError(f"{where} fails: {type(error).__name__}: {first_line(error)}") from error
    labels = found if isinstance(found, tuple) else (found,)
    shapes = [tuple(y.shape) if isinstance(y, Labels) else type(y).__name__ for y in labels]
    wanted = [tuple(t.shape) for t in targets]
    if shapes != wanted:
        raise ZipError(f"{where} gives {shapes} for results of shapes {wanted}: one Labels each")
    return labels


def _overloads(op: Any) -> list[OpOverload]:
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    raise ZipError(
        f"{op!r} is not an operator: pass one such as torch.ops.mylib.scale.default, or "
        "torch.ops.mylib.scale for all its overloads"
    )


def _check(op: OpOverload, replace: bool) -> None:
    if _is_view(op):
        raise ZipError(f"{op.name()} gives a view: labels belong to the storage, it needs no rule")
    if made_of_others(op) and rule_of(op) is None:
        raise ZipError(
            f"{op.name()} is made of other operations, which the analysis sees: it needs no rule"
        )
    known = op in TAUGHT or op in UNIFORM or _built_in(op) is not None
    if known and not replace:
        raise ZipError(f"{op.name()} has a rule already; pass replace=True to use yours instead")


def _as_rule(op: OpOverload, rule: Any) -> Rule:
    if isinstance(rule, OpOverload):
        return _alike(op, rule)
    if isinstance(rule, str) and rule in _BEHAVIOURS:
        return _BEHAVIOURS[rule]
    if callable(rule) and not isinstance(rule, OpOverloadPacket):
        return lambda call: rule(_seen(call))
    raise ZipError(
        f"{rule!r} is no rule for {op.name()}: choose one of {sorted(_BEHAVIOURS)}, an operator "
        "that behaves alike (torch.ops.aten.linear.default), or a function of a "
        "zipfx.analysis.rules.Call"
    )


def _built_in(op: OpOverload) -> Rule | None:
    """What the analysis does with an operation by itself (None: not understood)."""
    if op in IDENTITY:
        return lambda call: call.of(call.tensors()[0])
    if op in MOVEMENT or _is_view(op):
        return _moved
    own = rule_of(op)
    if own is not None:
        return lambda call: own(_seen(call))
    if torch.Tag.pointwise in op.tags or op in ALSO_POINTWISE:
        return lambda call: pointwise(_seen(call))
    return None


def _is_view(op: OpOverload) -> bool:
    returns = (r.alias_info for r in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in returns)


def _seen(call: Call) -> Call:
    """Features that take part in a computation are told from those that do not."""
    for i, t in enumerate(call.tensors()):
        call.constraints.event(call.of(t).features, i)
    return call


def _results(call: Call) -> list[Tensor]:
    return [t for t in tree_leaves(call.result) if isinstance(t, Tensor)]


# ------------------------------------------------------------------ behaviours by name
def _pointwise(call: Call) -> tuple[Labels, ...]:
    operands = [tuple(t.shape) for t in call.tensors()]
    results = [tuple(t.shape) for t in _results(call)]
    try:
        shape = tuple(torch.broadcast_shapes(*operands))
    except RuntimeError:
        shape = None
    if any(result != shape for result in results):
        raise ZipError(
            f"{call.op.name()} is registered as 'pointwise', but operands of shapes {operands} "
            f"give {results} ({call.constraints.where})"
        )
    y = join(call.constraints, [call.of(t) for t in _seen(call).tensors()], shape or ())
    return (y,) * len(results)


def _moved(call: Call) -> Labels:
    """The operation run on the labels; its result must hold values of its operands, or zeros."""
    name, where = call.op.name(), call.constraints.where
    tensors = call.tensors()
    indices = tree_leaves((call.arg("indices"), call.arg("index")))
    numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    counts = [t for t in tensors if not any(t is n for n in numbers)] if numbers else []
    if any(all(t is not i for i in indices) for t in counts):
        raise ZipError(
            f"{name} is registered as 'movement', but takes integers beside what it moves "
            f"({where}): name the argument index or indices, or register a function"
        )
    if any(call.of(t).kind == Kind.DATA for t in counts):
        for t in numbers:
            call.constraints.pin(call.of(t).features, f"{name} moves by what depends on the input")
        (result,) = _results(call)
        return Labels(tuple(result.shape), (), positions(tuple(result.shape)))
    for result in _results(call):
        known = torch.cat([torch.zeros(1, device=result.device), *(t.reshape(-1) for t in numbers)])
        if not bool((torch.isin(result, known.to(result.dtype)) | result.isnan()).all()):
            raise ZipError(f"{name} is registered as 'movement', but makes new values ({where})")
    try:
        return movement(call)
    except Exception as error:
        raise ZipError(
            f"{name} is registered as 'movement', but can not be run on integer labels ({where}): "
            f"{first_line(error)}. Register a function, or an operator that behaves alike"
        ) from error


_BEHAVIOURS: dict[str, Rule] = {"pointwise": _pointwise, "movement": _moved}


# ------------------------------------------------------------------ behaviour of another operator
def _alike(op: OpOverload, other: OpOverload) -> Rule:
    rule = TAUGHT.get(other) or _built_in(other) or _composed(op, other)
    if rule is None:
        raise ZipError(f"{op.name()} can not be taught as {other.name()}, which has no rule itself")
    ours, theirs = ({a.name: a for a in o._schema.arguments} for o in (op, other))
    missing = [n for n, a in theirs.items() if n not in ours and not a.has_default_value()]
    extra = [n for n, a in ours.items() if n not in theirs and "Tensor" in str(a.type)]
    if missing or extra:
        raise ZipError(
            f"{op.name()} can not be taught as {other.name()}: arguments of the same name mean the "
            f"same; it has no {missing}, and {extra} would be ignored. Register a function"
        )

    def as_other(call: Call) -> Labels | tuple[Labels, ...]:
        bound = {n: call.arg(n) for n in ours if n in theirs}
        positional = [n for n, a in theirs.items() if not a.kwarg_only]
        args = tuple(bound.get(n, theirs[n].default_value) for n in positional)
        kwargs = {n: v for n, v in bound.items() if n not in positional}
        found = rule(changed(call, op=other, args=args, kwargs=kwargs))
        return found if isinstance(found, tuple) else (found,) * len(_results(call))

    return as_other


def _composed(op: OpOverload, other: OpOverload) -> Rule | None:
    """What the operations tell that an operator is made of: it is run on the same tensors."""
    if other._schema.is_mutable or not made_of_others(other):
        return None

    def through_others(call: Call) -> tuple[Labels, ...]:
        where = f"{op.name()} is registered as {other.name()} ({call.constraints.where})"
        try:
            found = call.see(other, *call.args, **call.kwargs)
        except Exception as error:
            raise ZipError(
                f"{where}, which does not take these arguments: {first_line(error)}. Register a "
                "function, or an operator that behaves alike"
            ) from error
        tensors = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        shapes, wanted = ([tuple(t.shape) for t in ts] for ts in (tensors, _results(call)))
        if shapes[: len(wanted)] != wanted:
            raise ZipError(
                f"{where}, but that gives {shapes} here, and {op.name()} {wanted}: numbers such as "
                "a stride are known by their names. Register a function"
            )
        return tuple(call.of(t) for t in tensors[: len(wanted)])

    return through_others
