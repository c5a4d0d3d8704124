"""Sizes: what torch.export took for granted of the sizes of inputs, as a check in the graph.

It writes that down as text such as `L['x'].size()[1] % 2 == 0`. Such a condition is kept in the
graph as it is, and is worked out, not run: integers, their arithmetic, comparisons, nothing else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zipfx.errors import ZipError

_ARITHMETIC: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_FUNCTIONS: dict[str, Any] = {"sym_min": min, "sym_max": max, "min": min, "max": max}


def holds(condition: str, inputs: Mapping[str, Any]) -> bool:
    """Whether a condition holds for inputs (`L` in it), by their names.

    Raises:
        ValueError: it is none that is understood.

    >>> import torch
    >>> holds("L['x'].size()[1] % 2 == 0", {"x": torch.zeros(3, 4)})
    True
    >>> holds("L['x'].size()[0] >= 4", {"x": torch.zeros(3, 4)})
    False
    """
    return bool(_value(ast.parse(condition, mode="eval").body, inputs))


def _value(node: ast.AST, inputs: Mapping[str, Any]) -> Any:
    def of(part: ast.AST) -> Any:
        return _value(part, inputs)

    match node:
        case ast.Constant(value=int() | str() | None as value):
            return value
        case ast.Name(id="L"):
            return inputs
        case ast.Subscript(value=whole, slice=key):
            return of(whole)[of(key)]
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[]):
            return tuple(_tensor(of(tensor)).shape)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=parts) if (
            name in _FUNCTIONS
        ):
            return _FUNCTIONS[name](*map(of, parts))
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](of(a), of(b))
        case ast.UnaryOp(op=op, operand=a) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](of(a))
        case ast.Compare(left=a, ops=ops, comparators=others) if all(
            type(op) in _ARITHMETIC for op in ops
        ):
            values = [of(a), *map(of, others)]
            pairs = zip(ops, values, values[1:])
            return all(_ARITHMETIC[type(op)](x, y) for op, x, y in pairs)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(map(of, parts))
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(map(of, parts))
    raise ValueError(f"not understood: {ast.dump(node)}")


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"a {type(value).__name__} has no sizes")
    return value


def understood(conditions: Sequence[str], inputs: Mapping[str, Any]) -> bool:
    """Whether all conditions can be worked out, and hold for the inputs they came from.

    >>> import torch
    >>> understood(["L['x'].size()[0] == 3"], {"x": torch.zeros(3)}), understood(["f()"], {})
    (True, False)
    """
    try:
        return all(holds(condition, inputs) for condition in conditions)
    except (ValueError, KeyError, IndexError, TypeError, SyntaxError, ZeroDivisionError):
        return False


def expect_sizes(values: Sequence[Any], names: str, traced: str, *conditions: str) -> None:
    """Refuse inputs of sizes for which forward may go another way than it was traced.

    names: of the values, joined by ", "; traced: the sizes that it was traced with.

    >>> import torch
    >>> expect_sizes([torch.zeros(2)], "x", "x: (3,)", "L['x'].size()[0] == 3")
    Traceback (most recent call last):
    zipfx.errors.ZipError: the models were traced by torch.export for other sizes: ...
    """
    inputs = dict(zip(names.split(", "), values))
    for condition in conditions:
        if not understood([condition], inputs):
            given = ", ".join(
                f"{name}: {tuple(x.shape)}" for name, x in inputs.items() if isinstance(x, Tensor)
            )
            raise ZipError(
                f"the models were traced by torch.export for other sizes: with {traced} forward "
                f"takes it that {condition.replace('L[', 'inputs[')}, which does not hold for "
                f"{given}. Merge with example_inputs of such sizes, or say which sizes may change: "
                "front=zipfx.Export(dynamic_shapes=...)"
            )
