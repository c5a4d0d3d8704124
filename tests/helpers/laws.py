"""What the laws of exactness compare: errors, bytes, random states, data."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import zipfx
from zipfx.model.tensors import as_real
from zipfx.trace.nodes import module_paths
from zipfx.trace.tracing import trace

EXACT = 1e-12  # relative, float64


def notes(merged: nn.Module, start: str) -> list[str]:
    """What the report of a merge says that begins like this."""
    report: Any = merged.meta["zipfx"]
    return [note for note in report.notes if note.startswith(start)]


@torch.no_grad()
def run(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """The model's output; it may write into its inputs."""
    return model(*copy.deepcopy(tuple(inputs)))


def error(expected: Any, found: Any) -> float:
    """Largest difference of two outputs of one structure, relative to each tensor's largest.

    Infinite entries must be the same in both.
    """
    ours, structure = tree_flatten(expected)
    theirs, other = tree_flatten(found)
    assert structure == other
    assert ours
    worst = 0.0
    for x, y in zip(ours, theirs, strict=True):
        x, y = x.detach(), y.detach()
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = as_real(x), as_real(y)
        finite = x.isfinite()
        assert torch.equal(x[~finite], y[~finite])
        x, y = x[finite].double(), y[finite].double()
        scale = x.abs().max()
        assert scale > 0
        gap = float((x - y).abs().max() / scale)
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def running_modules(model: nn.Module) -> list[str]:
    """Qualified names of all modules that run: every possible `partial=`."""
    paths = [path for node in trace(model).graph.nodes for path in module_paths(node)]
    return [path for path in dict.fromkeys(paths) if path]


def permuted(model: nn.Module, inputs: Sequence[Any], seed: int = 1) -> nn.Module:
    """The same function with every space permuted."""
    spaces = zipfx.analyze(model, copy.deepcopy(tuple(inputs)), verify=False)
    return spaces.permuted(model, spaces.random_permutations(seed))


def merge(models: Sequence[nn.Module], data: Iterable[Any], **options: Any) -> Any:
    """`zipfx.zip` on tuples of arguments, without repair or progress bars."""
    defaults = {"repair": "none", "progress": False, "batch_to_args": as_arguments}
    return zipfx.zip(models, data, **{**defaults, **options})


def as_arguments(batch: Any) -> Any:
    return batch


def heads_error(merged: Any, expected: Sequence[Any], inputs: Sequence[Any]) -> float:
    """Largest error over the heads of a partial zip, each also cut out by `zipfx.head`."""
    found = run(merged, inputs)
    assert isinstance(found, tuple)
    assert len(found) == len(expected)
    alone = [run(zipfx.head(merged, k), inputs) for k in range(len(expected))]
    return max(error(e, f) for e, f in zip([*expected, *expected], [*found, *alone], strict=True))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------ law 6
def state_bytes(model: nn.Module) -> dict[str, Any]:
    """All that a caller could notice of a model: bytes, identities, modes, hooks, gradients."""
    tensors = [*model.named_parameters(remove_duplicate=False)]
    tensors += [*model.named_buffers(remove_duplicate=False)]
    found: dict[str, Any] = {}
    for name, t in tensors:
        found[name] = (
            id(t),
            t.data_ptr(),
            t.dtype,
            t.requires_grad,
            None if t.grad is None else as_bytes(t.grad),
            as_bytes(t),
            t._version,
        )
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in vars(module) if kind.endswith("_hooks")]
        found[f"module {name}"] = (id(module), module.training, hooks, sorted(vars(module)))
    return found


def as_bytes(t: Tensor) -> bytes:
    return t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def random_states() -> tuple[Any, ...]:
    legacy = np.random.get_state()
    return (
        as_bytes(torch.get_rng_state()),
        random.getstate(),
        *(x.tobytes() if isinstance(x, np.ndarray) else x for x in legacy),
    )


def storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors in a module or an output."""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    leaves = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel()]
    return {t.untyped_storage().data_ptr() for t in leaves}


def unharmed(models: Sequence[nn.Module], action: Callable[[], Any]) -> Any:
    """Result (or exception) of an action, which must change neither models nor random states."""
    before, states = [state_bytes(m) for m in models], random_states()
    result: Any
    try:
        result = action()
    except Exception as raised:
        result = raised
    assert [state_bytes(m) for m in models] == before
    assert random_states() == states
    return result
