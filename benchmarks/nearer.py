"""What else could bring a merge of fine-tunes nearer to their ensemble: tried, and no options.

- towards the base: a refit whose ridge draws to the base's weights instead of the averaged ones;
- head by likelihood: after a refit the last layer once more, to the probabilities that each
  fine-tune gives on its own task (cross-entropy, which is convex in one layer) instead of to its
  outputs by least squares. It takes that outputs are logits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import zipfx
from zipfx.merge import Fused
from zipfx.observe import Calibration
from zipfx.repair import Repair, Repaired
from zipfx.trace import TracedModels


def towards(base: nn.Module) -> Repair:
    """A refit that starts with the base's weights in all linear layers and convolutions; for
    features that are matched by position."""
    layers = [n for n, m in base.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    chosen = {n: p for n, p in base.named_parameters() if n.rpartition(".")[0] in layers}

    def refit(
        fused: Fused, traced: TracedModels, data: Calibration, *, progress: bool = False
    ) -> Repaired:
        for name, value in chosen.items():
            fused.module.get_parameter(name).copy_(value)
        return zipfx.Refit()(fused, traced, data, progress=progress)

    return refit


def by_likelihood(
    merged: nn.Module,
    tunes: Sequence[nn.Module],
    tasks: Sequence[Tensor],
    ridge: float = 1e-3,
    steps: int = 40,
) -> nn.Module:
    """A copy, its last linear layer fitted to what each fine-tune holds likely on its own task.

    ridge: towards the weights as they are, relative to the mean variance of the layer's inputs;
    steps: of L-BFGS, on all samples at once.
    """
    model = copy.deepcopy(merged).eval()
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    read: list[Tensor] = []
    given: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, args: read.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for tune, inputs in zip(tunes, tasks, strict=True):
            for part in inputs.split(100):
                model(part)
                given.append(tune(part).softmax(-1).flatten(0, -2))
    handle.remove()
    x, y, was = torch.cat(read), torch.cat(given), head.weight.detach().clone()
    least = ridge * x.var(0).mean() / 2
    head.requires_grad_(True)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = -(y * head(x).log_softmax(-1)).sum(1).mean()
        found = found + least * (head.weight - was).square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return model
