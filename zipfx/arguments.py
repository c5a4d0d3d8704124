"""Arguments: what `zip` is asked for, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zipfx.checks import flag, whole
from zipfx.errors import ZipError, first_line
from zipfx.match import Matcher, needs_of, resolve
from zipfx.model.callables import name_of_callable
from zipfx.model.contents import check_models
from zipfx.observe import PLACES, BatchToArgs, Calibration, Choose, MaskOf, calibration
from zipfx.repair import REPAIRS, NoRepair, OwnRepair, Refit, Repair
from zipfx.trace import Front, FrontName, front_of, unwrapped


@dataclass(frozen=True, eq=False)
class Job:
    """The arguments of `zip`, in the terms of the stages.

    repair_name: what reports call the repair; choose: the places at which a space is observed;
    data: None where there is none; home: where the models are; device: where to calibrate.
    """

    models: Sequence[nn.Module]
    data: Calibration | None
    partial: str | None
    matcher: Matcher
    repair: Repair
    repair_name: str
    choose: Choose
    example_inputs: Any
    tracer: fx.Tracer | None
    front: FrontName | Front
    home: torch.device
    device: torch.device
    verify: bool
    progress: bool
    seed: int

    @classmethod
    def of(
        cls,
        models: Sequence[nn.Module],
        calib_loader: Iterable[Any] | None,
        *,
        partial: str | None,
        matcher: str | Matcher,
        repair: str | Repair | None,
        example_inputs: Any,
        max_samples: int | None,
        device: torch.device | str | None,
        progress: bool,
        seed: int,
        batch_to_args: BatchToArgs | None,
        mask: MaskOf | None,
        tracer: fx.Tracer | None,
        front: str | Front,
        verify: bool,
        places: str,
    ) -> Job:
        """The arguments of `zip`; see there.

        Raises:
            ZipError: one of them is none that could be used, or two do not go together.
        """
        merging = resolve(matcher)
        needs = needs_of(merging)
        repairing, name = _repair(repair, calib_loader is None)
        if not isinstance(places, str) or places not in PLACES:
            raise ZipError(f"places={places!r} is unknown; choose one of {list(PLACES)}")
        models = unwrapped(models)
        check_models(models)
        verify, progress = flag("verify", verify), flag("progress", progress)
        if partial is not None and not isinstance(partial, str):
            raise ZipError(f"partial is {partial!r}; give the qualified name of a module, or None")
        if calib_loader is None and (needs == "activations" or name != "none"):
            raise ZipError(
                'calib_loader=None works only with matcher="weights" or "identity" and '
                'repair="none"; pass an iterable of batches'
            )
        home = _home(models[0])
        away = home if device is None else _device(device)
        seed = whole("seed", seed) % 2**64
        data = None
        if calib_loader is not None:
            data = calibration(calib_loader, len(models), batch_to_args, max_samples, away, mask)
        return cls(
            models, data, partial, merging, repairing, name, PLACES[places], example_inputs,
            tracer, front_of(front), home, away, verify, progress, seed,
        )  # fmt: skip

    @property
    def observes(self) -> bool:
        """Whether activations are looked at."""
        return self.data is not None and needs_of(self.matcher) != "weights"


def _repair(repair: Any, dataless: bool) -> tuple[Repair, str]:
    """A repair, and what reports call it."""
    if repair is None:
        repair = "none" if dataless else "refit"
    if isinstance(repair, Refit):
        return repair, "refit"
    if isinstance(repair, str) and repair in REPAIRS:
        return REPAIRS[repair], repair
    if isinstance(repair, str) or not callable(repair):
        raise ZipError(f"repair={repair!r} is unknown; choose one of {list(REPAIRS)}")
    if isinstance(repair, NoRepair):
        return repair, "none"
    name = name_of_callable(repair)
    return OwnRepair(repair, name), name


def _home(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _device(device: Any) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError) as error:
        raise ZipError(f"device={device!r} is none: {first_line(error)}") from error
