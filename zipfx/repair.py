"""Repair: what is re-estimated after the weights are fused.

Averaging features shrinks their variance, so running statistics of the originals no longer fit
(Jordan et al., REPAIR, 2023); "bn" measures them again on the calibration data.
"""

from __future__ import annotations

import torch
from torch import nn
from tqdm import tqdm

from zipfx.calibrate import Calibration
from zipfx.errors import ZipError
from zipfx.replay import evaluating
from zipfx.trace import clone_tensors, is_batch_norm


def repair_batch_norm(module: nn.Module, data: Calibration, *, progress: bool = False) -> int:
    """Re-estimate the statistics of every BatchNorm in `module`, in place.

    Cumulative averages over all batches (momentum None), everything but the BatchNorms in eval
    mode, no gradients; modes and momenta are restored.

    Returns:
        The number of batches used; 0 if there is no BatchNorm.

    Raises:
        ZipError: no data, or batches too small for BatchNorm to measure a variance.
    """
    norms = [m for m in module.modules() if is_batch_norm(m)]
    if not norms:
        return 0
    momenta = [m.momentum for m in norms]
    batches = 0
    try:
        with evaluating(module), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()  # type: ignore[operator]
                norm.momentum = None  # type: ignore[assignment]
                norm.training = True
            for args, kwargs in tqdm(data, desc="zipfx: repair", disable=not progress, leave=False):
                module(*clone_tensors(args), **clone_tensors(kwargs))
                batches += 1
    except ValueError as error:
        raise ZipError(
            f"BatchNorm statistics can not be measured on this batch ({error}); use larger "
            'batches, or repair="none"'
        ) from error
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if not batches:
        raise ZipError("the calibration data is empty: there is nothing to repair BatchNorm with")
    return batches
