"""Front: what every way to turn a module into a graph is given, and what its graph must be.

A front gives a `GraphModule` (`zipfx.model.graph_module`) in eval mode, in which

1. there is one placeholder for each argument of forward, defaults included, in their order, and the
   output has the structure of what forward returns;
2. every parameter and buffer has the name it has in the model, and is read by the module that is
   called, or by a `get_attr` node right before what uses it; parameters are the model's own unless
   the graph is to live on another device, buffers are copies;
3. `node.meta["nn_module_stack"]` leads to the modules that a node came from, outermost first;
4. no node asks for a dtype or a device that is that of the run only by chance;
5. `module.meta["zipfx"]` is a `Record`: constants that forward wrote down, what the graph takes for
   granted of its inputs, and notes for the report.

What the model itself is, is not touched. Whether the graph computes what the model computes is
checked behind every front (`tracing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from zipfx.model.calls.arguments import Argument
from zipfx.model.copies import structural_copy
from zipfx.model.graph_module import check_names
from zipfx.model.parametrized import fold
from zipfx.trace.record import KEY, Record


@dataclass(frozen=True, eq=False)
class Given:
    """What a model is traced with.

    values: one for each of forward's arguments, defaults included, on the device; None: there are
    none; device: where the graph is to live (None: where the model is); folded: whether weights
    that modules compute are plain ones (`parametrized.fold`).
    """

    values: Sequence[Any] | None = None
    arguments: Sequence[Argument] = ()
    device: torch.device | None = None
    folded: bool = False


class Front(Protocol):
    """A way to turn a module into a graph; see the module's docstring for what that must be."""

    def __call__(self, model: nn.Module, given: Given) -> fx.GraphModule:
        """The graph of a model.

        Raises:
            ZipError: there is none; the message names the line of forward, and what to do.
        """


def twin_of(model: nn.Module, given: Given) -> nn.Module:
    """What a front may work on: the model once more, on the device, in eval mode."""
    twin = structural_copy(model, share_parameters=given.device is None).to(given.device)
    if given.folded:
        fold(twin)
    return twin


def with_record(module: fx.GraphModule, twin: nn.Module, record: Record) -> fx.GraphModule:
    """The graph as the contract has it; constants are part of the code, not of the state."""
    module.meta[KEY] = record
    module._non_persistent_buffers_set = twin._non_persistent_buffers_set | record.constants
    module.eval()
    check_names(module, module.graph)
    module.graph.lint()
    return module
