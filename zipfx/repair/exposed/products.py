"""Products: `x @ weight`, which has the inputs of a layer in its rows, is a linear layer as well.

So are `Conv1D` of GPT-2 and its kin: x is flattened to two dimensions, multiplied, and given its
other dimensions back. The layer then reads x as it was, and its node is the last one of these.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from zipfx.trace.nodes import name_of

aten = torch.ops.aten
_MATMUL, _ADDMM = ("input", "weight"), ("bias", "input", "weight")
#: functions of the product of an input with a parameter, and the names of their arguments
PRODUCTS: dict[Any, tuple[str, ...]] = {
    torch.addmm: _ADDMM,
    aten.addmm.default: _ADDMM,
    **dict.fromkeys((torch.mm, torch.matmul, operator.matmul), _MATMUL),
    **dict.fromkeys((aten.mm.default, aten.matmul.default), _MATMUL),
    **dict.fromkeys((torch.einsum, aten.einsum.default), ()),  # see `_of_einsum`
}
_VIEWS = ("view", "reshape", "_unsafe_view")


def operands(node: fx.Node) -> dict[str, Any]:
    """What a product is of, by name; nothing, if it is scaled, or is none of x with one matrix.
    turned: of an einsum, whether the weight has its outputs first.

    >>> graph = fx.Graph()
    >>> x, weight = graph.placeholder("x"), graph.get_attr("weight")
    >>> operands(graph.call_function(torch.matmul, (x, weight)))
    {'input': x, 'weight': weight}
    """
    if node.kwargs:
        return {}
    if not PRODUCTS[node.target]:
        equation, *factors = node.args
        listed = factors[0] if len(factors) == 1 else factors
        return _of_einsum(equation, *listed) if isinstance(listed, Sequence) else {}
    return dict(zip(PRODUCTS[node.target], node.args))


def _of_einsum(equation: Any, *factors: Any) -> dict[str, Any]:
    """Of `...c,co->...o`, or with the factors or the letters of the weight the other way round.

    >>> _of_einsum("oc, bsc -> bso", "weight", "x")
    {'input': 'x', 'weight': 'weight', 'turned': True}
    >>> _of_einsum("bsc,cs->bs", "x", "weight")
    {}
    """
    given, _, result = str(equation).replace(" ", "").partition("->")
    parts = given.split(",")
    if not result or not len(parts) == len(factors) == 2:
        return {}
    for (x, w), (first, second) in zip((parts, parts[::-1]), (factors, factors[::-1]), strict=True):
        rest, c, o = x[:-1], x[-1:], result[-1:]
        if result == rest + o and w in (c + o, o + c) and c != o and not {c, o} & {*rest, "."}:
            return {"input": first, "weight": second, "turned": w == o + c}
    return {}


def unflattened(
    node: fx.Node, x: fx.Node, shapes: Mapping[str, Sequence[int]]
) -> tuple[fx.Node, fx.Node]:
    """The node that has what a product gives, and what it reads, as they are around a flattening to
    two dimensions; else the node, and x.

    shapes: of what nodes give, by their names.
    """
    (reader, *others) = node.users or (node,)
    if others or not (_is_view(x) and _is_view(reader)) or len(x.users) > 1:
        return node, x
    whole = x.args[0]
    if not isinstance(whole, fx.Node) or reader.args[0] is not node:
        return node, x
    if not {whole.name, reader.name, node.name} <= set(shapes):
        return node, x
    before, after = tuple(shapes[whole.name]), tuple(shapes[reader.name])
    if before[:-1] != after[:-1] or after[-1] != shapes[node.name][-1]:
        return node, x
    return reader, whole


def _is_view(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and name_of(node.target) in _VIEWS


def untransposed(node: Any) -> tuple[Any, bool]:
    """What a node is the transpose of (else the node), and whether it is one.

    >>> graph = fx.Graph()
    >>> weight = graph.get_attr("weight")
    >>> untransposed(graph.call_method("t", (weight,))), untransposed(weight)
    ((weight, True), (weight, False))
    """
    if not isinstance(node, fx.Node) or len(node.users) > 1 or not node.args or node.kwargs:
        return node, False
    turned = {
        "getattr": (("T",), ("mT",)),
        "t": ((),),
        "numpy_T": ((),),
        "transpose": ((0, 1), (1, 0), (-2, -1), (-1, -2)),
        "permute": (([1, 0],), (1, 0)),
    }.get(name_of(node.target), ())
    is_one = any(list(node.args[1:]) == list(rest) for rest in turned)
    return (node.args[0], True) if is_one else (node, False)


def layer_of_product(
    weight: nn.Parameter, bias: nn.Parameter | None, *, turned: bool = False
) -> nn.Linear:
    """x @ weight + bias, on the memory of both; turned: x @ weight.T."""
    own = nn.Parameter(weight.data if turned else weight.data.T, requires_grad=False)
    layer = nn.Linear(own.shape[1], own.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = own, bias  # type: ignore[assignment]
    return layer.eval()
