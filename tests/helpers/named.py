"""Law 7 and copies, for models of any names: the state of a merge loads into their class."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import zipfx
from tests.helpers.laws import EXACT, error, merge, run

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)).double()


def made(kind: Callable[[], nn.Module], count: int = 2) -> list[nn.Module]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(kind().double().eval())
    return found


def check_law_7(kind: Callable[[], nn.Module], **options: Any) -> Any:
    """Merge two models that differ, and load what comes out into a third one."""
    models, inputs = made(kind), (X,)
    merged = merge(models, None if options else [inputs], **options)
    again = made(kind, 3)[2]
    again.load_state_dict(merged.state_dict())
    assert list(merged.state_dict()) == list(again.state_dict())
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in again.named_parameters()]
    assert error(run(merged, inputs), run(again, inputs)) < EXACT
    merged.load_state_dict(models[0].state_dict())
    assert error(run(models[0], inputs), run(merged, inputs)) < EXACT
    return merged


def same(expected: Any, found: Any) -> bool:
    pairs = (
        zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    )
    return all(torch.equal(a, b) for a, b in pairs)


def check_copies(merged: Any, models: Sequence[nn.Module], inputs: Sequence[Any], to: Path) -> None:
    """All that can be done with a merge gives the same again."""
    expected, names = run(merged, inputs), list(merged.state_dict())
    file = io.BytesIO()
    torch.save(merged, file)
    file.seek(0)
    zipfx.save(merged, to / "merged")
    twins = {
        "deepcopy": copy.deepcopy(merged),
        "copy": copy.copy(merged),
        "pickle": torch.load(file, weights_only=False),
        "load": zipfx.load(to / "merged", models),
        "twice": zipfx.load(to / "merged", [copy.deepcopy(merged), merged])
        if merged.meta["zipfx"].partial is None
        else merged,
    }
    for how, twin in twins.items():
        assert same(expected, run(twin, inputs)), how
        assert list(twin.state_dict()) == names, how
        assert twin.meta["zipfx"].models == 2
        assert twin.code == merged.code or how == "pickle"
    interpreter = fx.Interpreter(merged)
    assert same(expected, interpreter.run(*inputs))
    merged.graph.lint()
    moved = copy.deepcopy(merged).float()
    moved(*(x.float() for x in inputs))
    assert moved.train().training
