"""Origin: where the nodes of a merge come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from zipfx.trace import KEY


@dataclass(frozen=True)
class Origin:
    """At `node.meta["zipfx"]` of a node of a merge; lost when the merge is pickled.

    head: the model whose head it is in (None: it is in the trunk); source: name of the node that it
    was copied from (None: it was put in between); baked: it reads a parameter in place of a weight
    that the model computes; title: what to call its layer, if not by its target; part: of a node
    that became several, (name of that, path of a parameter, first and last of the rows it applies).
    """

    head: int | None = None
    source: str | None = None
    baked: bool = False
    title: str | None = None
    part: tuple[str, str, int, int] | None = None


def origin_of(node: fx.Node) -> Origin:
    """What is known of a node; nothing, of one that is not of a merge.

    >>> node = fx.Graph().placeholder("x")
    >>> mark(node, head=1, source="x")
    >>> origin_of(node)
    Origin(head=1, source='x', baked=False, title=None, part=None)
    """
    found = node.meta.get(KEY)
    return found if isinstance(found, Origin) else Origin()


def mark(node: fx.Node, **changes: Any) -> None:
    """Let a node have another origin, but for what is not said."""
    node.meta[KEY] = replace(origin_of(node), **changes)
