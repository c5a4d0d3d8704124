"""Running: run a model so that nothing of it changes, and all that it computes can be seen.

Forward may write to its parameters and buffers.  Copying them all beforehand would double the
memory; here a tensor is copied when it is about to be written to, and restored at the end
(`untouched`).  For a time a model can be in eval mode, without the fused paths inside which no aten
call is seen, or in another dtype; what its nodes compute, and what it writes to, can be noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zipfx.errors import ZipError, first_line
from zipfx.model.copies import alias
from zipfx.model.memory import storage_key
from zipfx.model.tensors import clone_tensors, leaves, named_tensors
from zipfx.modes import as_caller


@contextmanager
def untouched(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo at exit what happened to these tensors inside.

    >>> weight = torch.zeros(2)
    >>> with untouched([weight]):
    ...     _ = weight.view(1, 2).add_(1)
    >>> weight
    tensor([0., 0.])
    """
    guard = Guard(tensors)
    try:
        with guard:
            yield
    finally:
        guard.restore()


class Guard(TorchDispatchMode):
    """While it is on, keeps what these tensors held before they were written to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = list(tensors)
        self._owned = {storage_key(t) for t in self._tensors}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in overwritten(func, args, kwargs or {}):
            self._save(t)
        return func(*args, **(kwargs or {}))

    def _save(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self._owned and storage._cdata not in self._saved:
            whole = torch.empty(0, dtype=t.dtype, device=t.device)
            whole = whole.set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))
            self._saved[storage._cdata] = whole, whole.clone()

    def restore(self) -> None:
        """Undo all writes."""
        with torch.no_grad():
            for whole, before in self._saved.values():
                whole.copy_(before)

    @property
    def written(self) -> list[Tensor]:
        """Those of the tensors that were written to, as far as memory tells."""
        return [t for t in self._tensors if storage_key(t) in self._saved]


class State:
    """Tensors that a module's forward writes to, and what they hold before it ever runs.

    Whatever is run on data begins each time with that, so that a result depends neither on the
    order of batches nor on how many there were.

    >>> counter = torch.zeros(2)
    >>> state = State([counter])
    >>> _ = counter.add_(1)
    >>> state.reset()
    >>> counter
    tensor([0., 0.])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.initial = self.values()

    def values(self) -> list[Tensor]:
        """What they hold now."""
        return [t.detach().clone() for t in self.tensors]

    def reset(self, values: Sequence[Tensor] | None = None) -> None:
        """Write what they held at first, or other values."""
        with torch.no_grad():
            for t, value in zip(self.tensors, self.initial if values is None else values):
                t.copy_(value)


def overwritten(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten call writes to; a norm does so in training only, whatever its schema
    says."""
    found, name = declared(op, args, kwargs), op._schema.name
    if "batch_norm" not in name:
        return found
    given = {a.name: v for a, v in zip(op._schema.arguments, args)} | kwargs
    statistics = [given.get(key) for key in ("running_mean", "running_var")]
    others = [t for t in found if all(t is not s for s in statistics)]
    trains = given.get("training", name.endswith("_with_update"))
    return [*others, *(t for t in statistics if trains and isinstance(t, Tensor))]


def declared(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten call writes to, by its schema."""
    if torch.Tag.inplace_view in op.tags:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


@contextmanager
def decomposed(module: nn.Module | None) -> Iterator[None]:
    """Switch off the fused paths, inside which no aten call can be seen, then restore them.

    module: the one that is to run, if any; oneDNN and cuDNN are only off for recurrent layers.
    """
    mha: Any = torch.backends.mha
    kernels: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    fast, enabled = mha.get_fastpath_enabled(), [kernel.enabled for kernel in kernels]
    recurrent = module is not None and any(isinstance(m, nn.RNNBase) for m in module.modules())
    try:
        mha.set_fastpath_enabled(False)
        for kernel in kernels if recurrent else ():
            kernel.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(fast)
        for kernel, value in zip(kernels, enabled, strict=True) if recurrent else ():
            kernel.enabled = value


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """In eval mode inside; modes are restored."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def renewed(model: nn.Module) -> nn.Module:
    """The model itself, whose weights were exchanged: it forgets what it has computed from those
    it had.

    Some classes keep that for later calls in eval mode (a table of position biases, say), and drop
    it in a `train` of their own, which is called here. Modes stay as they are.
    """
    modes = [(m, m.training) for m in model.modules()]
    for m, _ in modes:
        if getattr(type(m), "train", nn.Module.train) is not nn.Module.train:
            m.train()
    for m, mode in modes:
        m.training = mode
    return model


class Noting(fx.Interpreter):
    """Notes in `found` what there is to see at the nodes of a graph that runs in eval mode; nothing
    is written to."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(alias(module).eval(), graph=module.graph)
        self.found: dict[Any, Any] = {}

    def noted(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """What was found on these inputs, one for each placeholder."""
        own = (*self.module.parameters(), *self.module.buffers())
        with untouched(own), torch.no_grad(), as_caller():
            self.run(*clone_tensors(tuple(inputs)))
        return self.found


def state_of(
    module: fx.GraphModule, inputs: Sequence[Any], what: str = "the merged model fails"
) -> State:
    """What forward writes to in eval mode, going by a run on these inputs; all is as before.

    Raises:
        ZipError: it fails on them; the message begins with `what`.
    """
    twin = alias(module).eval()  # whose tensors count their own writes
    tensors = dict(zip(named_tensors(twin).values(), named_tensors(module).values(), strict=True))
    guard = Guard(tensors)
    try:
        with torch.no_grad(), guard, as_caller():
            fx.Interpreter(twin, graph=module.graph).run(*clone_tensors(tuple(inputs)))
    except Exception as error:
        hint = other_dtype(module, inputs)
        raise ZipError(f"{what}: {first_line(error)}. Pass {hint}") from error
    finally:
        guard.restore()
    return State(tensors[t] for t in guard.written)


def other_dtype(module: nn.Module, inputs: Any) -> str:
    """What to pass where a model fails: of other dtypes than its weights, where these differ."""
    floats = {t.dtype for t in module.parameters() if t.is_floating_point()}
    given = [t for t in leaves(inputs) if isinstance(t, Tensor)]
    odd = [t.dtype for t in given if t.dtype == torch.uint8 or t.is_floating_point()]
    if floats and odd and not floats & set(odd):
        ours, theirs = (str(d).removeprefix("torch.") for d in (min(floats, key=str), odd[0]))
        return (
            f"inputs of the dtype of the weights, {ours}: these are {theirs} (for instance "
            f"batch_to_args=lambda batch: batch.to(torch.{ours}), scaled as in training)"
        )
    return "inputs that the model itself accepts"


class _Shapes(Noting):
    """Notes the shapes of all tensors that nodes compute, but for complex numbers."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and not value.is_complex():
            self.found[n] = value.shape
        return value


def shapes(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, torch.Size]:
    """Of all tensors that the nodes of a graph compute in eval mode (complex ones are none that a
    layer could aim at); nothing is written to."""
    return _Shapes(module).noted(inputs)


class Wide(TorchDispatchMode):
    """What asks for a dtype of real numbers gets this one (of complex ones, that of its pairs):
    where all weights are float64, another would not fit them."""

    def __init__(self, dtype: torch.dtype | None = torch.float64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if self.dtype is not None and dtype is not None and func is not torch.ops.aten.view.dtype:
            if dtype.is_floating_point:
                kwargs["dtype"] = self.dtype
            elif dtype.is_complex:
                kwargs["dtype"] = self.dtype.to_complex()
        result = func(*args, **kwargs)
        odd = isinstance(result, Tensor) and result.is_floating_point()
        if self.dtype is None or not odd or result.dtype == self.dtype:
            return result
        if any(isinstance(a, Tensor) for a in leaves((args, kwargs))):
            return result
        return result.to(self.dtype)  # of the default dtype, as nothing else was asked for
