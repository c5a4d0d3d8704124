"""Trace: a model becomes a `torch.fx.GraphModule` that keeps its module names.

The model itself is never touched: tracing works on a structural copy that shares its parameters
and owns its buffers, in eval mode, without the caller's hooks.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import operator
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.nn.utils.prune
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from zipfx.errors import ZipError, first_line
from zipfx.example import ExampleTracer
from zipfx.tap import decomposed
from zipfx.tracers import OPENED, Tracer, is_tracing_code
from zipfx.untouched import untouched

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
#: meta key of a traced module: what its graph takes for granted, for the report
NOTES = "zipfx_notes"


def structural_copy(model: nn.Module, *, share_parameters: bool = True) -> nn.Module:
    """A copy of the module tree in eval mode: same parameters, own buffers, no hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and named_tensors(module):
            raise ZipError(
                f"module {name!r} was compiled by torch.jit ({type(module).__name__}), which hides "
                "its weights; zip the models first, then compile what comes out"
            )
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
    model: nn.Module,
    tracer: fx.Tracer | None = None,
    device: torch.device | None = None,
    inputs: Sequence[Any] | None = None,
) -> fx.GraphModule:
    """Trace a model, in eval mode, without changing it.

    With `inputs` the graph is compared with the model, since a symbol is never None nor a tensor to
    `isinstance`. Where symbolic tracing fails or goes astray, Python's questions (how long is this
    list, is this size odd) are answered as for these inputs; the graph stays symbolic, and
    `module.meta["zipfx_notes"]` says where forward went by a shape. Where that goes astray too,
    `x += y` is taken for the write that it is, not for `x = x + y`.

    Args:
        model: any module that `torch.fx` can trace; a GraphModule keeps its graph as it is.
        tracer: an `fx.Tracer` of your own, e.g. with more leaf modules; used as it is.
        device: where the traced module is to live; default: where the model is.
        inputs: forward's arguments, on that device.

    Returns:
        A GraphModule with the model's parameters (shared), copies of its buffers, and the same
        qualified names. `node.meta["nn_module_stack"]` tells the modules a node came from.

    Raises:
        ZipError: the model can not be traced; the message names the line that could not.
            The graph computes something else than the model.

    >>> import torch
    >>> gm = trace(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
    >>> [node.op for node in gm.graph.nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    with _own_randomness(model):
        if tracer is None and isinstance(model, fx.GraphModule):
            return _as_traced(model, device)
        if tracer is not None or inputs is None:
            return _traced(model, tracer or Tracer(), device)
        *first, last = ways(model, inputs)
        for make in first:
            with suppress(ZipError):
                return _checked(_traced(model, make(), device), model, inputs)
        return _checked(_traced(model, last(), device), model, inputs)


def ways(model: nn.Module, inputs: Sequence[Any]) -> list[Callable[[], fx.Tracer]]:
    """The ways to trace a model with inputs, in the order in which they are tried."""
    bound = _bound(model, inputs)
    found: list[Callable[[], fx.Tracer]] = [
        Tracer,
        lambda: ExampleTracer(clone_tensors(bound)),
        lambda: ExampleTracer(clone_tensors(bound), writes=True),
    ]
    given = all(x is not None for x in bound)  # what is not given could be a mask
    if given and any(type(m) in OPENED for m in model.modules()):
        found.insert(0, lambda: ExampleTracer(clone_tensors(bound), opened=True))
    return found


def _own_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Whatever is drawn inside, the caller's generators are left as they were."""
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.is_cuda})
    return torch.random.fork_rng(devices=devices)


def _checked(module: fx.GraphModule, model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """The module, if it computes what the model computes (or the model itself does not run)."""
    device = next((t.device for t in module.parameters()), None)
    away = any(t.device != device for t in model.parameters())
    twin = structural_copy(model, share_parameters=not away).to(device if away else None)
    found = []
    for own in (twin, module):
        try:
            with torch.no_grad(), _own_randomness(module):
                found.append(leaves(_run(own, inputs)))
        except Exception as error:
            if own is twin:
                return module
            raise _astray(model, first_line(error)) from error
    expected, ours = ([t for t in ts if isinstance(t, torch.Tensor)] for ts in found)
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in ours]:
        raise _astray(model, "outputs have other shapes")
    if not all(map(close, expected, ours)):
        raise _astray(model, "outputs have other values")
    return module


def _run(module: nn.Module, inputs: Sequence[Any]) -> Any:
    """What a module computes; it may write to its parameters, and so does not find them changed."""
    args, named = clone_tensors(tuple(inputs)), {}
    forward: Any
    if isinstance(module, fx.GraphModule):
        forward = fx.Interpreter(alias(module), graph=module.graph).run
    else:
        forward = copy.deepcopy(module, _views(module))
        kinds = {n: p.kind for n, p in inspect.signature(module.forward).parameters.items()}
        if inspect.Parameter.VAR_POSITIONAL not in kinds.values():
            taken = dict(zip(kinds, args))
            named = {n: a for n, a in taken.items() if kinds[n] is inspect.Parameter.KEYWORD_ONLY}
            args = args[: len(args) - len(named)]
    with untouched([*module.parameters(), *module.buffers()]):
        return forward(*args, **named)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, but for rounding."""
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    scale = float(a.abs().nan_to_num(0, 0).sum()) / max(1, a.numel())
    return torch.allclose(a, b, 1e-3, 1e-3 * scale, equal_nan=True)


def _astray(model: nn.Module, what: str) -> ZipError:
    return ZipError(
        f"the traced graph does not compute what {type(model).__name__} computes on the example "
        f"inputs ({what}): forward asks what a symbol can not answer (isinstance, try, random "
        "numbers of Python). Move that into a function marked with torch.fx.wrap, or make the "
        "module that holds it a leaf with a tracer of your own (tracer=...)"
    )


def _traced(model: nn.Module, tracer: fx.Tracer, device: torch.device | None) -> fx.GraphModule:
    twin = structural_copy(model, share_parameters=device is None).to(device)
    own = frozenset(name for name, _ in twin.named_buffers(remove_duplicate=False))
    aware = tracer if isinstance(tracer, ExampleTracer) else None
    root = copy.deepcopy(twin, _views(twin)) if aware else twin
    try:
        with (
            untouched([*root.parameters(), *root.buffers()] if aware else []),  # forward runs
            decomposed(None),  # transformers ask whether one kernel may do it all
        ):
            graph = tracer.trace(root)
    except ZipError:
        raise
    except Exception as error:
        raise ZipError(_untraceable(root, error)) from error
    if aware:
        _drop_answered(graph, aware.asked)
    _give_defaults(graph)
    _sink_shapes(graph)
    constants = {name: t for name, t in vars(root).items() if name not in vars(twin)}
    twin.__dict__.update(constants)
    module = fx.GraphModule(twin, graph, type(model).__name__)
    module.meta[CONSTANTS] = frozenset(dict(module.named_buffers())) - own
    module.meta[NOTES] = list(aware.notes) if aware else []
    module.meta[NOTES] += [
        f"the backward of {name} is not part of the result, since its forward was traced: call it "
        "in a function marked with torch.fx.wrap to keep it"
        for name in getattr(tracer, "functions", ())
    ]
    return _with_tree(module, twin)


def _as_traced(model: fx.GraphModule, device: torch.device | None) -> fx.GraphModule:
    """A graph that was traced before, with its order and names."""
    twin = structural_copy(model, share_parameters=device is None).to(device)
    assert isinstance(twin, fx.GraphModule)
    for node in twin.graph.nodes:
        if node.op == "call_module" and len(node.meta.get("nn_module_stack", ())) < 2:  # was lost
            parts = str(node.target).split(".")
            paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
            stack = {path: (path, type(twin.get_submodule(path))) for path in paths}
            node.meta["nn_module_stack"] = stack
    module = fx.GraphModule(twin, twin.graph, type(model).__name__)
    module.meta[CONSTANTS] = frozenset(model.meta.get(CONSTANTS, ()))
    module.meta[NOTES] = list(model.meta.get(NOTES, ()))
    return _with_tree(module, twin)


def _with_tree(module: fx.GraphModule, twin: nn.Module) -> fx.GraphModule:
    for kind in ("_modules", "_parameters", "_buffers"):  # with containers, and what is not used
        module.__dict__[kind] = {**twin.__dict__[kind], **{
            k: v for k, v in module.__dict__[kind].items() if k not in twin.__dict__[kind]
        }}  # fmt: skip
    # constants are part of the code, not of the state
    module._non_persistent_buffers_set = twin._non_persistent_buffers_set | module.meta[CONSTANTS]
    module.eval()
    module.graph.lint()
    return module


def _bound(model: nn.Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """One value for each argument of forward, defaults included."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*inputs)
    except TypeError as error:
        if len(inputs) > len(signature.parameters):
            raise ZipError(f"example_inputs do not fit the model's forward: {error}") from error
        return tuple(inputs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def _drop_answered(graph: fx.Graph, asked: set[fx.Node]) -> None:
    """Erase what was computed only to answer a question of Python."""
    asked = set(asked)
    for node in reversed(list(graph.nodes)):
        function = getattr(node.target, "__name__", "")
        pure = (node.op == "call_method" and node.target in ("size", "dim", "numel")) or (
            node.op == "call_function"
            and (node.target is getattr or node.target is getattr(operator, function, None))
            and not function.startswith("i")  # iadd and the like write
            and node.target is not operator.setitem
        )
        if node in asked and pure and not node.users:
            asked.update(node.all_input_nodes)
            graph.erase_node(node)


def _give_defaults(graph: fx.Graph) -> None:
    """Arguments that must be named may come in any order; those of a graph have defaults last."""
    optional = False
    for node in graph.nodes:
        if node.op == "placeholder" and not str(node.target).startswith("*"):
            if optional and not node.args:
                node.args = (None,)
            optional |= bool(node.args)


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


def _untraceable(root: nn.Module, error: Exception) -> str:
    names = {id(m): name for name, m in root.named_modules()}
    place, path = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, code = frame.f_code.co_filename, frame.f_code
        if is_tracing_code(file) or "/torch/" in file.replace("\\", "/"):
            continue
        place = f" at {file}:{line} ({linecache.getline(file, line).strip()})"
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        path = names.get(id(owner), path)
    inside = f" in module {path!r}" if path else ""
    return (
        f"torch.fx can not trace {type(root).__name__}{inside}{place}: {first_line(error)}. Move "
        "the line into a function marked with torch.fx.wrap, make the module that holds it a leaf "
        "with a tracer of your own (tracer=...), or zip a smaller module that does not hold it, "
        "such as the part before it"
    )


def alias(module: nn.Module) -> nn.Module:
    """The module tree once more, on the same memory: for running it under `untouched`.

    Its tensors count their own writes, so that autograd does not see those in the originals.
    """
    memo = _views(module)
    twin = nn.Module()
    for kind in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[kind] = copy.deepcopy(module.__dict__[kind], memo)
    return twin


def _views(module: nn.Module) -> dict[int, Any]:
    """id of every tensor of a module -> another tensor on the same memory."""
    memo: dict[int, Any] = {id(b): b.data for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
    return memo


def leaves(value: Any) -> list[Any]:
    """As `tree_leaves`, and what dataclasses hold."""
    found = []
    for x in tree_leaves(value):
        parts = _fields(x)
        found += [x] if parts is None else leaves(parts)
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same value with every tensor in it replaced, also in dataclasses."""

    def replaced(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return function(x)
        parts = _fields(x)
        if parts is None:
            return x
        twin = copy.copy(x)
        for name, part in parts.items():
            object.__setattr__(twin, name, map_tensors(function, part))
        return twin

    return tree_map(replaced, value)


def _fields(x: Any) -> dict[str, Any] | None:
    """What a dataclass holds (None: it is none); to pytree it is a leaf."""
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return None
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}


def clone_tensors(value: Any) -> Any:
    """A copy of every tensor in a value, for graphs that may write into their inputs."""
    return map_tensors(torch.Tensor.clone, value)


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
