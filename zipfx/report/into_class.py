"""Into class: a merge back in the class of a model, with all that the class can do.

A merge is a graph: it computes what forward computed, and has no `generate`, no
`save_pretrained`, no hooks. Its weights have the names of the model's, so they fit the class.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from zipfx.checks import module as checked_module
from zipfx.errors import ZipError, first_line
from zipfx.merge import HEADS
from zipfx.model.calls.arguments import call
from zipfx.model.contents import attributes
from zipfx.model.copies import structural_copy
from zipfx.model.parametrized import plain_class
from zipfx.model.running import renewed
from zipfx.model.tensors import alike, clone_tensors
from zipfx.modes import as_caller, own_modes
from zipfx.observe import example_arguments, example_batch
from zipfx.report.files.recipe import UNMERGE_NAME
from zipfx.report.files.stand_ins import drawn
from zipfx.report.report import Report
from zipfx.text import summary
from zipfx.trace import KEY, given_of, switched_off


@own_modes()
def to_model(
    merged: fx.GraphModule,
    like: nn.Module,
    head: int | None = None,
    *,
    example_inputs: Any = None,
) -> nn.Module:
    """A copy of the caller's model with the weights of a merge, which computes the merge.

    Args:
        merged: the result of `zipfx.zip`; left unchanged.
        like: a model of the class that is wanted, such as the first of those that were merged (of a
            partial zip: the one that `head` belongs to); left unchanged. What is no weight comes
            from it: modes, buffers that are not saved, and hooks, which the merge has not (they
            are no part of the comparison).
        head: of a partial zip, which task. The trunk's parameters are then those of `merged`
            itself, so that the models of all heads share them.
        example_inputs: what both are run on to see that they agree, as in `zip`; default: random
            inputs like those that `zip` traced with.

    Returns:
        The model, on the device of the merge.

    Raises:
        ZipError: the class has other weights, or ties them otherwise; the head puts features in
            another order before it reads them, for which the class has no place; the model does
            not compute what the merge computes.

    >>> import torch, zipfx
    >>> from torch import nn
    >>> net = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> models, data = [net(), net()], [torch.randn(32, 4)]
    >>> merged = zipfx.zip(models, data, progress=False)
    >>> model = zipfx.to_model(merged, like=models[0])
    >>> type(model).__name__, torch.allclose(model(data[0]), merged(data[0]), atol=1e-5)
    ('Sequential', True)
    """
    checked_module("like", like)
    if not isinstance(merged, fx.GraphModule):
        raise ZipError(f"merged is a {type(merged).__name__}, and no result of zipfx.zip")
    found = _sources(merged, head)
    model = copy.deepcopy(like)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **_lasting_buffers(model)}
    _check_fits(own, found, type(like).__name__)
    _check_settings(model, merged, head)
    made: dict[int, Tensor] = {}  # what is tied stays tied
    for name, t in own.items():
        made.setdefault(id(t), _as(t, found[name], shared=head is not None))
        _put(model, name, made[id(t)])
    device = next((t.device for t in found.values()), torch.device("cpu"))
    renewed(model.to(device))
    _check_computes(model, merged, head, example_inputs, device)
    return model


def _sources(merged: fx.GraphModule, head: int | None) -> dict[str, Tensor]:
    """By its name in the class: the tensor of a merge; what a head has comes before the trunk's."""
    tensors = {**dict(merged.named_parameters(remove_duplicate=False)), **_lasting_buffers(merged)}
    heads = merged._modules.get(HEADS)
    if heads is None:
        if head is not None:
            raise ZipError(f"there is no head {head!r}: a full zip is one model")
        return tensors
    count = len(list(heads.children()))
    if not isinstance(head, int) or not 0 <= head < count:
        raise ZipError(
            f"head is {head!r}: a partial zip is one model for each of {count} heads, so give one "
            f"of 0 to {count - 1}"
        )
    prefix = f"{HEADS}.{head}."
    unmerged = [n for n in dict(merged.named_buffers()) if n.startswith(prefix)
                and UNMERGE_NAME.fullmatch(n.removeprefix(prefix))]  # fmt: skip
    for name in unmerged:
        by = merged.get_buffer(name)
        if by.ndim != 1 or not torch.equal(by, torch.arange(len(by), device=by.device)):
            node = next(n for n in merged.graph.nodes if str(n.target) == name)
            reader = next(iter(node.users))
            raise ZipError(
                f"head {head} puts the features of node {reader.args[0]} in its own order before "
                f"it reads them (node {reader.name!r}), for which {type(merged).__name__} has no "
                "place: choose a cut after which a layer reads all features, use "
                f"zipfx.head(merged, {head}), or zip everything"
            )
    trunk = {n: t for n, t in tensors.items() if not n.startswith(f"{HEADS}.")}
    mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return {**trunk, **{n: t for n, t in mine.items() if not UNMERGE_NAME.fullmatch(n)}}


def _lasting_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved: others are constants of the class."""
    saved = module.state_dict(keep_vars=True)
    return {n: t for n, t in module.named_buffers(remove_duplicate=False) if n in saved}


def _check_fits(own: Mapping[str, Tensor], found: Mapping[str, Tensor], kind: str) -> None:
    lacking = sorted(set(own) - set(found))
    if lacking:
        raise ZipError(
            f"the merge has no {summary(lacking, 200)}, which {kind} has: give a model of the "
            "class of the first model (of a partial zip: of the head's model)"
        )
    first: dict[int, str] = {}
    for name, t in own.items():
        if (t.shape, t.dtype) != (found[name].shape, found[name].dtype):
            raise ZipError(
                f"{name!r} is {found[name].dtype} {tuple(found[name].shape)} in the merge and "
                f"{t.dtype} {tuple(t.shape)} in the {kind}: give a model like the merged ones"
            )
        other = first.setdefault(id(t), name)
        if found[name] is not found[other] and not torch.equal(found[name], found[other]):
            raise ZipError(
                f"{other!r} and {name!r} are one weight in {kind}, and two in the merge, of which "
                "one is in the trunk and one in the head: untie them, or zip everything"
            )


def _check_settings(model: nn.Module, merged: fx.GraphModule, head: int | None) -> None:
    """Layers that both have are set alike: not every input would show that they are not."""
    layers = dict(model.named_modules())
    for name, layer in merged.named_modules():
        mine = name.removeprefix(f"{HEADS}.{head}.")
        own = layers.get(mine)
        if (
            mine.startswith(f"{HEADS}.")
            or own is None
            or plain_class(own) is not plain_class(layer)
        ):
            continue
        if list(own.children()) or list(layer.children()):
            continue
        ours, theirs = attributes(own, tensors=False), attributes(layer, tensors=False)
        unlike = [key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
        if unlike:
            key = min(unlike)
            raise ZipError(
                f"module {mine!r} has {key}={ours[key]}, and {key}={theirs[key]} in the merge: "
                "give a model like those that were merged"
            )


def _as(t: Tensor, found: Tensor, *, shared: bool) -> Tensor:
    """A tensor of the merge in the place of a model's."""
    if not isinstance(t, nn.Parameter):
        return found.detach().clone()
    if shared and isinstance(found, nn.Parameter):
        return found
    return nn.Parameter(found.detach().clone(), requires_grad=t.requires_grad)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    kind = module._parameters if last in module._parameters else module._buffers
    kind[last] = value  # type: ignore[assignment]


def _check_computes(
    model: nn.Module,
    merged: fx.GraphModule,
    head: int | None,
    example_inputs: Any,
    device: torch.device,
) -> None:
    """Compare the model with the merge on inputs."""
    report = merged.meta.get(KEY)
    traced = report.traced if isinstance(report, Report) else None
    if example_inputs is not None:
        example = example_batch(example_inputs, device)
        values, names = example_arguments(model.forward, *example)
    elif traced is not None:
        values, names = drawn(traced.inputs, device), traced.names
    else:
        raise ZipError("the merge does not say what it was traced with: give example_inputs")
    given = switched_off(given_of(model, values, names))
    results = []
    twin = structural_copy(model)
    for own in (twin, copy.deepcopy(merged).eval()):
        copies = clone_tensors(tuple(given.values or ()))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), as_caller():
                found = call(own, copies, given.arguments) if own is twin else own(*copies)
        except Exception as error:
            raise ZipError(
                f"the {'model' if own is twin else 'merge'} can not be run to compare them: "
                f"{first_line(error)}. Give example_inputs that it takes"
            ) from error
        results.append(found if own is twin or head is None else found[head])
    if not alike(*results):
        raise ZipError(
            f"with the weights of the merge the {type(model).__name__} does not compute what the "
            "merge computes: it has other settings or buffers than the models that were merged"
        )
