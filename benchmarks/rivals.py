"""What people merge fine-tunes of one base with, by position, a few lines each.

All take the base and its K fine-tunes and give a new model of the same class; parameters that no
data speaks of are averaged. Statistics of BatchNorms are those of the average: measure them again
(`zipfx.repair`, or `evaluate.reset_batch_norm`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zipfx.repair.layers.convolution import Convolution
from zipfx.repair.layers.linear import LinearLayer

State = dict[str, Tensor]

# so that what no sample speaks of is averaged, and sums can be inverted:
_LEAST = 1e-12  # of an information,
_RIDGE = 1e-6  # and of the mean power of a layer's inputs


def averaged(tunes: Sequence[nn.Module]) -> nn.Module:
    """The mean of all weights (Wortsman et al., Model soups, 2022)."""
    states = [tune.state_dict() for tune in tunes]
    floats = [name for name, t in states[0].items() if t.is_floating_point()]
    return _with(tunes[0], {n: torch.stack([s[n] for s in states]).mean(0) for n in floats})


def task_arithmetic(base: nn.Module, tunes: Sequence[nn.Module], factor: float) -> nn.Module:
    """The base plus a factor times the sum of what each fine-tune has added (Ilharco et al., 2023);
    1 / K is the average."""
    start, changes = _changes(base, tunes)
    return _with(tunes[0], {n: start[n] + factor * t.sum(0) for n, t in changes.items()})


def ties(
    base: nn.Module, tunes: Sequence[nn.Module], factor: float, density: float = 0.2
) -> nn.Module:
    """Of every fine-tune's changes the largest share `density`, then of every weight the sign with
    the larger sum, and the mean of those that have it, times the factor (Yadav et al., 2023)."""
    start, changes = _changes(base, tunes)
    flat = torch.cat([t.flatten(1) for t in changes.values()], 1)  # (K, all weights)
    size = flat.abs()
    least = size.kthvalue(max(1, round((1 - density) * size.shape[1])), 1, keepdim=True).values
    flat = flat.where(size > least, 0)
    sign = flat.sum(0).sign()
    agrees = (flat.sign() == sign) & (flat != 0)
    mean = (flat * agrees).sum(0) / agrees.sum(0).clamp(min=1)
    parts = mean.split([t[0].numel() for t in changes.values()])
    pairs = zip(changes, parts, strict=True)
    return _with(tunes[0], {n: start[n] + factor * part.view_as(start[n]) for n, part in pairs})


def fisher(
    tunes: Sequence[nn.Module], tasks: Sequence[Tensor], shares: Iterable[float], samples: int = 200
) -> Iterator[nn.Module]:
    """The mean of all weights, each weighed by its diagonal of the Fisher information on the
    model's own task (Matena and Raffel, 2022); of two models, one merge for each of the shares that
    the first may have.

    The Fisher is that of the model's own predictions, sampled: it needs no labels.
    """
    first, second = (_information(m, x[:samples]) for m, x in zip(tunes, tasks, strict=True))
    a, b = (tune.state_dict() for tune in tunes)
    for share in shares:
        state: State = {}
        for name in first:
            weigh = share * first[name] + _LEAST, (1 - share) * second[name] + _LEAST
            state[name] = (weigh[0] * a[name] + weigh[1] * b[name]) / sum(weigh)
        yield _with(averaged(tunes), state)


def regmean(
    tunes: Sequence[nn.Module], tasks: Sequence[Tensor], shrinks: Iterable[float]
) -> Iterator[nn.Module]:
    """Of every linear layer and convolution the weight that, on what the fine-tunes read, comes
    closest to what each gives on its own task (Jin et al., RegMean, 2023); all else is averaged.

    shrinks: by what products of different inputs are multiplied, 0 to 1, as in the paper; one merge
    for each. A convolution is taken as a linear layer of patches.
    """
    grams = [_grams(m, x) for m, x in zip(tunes, tasks, strict=True)]
    for shrink in shrinks:
        merged = averaged(tunes)
        for name in grams[0]:
            powers = [_shrunk(gram[name], shrink) for gram in grams]
            own = [_view(tune.get_submodule(name)).weight() for tune in tunes]
            size = sum(power.diagonal(0, -2, -1).mean() for power in powers)
            least = _RIDGE * size * torch.eye(powers[0].shape[-1], dtype=torch.float64)
            powers = [power + least for power in powers]
            wanted = sum(w @ power for w, power in zip(own, powers, strict=True))
            weight = torch.linalg.solve(sum(powers), wanted.mT).mT
            _view(merged.get_submodule(name)).write_weight(weight)
        yield merged


def _shrunk(gram: Tensor, by: float) -> Tensor:
    """(G, n, n) with what is not on the diagonal multiplied."""
    return by * gram + (1 - by) * torch.diag_embed(gram.diagonal(0, -2, -1))


def _changes(base: nn.Module, tunes: Sequence[nn.Module]) -> tuple[State, State]:
    """Of every tensor of floats that of the base, and (K, ..) what each fine-tune has added."""
    start = {n: t for n, t in base.state_dict().items() if t.is_floating_point()}
    states = [tune.state_dict() for tune in tunes]
    return start, {n: torch.stack([s[n] - t for s in states]) for n, t in start.items()}


def _with(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy with these tensors, in eval mode."""
    found = copy.deepcopy(model).eval()
    found.load_state_dict({**model.state_dict(), **state})
    return found


def _information(model: nn.Module, inputs: Tensor) -> State:
    """Mean square of the gradient of the log-likelihood of one sample, by parameter."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for x in inputs.split(1):
        logits = model(x).flatten(0, -2)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        loss = cross_entropy(logits, drawn.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, g in zip(total, gradients, strict=True):
            total[name] += g.square() / len(inputs)
    return total


def _view(module: nn.Module) -> LinearLayer | Convolution:
    """A layer as weights (G, o, n) and patches."""
    return LinearLayer(module) if isinstance(module, nn.Linear) else Convolution(module)


@torch.no_grad()
def _grams(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Mean second moments (G, n, n) float64 of what each linear layer and convolution reads."""
    found: dict[str, Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            view = _view(module).patches(args[0])
            at = args[0].ndim - 1 if isinstance(module, nn.Linear) else 3
            x = view.flatten(0, at - 1).flatten(2).movedim(1, 0)  # (G, S, n)
            found[name] = found.get(name, 0) + (x.mT @ x).double() / x.shape[1]

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        for part in inputs.split(100):
            model(part)
    finally:
        for handle in handles:
            handle.remove()
    return found
