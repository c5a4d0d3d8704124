"""Singular: vectors that modules keep of a weight, as a spectral norm written by hand does.

They are no features that could be averaged: of a merged weight they are others. Where a vector of a
module is of unit length and a leading singular vector of a weight beside it, in every model, it
becomes that of the merged weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_UNIT = 1e-2  # by which a length is off at most: in half precision, and after few iterations
_SAME = 1e-6
_LEADS = 0.9  # of the spectral norm: what a vector must reach to be seen as a leading one


@dataclass(frozen=True)
class _Kept:
    """Names: of a module, of a weight of it, and of vectors; dim: of the weight along which the
    rows of the matrix lie."""

    path: str
    weight: str
    dim: int
    left: str | None
    right: str | None

    def matrix(self, model: nn.Module) -> Tensor:
        """(rows, columns), float64."""
        found = _own(model.get_submodule(self.path))[self.weight]
        return found.detach().double().movedim(self.dim, 0).flatten(1)

    def vectors(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Each, with the matrix that it is multiplied with."""
        own, matrix = _own(model.get_submodule(self.path)), self.matrix(model)
        both = ((self.left, matrix.T), (self.right, matrix))
        return [(own[name], side) for name, side in both if name is not None]

    @property
    def names(self) -> list[str]:
        """Of the vectors."""
        return [name for name in (self.left, self.right) if name is not None]

    def is_in(self, model: nn.Module) -> bool:
        """Whether a model has all of it."""
        try:
            own = _own(model.get_submodule(self.path))
        except AttributeError:
            return False
        return {self.weight, *self.names} <= set(own)

    def reach(self, model: nn.Module) -> float:
        """The least share of the spectral norm that a vector reaches; 0: it is not of unit length,
        or all are nothing."""
        norm, shares = float(torch.linalg.matrix_norm(self.matrix(model), 2)), []
        for vector, side in self.vectors(model):
            v = vector.detach().double().flatten()
            if not norm or abs(float(v.norm()) - 1) > _UNIT:
                return 0.0
            shares.append(float((side @ v).norm()) / norm)
        return min(shares)

    def leads(self, model: nn.Module) -> bool:
        """Whether they are leading singular vectors in a model, as nearly as iterations give."""
        return self.is_in(model) and self.reach(model) >= _LEADS

    def renew(self, model: nn.Module) -> None:
        """Make them those of the weight."""
        u, _, vh = torch.linalg.svd(self.matrix(model), full_matrices=False)
        own = _own(model.get_submodule(self.path))
        for name, new in ((self.left, u[:, 0]), (self.right, vh[0])):
            if name is not None:
                own[name].data.copy_(new.reshape(own[name].shape))


def renew(merged: nn.Module, models: Sequence[nn.Module]) -> list[str]:
    """Let such vectors of a merge be those of its weights, where they are not as good as the
    models'; a note of which.

    models: those that became one; their heads have the weights that they had.
    """
    done = []
    for kept in _kept(models):
        least = min(kept.reach(model) for model in models)
        if kept.is_in(merged) and kept.reach(merged) < least - _SAME:
            kept.renew(merged)
            done += [f"{kept.path}.{name}".lstrip(".") for name in kept.names]
    note = "singular vectors of a weight, computed for the merged one"
    return [f"{note}: {', '.join(done)}"] if done else []


def _kept(models: Sequence[nn.Module]) -> Iterator[_Kept]:
    """What all of the models keep."""
    for path, module in models[0].named_modules():
        own = _own(module)
        units = [name for name, t in own.items() if _is_unit(t)]
        weights = {n: t for n, t in own.items() if t.ndim > 1 and t.numel() > max(t.shape)}
        for name, weight in weights.items() if units else ():
            for dim in (0, 1):
                rows, columns = weight.shape[dim], weight.numel() // weight.shape[dim]
                lefts = [_Kept(path, name, dim, u, None) for u in units if own[u].numel() == rows]
                rights = [
                    _Kept(path, name, dim, None, u) for u in units if own[u].numel() == columns
                ]
                fit = [k for k in (*lefts, *rights) if all(map(k.leads, models))]
                left = next((k.left for k in fit if k.left), None)
                right = next((k.right for k in fit if k.right not in (None, left)), None)
                if left or right:
                    yield _Kept(path, name, dim, left, right)
                    units = [u for u in units if u not in (left, right)]


def _is_unit(t: Tensor) -> bool:
    """Whether it is a vector of unit length that was not learned, nor is constant."""
    if t.requires_grad or t.numel() < 2 or t.numel() != max(t.shape):
        return False
    sizes = t.double().abs()
    return abs(float(sizes.norm()) - 1) < _UNIT and float(sizes.max() - sizes.min()) > _SAME


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of real numbers of a module itself."""
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: t for name, t in own if t is not None and t.is_floating_point()}
