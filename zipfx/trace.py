"""Trace: a model becomes a `torch.fx.GraphModule` that keeps its module names.

The model itself is never touched: tracing works on a structural copy that shares its parameters
and owns its buffers, in eval mode, without the caller's hooks.
"""

from __future__ import annotations

import copy
import traceback
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.utils.prune
from torch import fx, nn
from torch.utils._pytree import tree_map

from zipfx.errors import ZipError, first_line

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


#: meta key of a traced module: names of tensors that forward wrote down as constants
CONSTANTS = "zipfx_constants"


class Tracer(fx.Tracer):
    """`torch.fx.Tracer` that keeps buffers as nodes instead of folding them into constants."""

    proxy_buffer_attributes = True


def structural_copy(model: nn.Module, *, share_parameters: bool = True) -> nn.Module:
    """A copy of the module tree in eval mode: same parameters, own buffers, no hooks."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            pruned = isinstance(hook, torch.nn.utils.prune.BasePruningMethod)
            if pruned or type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                raise ZipError(
                    f"module {name!r} computes its weight in a hook ({type(hook).__name__}); use "
                    "torch.nn.utils.parametrizations, or make pruning permanent (prune.remove)"
                )
    memo: dict[int, Any] = {}
    if share_parameters:
        memo = {id(p): p for p in model.parameters()}
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
    for module in twin.modules():
        for hook in _HOOKS:
            if hook in module.__dict__:
                module.__dict__[hook] = OrderedDict()
    return twin.eval()


def trace(
    model: nn.Module, tracer: fx.Tracer | None = None, device: torch.device | None = None
) -> fx.GraphModule:
    """Trace a model symbolically, in eval mode, without changing it.

    Args:
        model: any module that `torch.fx` can trace.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules.
        device: where the traced module is to live; default: where the model is.

    Returns:
        A GraphModule with the model's parameters (shared), copies of its buffers, and the same
        qualified names. `node.meta["nn_module_stack"]` tells the modules a node came from.

    Raises:
        ZipError: the model can not be traced; the message names the line that could not.

    >>> import torch
    >>> gm = trace(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
    >>> [node.op for node in gm.graph.nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    twin = structural_copy(model, share_parameters=device is None).to(device)
    own = frozenset(name for name, _ in twin.named_buffers(remove_duplicate=False))
    tracer = Tracer() if tracer is None else tracer
    try:
        graph = tracer.trace(twin)
    except ZipError:
        raise
    except Exception as error:
        raise ZipError(_untraceable(model, error)) from error
    _sink_shapes(graph)
    module = fx.GraphModule(tracer.root, graph, type(model).__name__)
    module.meta[CONSTANTS] = frozenset(dict(module.named_buffers())) - own
    for kind in ("_modules", "_parameters", "_buffers"):  # with containers, and what is not used
        module.__dict__[kind] = {**twin.__dict__[kind], **{
            k: v for k, v in module.__dict__[kind].items() if k not in twin.__dict__[kind]
        }}  # fmt: skip
    # constants are part of the code, not of the state
    module._non_persistent_buffers_set = twin._non_persistent_buffers_set | module.meta[CONSTANTS]
    module.eval()
    graph.lint()
    return module


_RESHAPED = {"unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "t_", "resize_", "resize_as_"}


def _sink_shapes(graph: fx.Graph) -> None:
    """Move nodes that only look at shapes next to their first user.

    A segmenter asks for the size of its input first and uses it last; between models with the same
    trunk such a node must not make a difference, nor lie in the trunk when only a head needs it.
    """
    shapes: set[fx.Node] = set()
    for node in graph.nodes:
        of = node.all_input_nodes
        looks = (node.op == "call_method" and node.target in ("size", "dim", "numel")) or (
            node.target is getattr and node.args[1] in ("shape", "dtype", "device", "ndim")
        )
        steady = all(user.target not in _RESHAPED for n in of for user in n.users)
        plain = node.op == "call_function" and of and all(n in shapes for n in of)
        if (looks and steady) or plain:
            shapes.add(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed([n for n in graph.nodes if n in shapes and n.users]):
        min(node.users, key=order.__getitem__).prepend(node)
        order = {n: i for i, n in enumerate(graph.nodes)}


def _untraceable(model: nn.Module, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        f
        for f in frames
        if "torch/fx/" not in f.filename.replace("\\", "/")
        and "torch/nn/modules/module.py" not in f.filename.replace("\\", "/")
        and "zipfx/trace.py" not in f.filename.replace("\\", "/")
    ]
    line = f" at {inside[-1].filename}:{inside[-1].lineno} ({inside[-1].line})" if inside else ""
    return (
        f"torch.fx can not trace {type(model).__name__}{line}: {first_line(error)}. Move the line "
        "into a function marked with torch.fx.wrap, make the module that holds it a leaf with a "
        "tracer of your own (tracer=...), or zip a smaller module that does not hold it"
    )


def clone_tensors(value: Any) -> Any:
    """A copy of every tensor in a value, for graphs that may write into their inputs."""
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, value)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics that can be re-estimated."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.track_running_stats
        and isinstance(module.running_mean, torch.Tensor)
    )
