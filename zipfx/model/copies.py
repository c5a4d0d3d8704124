"""Copies: a module once more, without what is the caller's own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch.nn.utils.prune
from torch import Tensor, nn

from zipfx.errors import ZipError
from zipfx.model.graph_module import Names
from zipfx.model.memory import own_memory

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def hooked(model: nn.Module) -> list[str]:
    """The modules with hooks that run with forward or backward; "" is the model itself."""
    return [
        path
        for path, module in model.named_modules()
        if any(_of_caller(hook) for kind in _HOOKS[:4] for hook in vars(module)[kind].values())
    ]


def _of_caller(hook: Any) -> bool:
    """Whether a hook is none of those that `torch.export` gives its modules, and no part of one."""
    return not _comes_from(hook, "torch.export.") and not _is_part(hook)


def _is_part(hook: Any) -> bool:
    """Whether a hook is a part of how a model computes: transformers collects hidden states by such
    once a model has run."""
    return _comes_from(hook, "transformers.")


def _comes_from(hook: Any, package: str) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(package)


def structural_copy(model: nn.Module, *, share_parameters: bool = True) -> nn.Module:
    """A copy of the module tree in eval mode: same parameters, own buffers, no hooks of the caller.

    Parameters and buffers that lie in one storage are copies on storages of their own, and so are
    those that were made in inference mode.
    """
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            pruned = isinstance(hook, torch.nn.utils.prune.BasePruningMethod)
            if pruned or type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                raise ZipError(
                    f"module {name!r} computes its weight in a hook ({type(hook).__name__}); use "
                    "torch.nn.utils.parametrizations, or make pruning permanent (prune.remove)"
                )
    memo: dict[int, Any] = _tensors(model, share_parameters)
    memo.update(
        {
            id(m.__dict__[h]): OrderedDict()
            for m in model.modules()
            for h in _HOOKS
            if h in m.__dict__
        }
    )
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise ZipError(
            f"the {type(model).__name__} can not be copied ({error}); zipfx never changes the "
            "caller's model, so it must support copy.deepcopy"
        ) from error
    for module, own in zip(model.modules(), twin.modules(), strict=True):
        kinds = [kind for kind in _HOOKS if kind in module.__dict__]
        parts = {i for kind in kinds for i, hook in module.__dict__[kind].items() if _is_part(hook)}
        for kind in kinds:
            entries = module.__dict__[kind].items()
            own.__dict__[kind] = OrderedDict((i, hook) for i, hook in entries if i in parts)
    return twin.eval()


def _tensors(model: nn.Module, share_parameters: bool) -> dict[int, Any]:
    """What takes the place of each parameter, and of each buffer that must not lie where the copy
    of another one does; by id."""
    own = own_memory((*model.parameters(), *model.buffers()))
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        learned = isinstance(t, nn.Parameter)
        new = own.get(id(t))
        if new is None and (t.is_inference() or (learned and not share_parameters)):
            new = t.detach().clone()
        if new is not None:
            memo[id(t)] = nn.Parameter(new, t.requires_grad) if learned else new
        elif learned:
            memo[id(t)] = t
    return memo


def alias(module: nn.Module, others: Mapping[int, Tensor] | None = None) -> nn.Module:
    """The module tree once more, on the same memory: for running it under `untouched`.

    Its tensors count their own writes, so that autograd does not see those in the originals.
    others: by the id of a tensor, what it shall be in place of a view.
    """
    memo = views(module)
    for key, t in (others or {}).items():
        learned = isinstance(memo[key], nn.Parameter)
        memo[key] = nn.Parameter(t, memo[key].requires_grad) if learned else t
    twin = Names()
    for kind in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[kind] = copy.deepcopy(module.__dict__[kind], memo)
    return twin


def views(module: nn.Module) -> dict[int, Any]:
    """id of every tensor of a module -> another tensor on the same memory."""
    memo: dict[int, Any] = {id(b): b.data for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
    return memo
