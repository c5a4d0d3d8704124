"""Where nodes of a merge come from: said when they are made, and changed word by word."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import fx, nn

from tests.helpers.pairs import data, merge, pair
from zipfx.merge.origin import Origin, mark, origin_of


def test_a_node_of_another_graph_has_none() -> None:
    node = fx.Graph().placeholder("x")
    assert origin_of(node) == Origin()
    node.meta["zipfx"] = {"head": 1}
    assert origin_of(node) == Origin()


def test_what_is_not_said_stays() -> None:
    node = fx.Graph().placeholder("x")
    mark(node, head=1, source="x")
    mark(node, baked=True)
    assert origin_of(node) == Origin(head=1, source="x", baked=True)
    first = origin_of(node)
    mark(node, head=None)
    assert first.head == 1  # a value, which nobody changes
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.head = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="heads"):
        mark(node, heads=2)


@pytest.mark.parametrize("partial", [None, "0"])
def test_every_node_of_a_merge_says_where_it_is_from(partial: str | None) -> None:
    models: list[nn.Module] = pair()
    merged = merge(models, data(), partial=partial, matcher="permute")
    names = {n.name for n in fx.symbolic_trace(models[0]).graph.nodes}
    found = [(n, origin_of(n)) for n in merged.graph.nodes if n.op != "output"]
    assert {o.head for _, o in found} == ({None} if partial is None else {None, 0, 1})
    copied = [(n, o) for n, o in found if o.source is not None]
    assert len({(o.head, o.source) for _, o in copied}) == len(copied)
    assert {o.source for _, o in copied} <= names | {f"_{i}" for i in range(3)} | {"input_1"}
    put_between = [n for n, o in found if o.source is None]
    assert all(torch.index_select is n.target or n.op == "get_attr" for n in put_between)


def test_a_copy_of_a_merge_keeps_it() -> None:
    merged = merge(pair(), data(), partial="0")
    twin = copy.deepcopy(merged)
    for a, b in zip(merged.graph.nodes, twin.graph.nodes, strict=True):
        assert origin_of(a) == origin_of(b)
