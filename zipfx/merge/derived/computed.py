"""Computed: the tensors of a merge that its models compute from others (`parametrized`).

They get values from which the parametrization computes the merged tensor, or the nearest one that
it can give.  One without a way back (`right_inverse`) is left out: then the tensor is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

from zipfx.model.copies import structural_copy
from zipfx.model.graph_module import attribute, plain, reached
from zipfx.model.parametrized import LIST, own_parametrizations

Limit = Callable[[Tensor], Tensor]  # the nearest weight to one that is possible

_SAME = 4  # times the rounding of a dtype
_ROUNDED = 1000  # times that: what solving for values may add to it
_BACK = 1e-3, 8  # relative, and times the rounding: what a way back misses at most
_SETTLE, _STILL = 300, 1e-8  # state is brought up to date as often at most, until it moves by less


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor of a merge that its models compute.

    path: of its module in the merge; name: of the tensor there; how: what computes it in each model
    whose tensor has become a part of it; the merge gets the first one. of_head: it is one model's.
    """

    path: str
    name: str
    how: tuple[parametrize.ParametrizationList, ...]

    of_head: bool = False

    @property
    def full(self) -> str:
        """The name of the tensor in the merge."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def root(self) -> str:
        """Where the parametrization is, or would be."""
        return f"{self.path}.{LIST}.{self.name}".lstrip(".")

    def is_among(self, names: Collection[str]) -> bool:
        """Whether any of these is a tensor of the parametrization."""
        return any(name.startswith(f"{self.root}.") for name in names)

    def copy(self, like: Tensor | None = None) -> Any:
        """What computes the tensor, once more, in eval mode."""
        own = structural_copy(self.how[0], share_parameters=False)
        return own if like is None else own.to(like.device)

    @cached_property
    def given(self) -> tuple[Tensor, ...]:
        """What each of the models computes."""
        return tuple(structural_copy(how)().detach() for how in self.how)

    @cached_property
    def inverts(self) -> bool:
        """Whether there is a way back for what it gives."""
        return self._reaches(self.copy()().detach())

    @cached_property
    def limits(self) -> bool:
        """Whether there are weights that it can not give."""
        value = self.copy()().detach()
        noise = torch.Generator().manual_seed(0)
        spread = float(value.abs().mean()) + torch.finfo(value.dtype).tiny
        drawn = torch.randn(value.shape, generator=noise, dtype=torch.float32).to(value)
        return not self._reaches(value + spread * drawn)

    def _reaches(self, value: Tensor) -> bool:
        """Whether the way back leads to a value."""
        own = self.copy(value)
        return self._set(own, value) and _apart(own(), value) < _missed(value.dtype)

    def written(self, value: Tensor) -> Any:
        """What computes the tensor, with values from which it gives this one, or nearly; None:
        there is no way back."""
        own = self.copy(value)
        if _apart(own(), value) <= _SAME * torch.finfo(value.dtype).eps:
            return own
        return own if self.inverts and self._set(own, value) else None

    def nearest(self, value: Tensor) -> Tensor:
        """What will become of a tensor once it is computed: itself, if there is no way back."""
        own = self.written(value)
        found: Tensor = value if own is None else own().detach()
        return found

    def _set(self, own: Any, value: Tensor) -> bool:
        """Give the parametrization values of which this comes; whether something finite does."""
        try:
            found: Any = value.detach().clone()
            for step in reversed(own):
                found = self._back(step, found)
            places = [own.original] if own.is_tensor else [
                getattr(own, f"original{i}") for i in range(own.ntensors)
            ]  # fmt: skip
            for t, new in zip(places, [found] if own.is_tensor else found, strict=True):
                t.data = new.detach().to(t.dtype).clone()
            _settle(own, value)
            given = own()
        except Exception:  # whatever code of others does where it has no way back
            return False
        return given.shape == value.shape and bool(given.isfinite().all())

    def _back(self, step: Any, value: Any) -> Any:
        """What a single parametrization gives a value for."""
        if isinstance(step, parametrizations._SpectralNorm):
            return self._scaled(step, value)
        if isinstance(step, parametrizations._Orthogonal):
            u, _, vh = torch.linalg.svd(value.double(), full_matrices=False)
            return step.right_inverse((u @ vh).to(value.dtype))
        found = step.right_inverse(value)
        if isinstance(step, parametrizations._WeightNorm):
            size, direction = found  # which nothing has none of
            return size, torch.where(size == 0, torch.ones_like(direction), direction)
        return found

    def _scaled(self, step: Any, value: Tensor) -> Tensor:
        """Singular vectors that fit: the leading pair, by which the norm becomes 1; or, where a
        norm is as little above 1 as those of the models, vectors by which it stays."""
        if value.ndim < 2:
            return value
        rows = step._reshape_weight_to_matrix(value).double()
        u, sizes, vh = torch.linalg.svd(rows, full_matrices=False)
        left, right, norm = u[:, 0], vh[0], float(sizes[0])
        most = max(_norm(step._reshape_weight_to_matrix(given)) for given in self.given)
        if 1 < norm <= most * (1 + 1e-6) and len(sizes) > 1:
            # u^T W v = cos * norm = 1
            left = left / norm + u[:, 1] * (1 - 1 / norm**2) ** 0.5
        step._u.copy_(left)
        step._v.copy_(right)
        return value


def _missed(dtype: torch.dtype) -> float:
    least, times = _BACK
    return max(least, times * torch.finfo(dtype).eps)


def _norm(rows: Tensor) -> float:
    return float(torch.linalg.matrix_norm(rows.double(), 2))


def _apart(a: Tensor, b: Tensor) -> float:
    """How far two tensors are apart, relative to the size of the second."""
    if a.shape != b.shape or not a.numel():
        return 0.0 if a.shape == b.shape else torch.inf
    size = float(b.detach().abs().max())
    gap = float((a.detach() - b.detach()).abs().max())
    return gap / size if size else (0.0 if not gap else torch.inf)


def _settle(own: Any, value: Tensor) -> None:
    """Bring state that is a function of the tensor up to date, as training would, if that is
    nearer to the value."""
    known = (parametrizations._SpectralNorm, parametrizations._Orthogonal)
    if not any(list(step.buffers()) for step in own if not isinstance(step, known)):
        return
    before = {key: t.clone() for key, t in own.state_dict().items()}
    gap = _apart(own(), value)
    own.train()
    last = own()
    for _ in range(_SETTLE):
        new = own()
        if _apart(new, last) <= _STILL:
            break
        last = new
    own.eval()
    now = own()
    if not (bool(now.isfinite().all()) and _apart(now, value) < gap):
        own.load_state_dict(before)


def find_computed(
    merged: nn.Module, models: Sequence[nn.Module], homes: Mapping[str, Sequence[int]]
) -> dict[str, Computed]:
    """Of a merge of folded models, the tensors that the models compute, by name.

    homes: of the merge, see `module.homes`.
    """
    found = {}
    for prefix, members in homes.items():
        own: list[dict[tuple[str, str], Any]] = [
            {(path, name): how for path, name, how in own_parametrizations(models[k])}
            for k in members
        ]
        for (path, name), how in own[0].items():
            others = [o[path, name] for o in own[1:] if (path, name) in o]
            one = Computed(f"{prefix}{path}".rstrip("."), name, (how, *others), bool(prefix))
            if _holder(merged, one) is not None:
                found[one.full] = one
    return found


def _holder(merged: nn.Module, one: Computed) -> nn.Module | None:
    """The module that has a tensor as a plain one."""
    try:
        module = merged.get_submodule(one.path)
    except AttributeError:
        return None
    return module if one.name in module._parameters or one.name in module._buffers else None


def value_of(merged: nn.Module, one: Computed) -> Tensor:
    """The tensor of a merge."""
    found: Tensor = attribute(merged, one.full)
    return found


def constrained(
    merged: nn.Module, found: Mapping[str, Computed]
) -> tuple[dict[str, Computed], list[str]]:
    """Move tensors of the trunk to the nearest that their parametrizations can give; those of heads
    stay what the model has, if not with its parametrization then without.

    Returns:
        What is still to be computed in the merge, and notes.
    """
    kept, moved, plain = dict(found), [], []
    for full, one in found.items():
        value = value_of(merged, one)
        near = one.nearest(value.detach())
        apart = float((near - value).norm() / value.norm().clamp(min=torch.finfo().tiny))
        gives = one.written(value.detach()) is not None
        if not gives or (one.of_head and apart > _ROUNDED * torch.finfo(value.dtype).eps):
            plain.append(full)
            del kept[full]
            continue
        if apart > _missed(value.dtype):
            moved.append(f"{full} by {apart:.0%}")
        if one.limits:
            value.data.copy_(near)
    notes = {
        "moved to the nearest weight that its parametrization can give": moved,
        "plain, since its parametrization has no values that give the merged weight": plain,
    }
    return kept, [f"{note}: {', '.join(names)}" for note, names in notes.items() if names]


def limits(
    merged: nn.Module,
    found: Mapping[str, Computed],
    named: Mapping[str, Computed],
    others: Sequence[Tensor] = (),
) -> list[tuple[Tensor, Limit]]:
    """Tensors of a merge that can not have every value, and what tells the nearest to one.

    Those that are plain now, though they were computed, keep their zeros, which a mask may have
    made.

    Args:
        found: what models compute; named: what of it the merge still does.
        others: computed otherwise.
    """
    some = [one for one in named.values() if one.inverts and one.limits]
    plain = [value_of(merged, one) for full, one in found.items() if full not in named]
    masks = [(t, t.detach() != 0) for t in (*plain, *others)]
    return [
        *((value_of(merged, one), one.nearest) for one in some),
        *((t, partial(torch.mul, mask)) for t, mask in masks if mask.any() and not mask.all()),
    ]


def put_back(merged: fx.GraphModule, found: Mapping[str, Computed]) -> list[str]:
    """Let a merge compute what its models compute; notes of what it can not."""
    plain = []
    for full, one in found.items():
        how = one.written(value_of(merged, one).detach())
        if how is None:
            plain.append(full)
        else:
            attach(merged, one, how)
    note = "plain, since its parametrization has no values that give the refitted weight"
    return [f"{note}: {', '.join(plain)}"] * bool(plain)


def put_back_as_saved(
    merged: fx.GraphModule,
    found: Mapping[str, Computed],
    names: Collection[str],
    take: Callable[[str, Tensor], Tensor],
) -> None:
    """Put back those that a file has values of; names: of the tensors in it."""
    for one in found.values():
        if not one.is_among(names):
            continue
        how = one.copy()
        for path, module in how.named_modules():
            for key, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None:
                    t.data = take(".".join(p for p in (one.root, path, key) if p), t)
        attach(merged, one, how)


def attach(merged: fx.GraphModule, one: Computed, how: Any) -> None:
    """Give a module of a merge a parametrization in place of a plain tensor.

    Where the graph itself reads the tensor, it calls the parametrization, as torch.fx traces that.
    """
    module = merged.get_submodule(one.path)
    readers = [
        n for n in merged.graph.nodes if n.op == "get_attr" and plain(str(n.target)) == one.full
    ]
    for node in readers:
        node.op, node.target = "call_module", reached(one.root)
    called = {plain(str(n.target)) for n in merged.graph.nodes if n.op == "call_module"}
    above = one.path.split(".")
    leaf = any(".".join(above[:i]) in called for i in range(1, len(above) + 1))
    if leaf or (not readers and module is not merged):
        blank: Callable[[], nn.Module] = nn.Identity
        parametrize.register_parametrization(module, one.name, blank(), unsafe=True)
    else:  # the graph has it, and a container needs no code for that
        module._parameters.pop(one.name, None)
        module._buffers.pop(one.name, None)
        if LIST not in module._modules:
            module.add_module(LIST, nn.ModuleDict())
    module.get_submodule(LIST)._modules[one.name] = how
    if readers:
        merged.recompile()
