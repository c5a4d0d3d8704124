"""Record: what tracing knows of a graph beside its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from zipfx.model.calls.expect import Expectation

#: where a module has what zipfx knows of it: a `Record` if it was traced, a `Report` if zipped
KEY = "zipfx"


@dataclass(frozen=True)
class Record:
    """At `module.meta["zipfx"]` of a traced module.

    constants: names of tensors that forward wrote down as constants; notes: what the graph takes
    for granted, for the report; sets: attributes that forward sets; expects: what the graph expects
    of its inputs; front: what made it ("symbolic", "export", the name of a front of one's own, or
    "given": it came as a graph).
    """

    constants: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    expects: tuple[Expectation, ...] = ()
    front: str = "symbolic"


def record_of(module: nn.Module) -> Record:
    """The record of a traced module, an empty one of any other.

    >>> record_of(nn.ReLU())
    Record(constants=frozenset(), notes=(), sets=(), expects=(), front='symbolic')
    """
    meta: Any = getattr(module, "meta", {})
    found = meta.get(KEY) if isinstance(meta, dict) else None
    return found if isinstance(found, Record) else Record()
