"""Files: a merged module as one safetensors file, and back.

The file holds every tensor of the module under its name in `state_dict` (and those that this leaves
out), and in its metadata a header in JSON: the recipe of the graph, the shapes of the example
inputs, modes, what is tied, and the report. Whatever reads safetensors can read the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.errors import ZipError, first_line
from zipfx.merge import MergedModule, find_computed, homes, put_back_as_saved
from zipfx.model.contents import check_models
from zipfx.model.parametrized import how_computed
from zipfx.modes import fixed_randomness, own_modes
from zipfx.report.files.made import as_made, check_as_made, extra_texts
from zipfx.report.files.rebuild import rebuilt
from zipfx.report.files.recipe import Recipe
from zipfx.report.files.retrace import Way, off_meta, retraced
from zipfx.report.files.stand_ins import Traced, as_described
from zipfx.report.files.stored import (
    check_storable,
    further_names,
    kind,
    named,
    restored,
    stored,
    strides,
)
from zipfx.report.format.as_json import parsed, read, written
from zipfx.report.format.container import LONGEST, contents, library, unsigned, write
from zipfx.report.format.disk import replacing, text_path
from zipfx.report.report import Report
from zipfx.trace import KEY, Front, FrontName, front_of
from zipfx.version import __version__

#: of the format; 1 had no checksum, and NaN and Infinity in its JSON
VERSION = 2


@dataclass(frozen=True)
class Header:
    """What a file says besides its tensors.

    version: of the format; zipfx, torch: those that wrote it; training: names of the modules in
    train mode; frozen: of the parameters without gradients; tied: further names of tensors -> the
    names that they are stored under; strides: of tensors that are not contiguous; complex: tensors
    that are stored as pairs of real numbers; computed: by name, of tensors that are
    computed from others, how; extra: by path of a module with extra state, what tells it.
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
    computed: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)


@own_modes()
def save(merged: fx.GraphModule, path: str | bytes | os.PathLike[str]) -> None:
    """Write a merged module to one safetensors file, to be read by `zipfx.load`.

    The module is left unchanged. The file holds weights and buffers, which nodes the graph has, and
    the report (but for seconds and bytes); neither code nor data. Equal merges are equal files.
    This needs safetensors: pip install 'zipfx[save]'.

    The file takes its place at once, when it is complete; if anything fails, what was there stays.
    A file that is overwritten keeps its mode, and a symbolic link leads to the new file.

    Args:
        merged: the result of `zipfx.zip`, `zipfx.head` or `zipfx.load`, on any device; it may be
            fine-tuned, cast, frozen or moved. What `load` could not bring back is refused: layers
            that were replaced or wrapped (pruning, LoRA, parametrizations), settings or extra state
            that were changed, hooks, tensors that are no plain ones.
        path: of the file, by custom `*.safetensors`; what is there is overwritten.

    Raises:
        ZipError: safetensors is not installed; or the module is none that `zip` made, or has been
            changed since; or `path` is that of a folder or a device.
        OSError: the file can not be written.

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
    library()
    path = text_path(path)
    report, traced = _of_a_merge(merged)
    try:
        tensors = named(merged)
        for name, t in tensors.items():
            check_storable(name, t)
        recipe = check_as_made(merged, report.models, report.partial is not None)
    except ZipError as error:
        raise ZipError(
            f"this merge can not be saved as it is now: {error}. load could not bring that back: "
            "save a merge before you change it so, or keep it with torch.save"
        ) from error
    further = further_names(tensors)
    own = {name: t for name, t in tensors.items() if name not in further}
    header = Header(
        VERSION,
        __version__,
        torch.__version__,
        recipe,
        traced,
        training=tuple(name for name, m in merged.named_modules() if m.training),
        frozen=tuple(name for name, p in merged.named_parameters() if not p.requires_grad),
        tied=further,
        strides={name: s for name, t in own.items() if (s := strides(t)) is not None},
        complex=tuple(name for name, t in own.items() if t.is_complex()),
        report=replace(report, seconds={}, bytes={}),  # of one run: equal merges are equal files
        computed=how_computed(merged),
        extra=extra_texts(merged),
    )
    flat = {name: stored(t) for name, t in own.items()}
    text = _text(header)
    with replacing(path) as file:
        write(file, text, flat)


def _of_a_merge(merged: Any) -> tuple[Report, Traced]:
    report = getattr(merged, "meta", {}).get(KEY)
    traced = getattr(report, "traced", None)
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
    return report, traced


def _text(header: Header) -> str:
    """The header as it is in the file; it is read once, to be sure that it can be."""
    try:
        text = written(header)
        if read(Header, text) != header:
            raise ValueError("it would not come back as it is")
    except ValueError as error:
        raise ZipError(f"what is known of this merge can not be written: {error}") from error
    if len(text) + 100 > LONGEST:  # with its checksum
        raise ZipError(
            f"this merge has {len(header.recipe.steps):,} nodes, and its header {len(text):,} "
            f"bytes; load reads {LONGEST:,} at most: keep it with torch.save"
        )
    return text


@own_modes()
def load(
    path: str | bytes | os.PathLike[str],
    models: Sequence[nn.Module],
    *,
    tracer: fx.Tracer | None = None,
    example_inputs: Any = None,
    front: str | Front = "auto",
) -> fx.GraphModule:
    """Read a merged module that `zipfx.save` wrote; nothing that is in the file is executed.

    The models are left unchanged. What a file does not hold comes from them: layers, with their
    settings and extra state, and functions. Their weights do not matter. They are traced, and
    compared node by node with what was saved; no data is needed, nothing is analysed, matched or
    repaired again. The file is not used any more afterwards.

    Args:
        path: of the file.
        models: K modules of the architectures that were given to `zip`, in that order; any weights,
            on any device, also "meta". One may stand for several that are alike: [model] * K.
        tracer: the `fx.Tracer` that `zip` was given, if it was given one.
        example_inputs: input (or tuple of arguments) to trace with, as in `zip`; default: random
            ones of the shapes and dtypes that `zip` traced with, if these are not very large. Only
            models that can not be traced symbolically need any, and of these only those that ask
            for more than shapes are run on them, and those that torch.export has traced.
        front: the `zipfx.Export` with settings, or the function, that `zip` was given, if any.

    Returns:
        A GraphModule like the saved one, with the same graph, names, tensors (to the bit, in their
        dtypes and memory formats), modes and report; on the device of models[0] (on the CPU, if
        that is "meta"). `zipfx.head`, `zipfx.save`, `copy.deepcopy` and the like work as before.

    Raises:
        ZipError: safetensors is not installed; the file is damaged, or not written by `zipfx.save`,
            or by a later version; the models are not of the architecture that was saved.
        OSError: the file can not be opened.
    """
    path = text_path(path)
    try:
        check_models(models, on_meta=True)
        with torch.no_grad():
            header, tensors = _read_file(path)
            _check_header(header, len(models))
            return _loaded(header, tensors, models, tracer, example_inputs, front_of(front))
    except ZipError as error:
        raise ZipError(f"{path!r} can not be loaded: {error}") from error


_AS_SAVED = "give models of the architecture that was saved"


def _loaded(
    header: Header,
    tensors: dict[str, Tensor],
    models: Sequence[nn.Module],
    tracer: fx.Tracer | None,
    example_inputs: Any,
    front: FrontName | Front,
) -> MergedModule:
    recipe = header.recipe

    names = {*tensors, *header.tied}

    def take(name: str, like: Tensor | None) -> Tensor:
        if name in header.computed and name not in names and like is not None:
            return torch.zeros_like(like)  # until its parametrization is put back
        if header.tied.get(name, name) not in tensors:
            raise ZipError(f"the models have a tensor {name!r}, and the file does not: {_AS_SAVED}")
        found = tensors[header.tied.get(name, name)]
        if like is not None and (found.shape, kind(found)) != (like.shape, kind(like)):
            raise ZipError(
                f"{name!r} is {kind(found)} {tuple(found.shape)} in the file and {kind(like)} "
                f"{tuple(like.shape)} in the models: {_AS_SAVED}"
            )
        return found

    with fixed_randomness(0):
        own = [off_meta(model) if k in recipe.needs else model for k, model in enumerate(models)]
        home = next((t.device for t in named(own[0]).values()), torch.device("cpu"))
        way = Way(header.traced, tracer, example_inputs, home, front)
        traced = {k: retraced(own[k], k, recipe, way) for k in recipe.needs}
        merged = rebuilt(recipe, traced, take)
    put_back_as_saved(
        merged, find_computed(merged, own, homes(len(own), header.report.partial)), names, take
    )
    for name, how in how_computed(merged).items() ^ header.computed.items():
        raise ZipError(
            f"{name!r} is computed in another way in the models than in the file "
            f"({how}): {_AS_SAVED}"
        )
    for path, _ in extra_texts(merged).items() ^ header.extra.items():
        raise ZipError(
            f"the extra state (get_extra_state) of module {path!r} is not in the file, and in the "
            "models it is not what it was in those that were saved: give models that have it"
        )
    found = named(merged)
    left = sorted(names - set(found))
    if left:
        raise ZipError(f"the file has a tensor {left[0]!r}, and the models do not: {_AS_SAVED}")
    _tie_alike(merged, found, header, tensors)
    _set_modes(merged, header)
    merged.to(home)
    made = as_made(merged, recipe.models, header.report.partial is not None)
    merged.meta[KEY] = replace(header.report, traced=header.traced, made=made)
    return merged


def _tie_alike(
    merged: nn.Module, found: dict[str, Tensor], header: Header, tensors: dict[str, Tensor]
) -> None:
    """Tie buffers as they were in the file, since moving a module to another dtype or device unties
    them; parameters must be tied alike in the models."""
    now = further_names(found)
    others = {name for name, _ in now.items() ^ header.tied.items()}
    for name in sorted(others):
        if isinstance(found[name], nn.Parameter):
            raise ZipError(
                f"{name!r} is tied to another tensor in the {'models' if name in now else 'file'} "
                "only: tie or untie weights as in the models that were saved"
            )
    others |= {tie[name] for tie in (now, header.tied) for name in others if name in tie}
    made: dict[str, Tensor] = {}
    for name in sorted(others):
        path, _, key = name.rpartition(".")
        module, first = merged.get_submodule(path), header.tied.get(name, name)
        home = module._buffers if key in module._buffers else vars(module)
        home[key] = made.setdefault(first, tensors[first].to(found[name].device))


def _set_modes(merged: nn.Module, header: Header) -> None:
    """Train and eval modes, and which parameters are frozen."""
    modules, parameters = dict(merged.named_modules()), dict(merged.named_parameters())
    training, frozen = set(header.training), set(header.frozen)
    if lost := sorted((training - set(modules)) | (frozen - set(parameters))):
        raise ZipError(
            f"its header tells of {lost[0]!r}, which the models do not have: {_AS_SAVED}"
        )
    for name, module in modules.items():
        module.training = name in training
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen and kind(parameter) != "integer")


# ------------------------------------------------------------------ the file
def _read_file(path: str) -> tuple[Header, dict[str, Tensor]]:
    with torch.device("cpu"):  # whatever the caller's default is
        text, found = contents(path)
        header = _header(text, found)
        if lost := sorted({*header.strides, *header.complex} - set(found)):
            raise ZipError(f"its header tells of a tensor {lost[0]!r}, which it does not hold")
        # copies, since the file may be written again while they are used
        return header, {
            name: restored(name, t, header.strides.get(name), name in header.complex)
            for name, t in found.items()
        }


def _header(text: str, tensors: dict[str, Tensor]) -> Header:
    if len(text) > LONGEST:
        raise ZipError(f"its header has {len(text):,} bytes, and at most {LONGEST:,} are read")
    try:
        about = parsed(text)
        if about["version"] > VERSION:
            raise ZipError(
                f"it was written by zipfx {about['zipfx']}, in version {about['version']} of the "
                f"format, and zipfx {__version__} reads version {VERSION}: install a later zipfx"
            )
        header = read(Header, text if about["version"] == 1 else unsigned(text, tensors))
        inputs = as_described(header.traced.inputs)  # which were written otherwise once
        return replace(header, traced=replace(header.traced, inputs=inputs))
    except (ValueError, KeyError, TypeError) as error:
        raise ZipError(f"its header is damaged ({first_line(error)}); save it again") from error


def _check_header(header: Header, models: int) -> None:
    """Check that the parts of a header say the same."""
    recipe, report = header.recipe, header.report
    if models != recipe.models:
        raise ZipError(f"it is a merge of {recipe.models} models, and {models} are given")
    heads = recipe.heads
    if not (set(heads) <= set(range(models)) and list(heads) == sorted(set(heads))):
        raise ZipError(f"heads {heads} of {models} models make no sense")
    if (report.models, report.partial is not None) != (models, bool(heads)):
        raise ZipError(
            f"its report is of {report.models} models, zipped up to {report.partial!r}, and its "
            f"graph of {models} models with heads {heads}; save it again"
        )
