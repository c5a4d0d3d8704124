"""Repairs: what can be asked for by name, and what a repair of your own is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zipfx.errors import ZipError, first_line
from zipfx.merge import Fused
from zipfx.model.running import state_of
from zipfx.observe import Calibration
from zipfx.repair.batch_norm import repair_batch_norm
from zipfx.repair.layerwise import Refit, Repaired
from zipfx.trace import TracedModels


class Repair(Protocol):
    """Re-estimates something of a merge on calibration data, in place.

    Your own, in a few lines: the last layer's bias by the mean of what the models give.

    >>> import torch, zipfx
    >>> from torch import nn
    >>> from zipfx.repair import Repaired
    >>> def centred(fused, traced, data, *, progress=False):
    ...     inputs = [args for args, _ in data]
    ...     mean = lambda module: torch.cat([module(*args) for args in inputs]).mean(0)
    ...     wanted = torch.stack([mean(module) for module in traced.modules]).mean(0)
    ...     fused.module.get_parameter("2.bias").add_(wanted - mean(fused.module))
    ...     return Repaired(len(inputs), notes=("the bias of '2' was centred",))
    >>> net = lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> a, b, x = net(), net(), torch.randn(16, 3)
    >>> merged = zipfx.zip([a, b], [x], repair=centred, progress=False)
    >>> torch.allclose(merged(x).mean(0), ((a(x) + b(x)) / 2).mean(0), atol=1e-5)
    True
    >>> merged.meta["zipfx"].repair.endswith("centred"), merged.meta["zipfx"].batches["repair"]
    (True, 1)
    """

    def __call__(
        self, fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        """Change tensors of `fused.module` in place; models and data stay as they are.

        Args:
            fused: the merge, on the device of the data, in eval mode or not.
            traced: the models that it was made of.
            data: batches, as (args, kwargs) of forward.
        """
        ...


@dataclass(frozen=True)
class NoRepair:
    """Leaves a merge as it is."""

    def __call__(
        self, fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        """See `Repair`."""
        return Repaired(None)


@dataclass(frozen=True)
class BatchNormRepair:
    """The statistics of all BatchNorms once more, on what they read in the merge (Jordan et al.,
    REPAIR, 2023)."""

    def __call__(
        self, fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        """See `Repair`."""
        state = state_of(fused.module, traced.inputs)
        batches, unmeasured = repair_batch_norm(fused.module, data, state, progress=progress)
        return Repaired(batches, notes=tuple(_unrepaired_norms(batches, unmeasured)))


def _unrepaired_norms(batches: int, unmeasured: Sequence[str]) -> list[str]:
    """What repair="bn" left as it was."""
    if not batches:
        return ['repair="bn" changed nothing: the merge has no BatchNorm']
    return [
        "BatchNorms to which fewer than two values came are as they were fused: "
        + ", ".join(unmeasured)
    ] * bool(unmeasured)


@dataclass(frozen=True)
class OwnRepair:
    """A repair of the caller's, and what to call it: what goes wrong in it is a `ZipError`."""

    function: Repair
    name: str

    def __call__(
        self, fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        """See `Repair`.

        Raises:
            ZipError: the function fails, or does not say what it did.
        """
        try:
            found: Any = self.function(fused, traced, data, progress=progress)
        except ZipError:
            raise
        except Exception as error:
            raise ZipError(f"repair {self.name} fails: {first_line(error)}") from error
        if not isinstance(found, Repaired):
            raise ZipError(
                f"repair {self.name} gave a {type(found).__name__}: it must return a "
                "zipfx.repair.Repaired"
            )
        return found


REPAIRS: dict[str, Repair] = {
    "none": NoRepair(),
    "bn": BatchNormRepair(),
    "affine": Refit(ridges=(math.inf,), rounds=0),
    "refit": Refit(),
}
