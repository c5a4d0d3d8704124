"""Files: a merged module as one safetensors file, and back.

The file holds every tensor of the module under its name in `state_dict` (and those that this leaves
out), and in its metadata a header in JSON: the recipe of the graph, the shapes of the example
inputs, modes, what is tied, and the report. Whatever reads safetensors can read the tensors.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.calibrate import example_arguments, fixed_randomness
from zipfx.correspond import check_models
from zipfx.errors import ZipError, first_line
from zipfx.plain import read, written
from zipfx.recipe import Recipe, misfit, rebuilt, recipe_of
from zipfx.report import Report
from zipfx.rewrite import MergedModule, own_tensors
from zipfx.standins import TRACED, Traced, drawn
from zipfx.trace import trace, ways

VERSION = 1  # of the format
KEY = "zipfx"


@dataclass(frozen=True)
class Header:
    """What a file says besides its tensors.

    version: of the format; zipfx, torch: those that wrote it; training: names of the modules in
    train mode; frozen: of the parameters without gradients; tied: further names of tensors -> the
    names that they are stored under; strides: of tensors that are not contiguous; complex: tensors
    that are stored as pairs of real numbers.
    """

    version: int
    zipfx: str
    torch: str
    recipe: Recipe
    traced: Traced
    training: tuple[str, ...]
    frozen: tuple[str, ...]
    tied: dict[str, str]
    strides: dict[str, tuple[int, ...]]
    complex: tuple[str, ...]
    report: Report


def save(merged: fx.GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a merged module to one safetensors file, to be read by `zipfx.load`.

    The module is left unchanged. The file holds weights and buffers, which nodes the graph has, and
    the report; neither code nor data. This needs safetensors: pip install 'zipfx[save]'.

    Args:
        merged: the result of `zipfx.zip` or `zipfx.head`, on any device; it may be fine-tuned. If
            layers of it are replaced, `load` needs models where the same layers are.
        path: of the file, by custom `*.safetensors`; what is there is overwritten.

    Raises:
        ZipError: safetensors is not installed; or the module is none that `zip` made, or its graph
            has been changed since.

    >>> import torch, zipfx
    >>> from torch import nn
    >>> net = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> x = torch.randn(32, 4)
    >>> merged = zipfx.zip([net(), net()], [x], partial="1", progress=False)
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zipfx.save(merged, folder + "/merged.safetensors")
    ...     again = zipfx.load(folder + "/merged.safetensors", [net(), net()])
    >>> all(torch.equal(a, b) for a, b in zip(merged(x), again(x)))
    True
    """
    safetensors = _safetensors()
    report, traced = (getattr(merged, "meta", {}).get(key) for key in (KEY, TRACED))
    if hasattr(merged, "_orig_mod"):
        raise ZipError("the module was compiled (torch.compile): save the one that zip gave")
    if not (
        isinstance(merged, MergedModule)
        and isinstance(report, Report)
        and isinstance(traced, Traced)
    ):
        raise ZipError(
            f"a {type(merged).__name__} can not be saved: only what zipfx.zip, zipfx.head or "
            "zipfx.load gave can (torch.load does not bring back all that is needed)"
        )
    try:
        recipe = recipe_of(merged, report.models, report.partial is not None)
    except ZipError as error:
        raise ZipError(
            f"this merge can not be saved, since it was changed: {error}. Save it before you "
            "change its graph, or keep it with torch.save"
        ) from error
    tensors = _tensors(merged)
    tied = _tied(tensors)
    own = {name: t for name, t in tensors.items() if name not in tied}
    header = Header(
        VERSION,
        _version(),
        torch.__version__,
        recipe,
        traced,
        training=tuple(name for name, m in merged.named_modules() if m.training),
        frozen=tuple(name for name, p in merged.named_parameters() if not p.requires_grad),
        tied=tied,
        strides={name: s for name, t in own.items() if (s := _strides(t)) is not None},
        complex=tuple(name for name, t in own.items() if t.is_complex()),
        report=report,
    )
    try:
        # one entry: several would come in another order each time
        safetensors.torch.save_file(_stored(own), path, {KEY: written(header)})
    except (safetensors.SafetensorError, KeyError, ValueError, NotImplementedError) as error:
        raise ZipError(f"safetensors can not store this module: {first_line(error)}") from error


def load(
    path: str | os.PathLike[str],
    models: Sequence[nn.Module],
    *,
    tracer: fx.Tracer | None = None,
    example_inputs: Any = None,
) -> fx.GraphModule:
    """Read a merged module that `zipfx.save` wrote; nothing that is in the file is executed.

    The models are left unchanged. What a file does not hold comes from them: layers, with their
    settings, and functions. Their weights do not matter. They are traced, and compared node by node
    with what was saved; no data is needed, nothing is analysed, matched or repaired again.

    Args:
        path: of the file.
        models: K modules of the architectures that were given to `zip`, in that order; any weights,
            on any device, also "meta". One may stand for several that are alike: [model] * K.
        tracer: the `fx.Tracer` that `zip` was given, if it was given one.
        example_inputs: input (or tuple of arguments) to trace with, as in `zip`; default: random
            ones of the shapes and dtypes that `zip` traced with. Only models that can not be traced
            symbolically are run on them.

    Returns:
        A GraphModule like the saved one, with the same graph, names, tensors (to the bit, in their
        dtypes and memory formats), modes and report; on the device of models[0] (on the CPU, if
        that is "meta"). `zipfx.head`, `zipfx.save`, `copy.deepcopy` and the like work as before.

    Raises:
        ZipError: safetensors is not installed; the file is damaged, or not written by `zipfx.save`,
            or by a later version; the models are not of the architecture that was saved.
        OSError: the file can not be opened.
    """
    try:
        check_models(models)
        header, tensors = _read_file(path)
        return _loaded(header, tensors, models, tracer, example_inputs)
    except ZipError as error:
        raise ZipError(f"{os.fspath(path)!r} can not be loaded: {error}") from error


def _loaded(
    header: Header,
    tensors: dict[str, Tensor],
    models: Sequence[nn.Module],
    tracer: fx.Tracer | None,
    example_inputs: Any,
) -> MergedModule:
    recipe = header.recipe
    if len(models) != recipe.models:
        raise ZipError(f"it is a merge of {recipe.models} models, and {len(models)} are given")
    if not set(recipe.heads) <= set(range(recipe.models)):
        raise ZipError(f"heads {recipe.heads} of {recipe.models} models make no sense")

    def take(name: str, like: Tensor | None) -> Tensor:
        if header.tied.get(name, name) not in tensors:
            raise ZipError(f"the models have a tensor {name!r}, and the file does not: {_AS_SAVED}")
        found = tensors[header.tied.get(name, name)]
        if like is not None and (found.shape, _kind(found)) != (like.shape, _kind(like)):
            raise ZipError(
                f"{name!r} is {_kind(found)} {tuple(found.shape)} in the file and {_kind(like)} "
                f"{tuple(like.shape)} in the models: {_AS_SAVED}"
            )
        return found

    with fixed_randomness(0), torch.no_grad():
        own = [_off_meta(model) if k in recipe.needs else model for k, model in enumerate(models)]
        home = next((t.device for t in _tensors(own[0]).values()), torch.device("cpu"))
        traced = {k: _traced(own[k], k, header, tracer, example_inputs, home) for k in recipe.needs}
        merged = rebuilt(recipe, traced, take)
    found = _tensors(merged)
    left = sorted({*tensors, *header.tied} - set(found))
    if left:
        raise ZipError(f"the file has a tensor {left[0]!r}, and the models do not: {_AS_SAVED}")
    tied = _tied(found)
    if tied != header.tied:
        name = min(set(tied.items()) ^ set(header.tied.items()))[0]
        raise ZipError(
            f"{name!r} is tied to another tensor in the {'models' if name in tied else 'file'} "
            "only: tie or untie weights as in the models that were saved"
        )
    training, frozen = set(header.training), set(header.frozen)
    for name, module in merged.named_modules():
        module.training = name in training
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(name not in frozen)
    merged.meta.update({TRACED: header.traced, KEY: header.report})
    return merged.to(home)


_AS_SAVED = "give models of the architecture that was saved"


def _traced(
    model: nn.Module,
    k: int,
    header: Header,
    tracer: fx.Tracer | None,
    example_inputs: Any,
    device: torch.device,
) -> fx.GraphModule:
    """Model k as zip traced it: in the first of the ways to trace that gives what was saved."""
    makers: list[Callable[[], fx.Tracer | None]] = [lambda: tracer]
    if tracer is None and not isinstance(model, fx.GraphModule):
        given = drawn(header.traced.inputs, device) if example_inputs is None else example_inputs
        makers = [*ways(model, example_arguments(model.forward, None, given, device))]
    failures, misfits = [], []
    for make in makers:
        try:
            module = trace(model, make())
        except ZipError as error:
            failures.append(str(error))
            continue
        found = misfit(header.recipe, k, module)
        if found is None:
            return module
        misfits.append(found)
    own = header.traced.tracer
    raise ZipError(
        f"model {k} is not of the architecture that was saved: {[*misfits, *failures][0]}"
        + f". zip was given tracer={own}: give the same to load" * bool(own and tracer is None)
    )


def _off_meta(model: nn.Module) -> nn.Module:
    """The model, or zeros in its place where it has shapes only."""
    if not any(t.is_meta for t in _tensors(model).values()):
        return model
    twin = copy.deepcopy(model).to_empty(device="cpu")
    for t in _tensors(twin).values():
        t.zero_()
    return twin


# ------------------------------------------------------------------ tensors
def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module by all of their names."""
    return {
        f"{path}.{name}" if path else name: t
        for path, part in module.named_modules(remove_duplicate=False)
        for name, t in own_tensors(part).items()
    }


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Every further name of a tensor -> its first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name
    }


def _kind(t: Tensor) -> str:
    return "float" if t.is_floating_point() else "complex" if t.is_complex() else "integer"


def _strides(t: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense, but not in the usual order (None: it is)."""
    dense = torch.empty_like(t, device="meta").stride()
    return None if dense == torch.empty(t.shape, device="meta").stride() else dense


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous real tensors on the CPU, each on memory of its own, as safetensors wants them."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in tensors.items():
        t = t.detach().resolve_conj().resolve_neg()
        t = (torch.view_as_real(t) if t.is_complex() else t).cpu().contiguous()
        memory = t.untyped_storage().data_ptr()
        found[name] = t.clone() if memory in seen else t
        seen.add(memory)
    return found


def _restored(name: str, t: Tensor, header: Header) -> Tensor:
    """A tensor as it was before it was stored."""
    try:
        # in a file, complex numbers need not lie where the processor wants them
        t = torch.view_as_complex(t.clone()) if name in header.complex else t
        strides = header.strides.get(name, t.stride())
        like = torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta")
        if torch.empty_like(like).stride() != strides:
            raise RuntimeError(f"strides {strides} for shape {tuple(t.shape)}")
    except RuntimeError as error:
        raise ZipError(f"{name!r} is damaged ({first_line(error)}); save it again") from error
    # a copy, since the file may be written again while it is used
    return torch.empty_like(like, device="cpu").copy_(t)


# ------------------------------------------------------------------ the file
def _read_file(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = _header(file.metadata() or {})
            names: list[str] = file.keys()
            return header, {name: _restored(name, file.get_tensor(name), header) for name in names}
    except safetensors.SafetensorError as error:
        raise ZipError(
            f"it is no safetensors file, or only a part of one ({first_line(error)}); save it again"
        ) from error


def _header(metadata: dict[str, str]) -> Header:
    if KEY not in metadata:
        raise ZipError("it is a safetensors file, but was not written by zipfx.save")
    try:
        about = json.loads(metadata[KEY])
        if about["version"] > VERSION:
            raise ZipError(
                f"it was written by zipfx {about['zipfx']}, in version {about['version']} of the "
                f"format, and zipfx {_version()} reads version {VERSION}: install a later zipfx"
            )
        return read(Header, metadata[KEY])
    except (ValueError, KeyError, TypeError) as error:
        raise ZipError(f"its header is damaged ({first_line(error)}); save it again") from error


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ZipError(
            "zipfx.save and zipfx.load need safetensors: pip install 'zipfx[save]'"
        ) from error
    return importlib.import_module("safetensors")


def _version() -> str:
    try:
        return importlib.metadata.version("zipfx")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
