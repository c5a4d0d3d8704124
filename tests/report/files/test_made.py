"""What was done to a merge since it was made is kept, or refused by name."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize, prune

import zipfx
from tests.helpers.saved import edited, equal, images, models, refuse, zipped


# ------------------------------------------------------------------ what load could not bring back
class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down


class Linear(nn.Linear):
    """By name it is what it wraps."""


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Odd(Tensor):
    pass


def put(path: str, make: Callable[[nn.Module], nn.Module | None]) -> Callable[[Any], None]:
    """Put a module in place of the one at a path."""

    def change(merged: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        home = merged.get_submodule(parent)._modules
        found = make(merged.get_submodule(path))
        home.pop(name) if found is None else home.update({name: found})

    return change


def buffer(make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Put a tensor in place of a running mean."""

    def change(merged: nn.Module) -> None:
        home = merged.get_submodule("1")._buffers
        home["running_mean"] = make(home["running_mean"])  # type: ignore[arg-type]

    return change


def parameter(make: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    def change(merged: nn.Module) -> None:
        weight = merged.get_submodule("task_heads.0.7").weight
        merged.get_submodule("task_heads.0.7").weight = nn.Parameter(make(weight.detach()))

    return change


def freed(t: Tensor) -> Tensor:
    t = torch.ones(8)
    t.untyped_storage().resize_(0)
    return t


def at(path: str, function: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(merged: nn.Module) -> None:
        function(merged.get_submodule(path))

    return change


def swap_outputs(merged: fx.GraphModule) -> None:
    output = next(iter(reversed(merged.graph.nodes)))
    output.args = (output.args[0][::-1],)


def tie(merged: Any) -> None:
    heads = merged.task_heads
    heads[0].get_submodule("7").bias = heads[1].get_submodule("7").bias


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "live pruning": (
        at("0", lambda m: prune.l1_unstructured(m, "weight", 0.5)),
        r"module '0' has a forward pre hook, which prunes 'weight'.*prune.remove.module, 'weight'",
    ),
    "an adapter": (put("0", Lora), r"module '0' was a .*Conv2d and is a .*Lora .adapters such as"),
    "an adapter in a head": (put("task_heads.1.7", Lora), r"module 'task_heads.1.7' was a .*Lin"),
    "one of the same name": (put("task_heads.0.7", lambda m: Linear(6, 3)), r"made.Linear"),
    "another class": (
        at("0", lambda m: setattr(m, "__class__", type("Other", (nn.Conv2d,), {}))),
        r"module '0' was a torch.nn.modules.conv.Conv2d and is a .*Other",
    ),
    "a parametrization": (
        at("0", lambda m: parametrize.register_parametrization(m, "weight", Half())),
        r"module '0' .*ParametrizedConv2d .*remove_parametrizations",
    ),
    "weight norm": (
        at("task_heads.0.7", nn.utils.parametrizations.weight_norm),
        r"'task_heads.0.7' .*ParametrizedLinear .*remove_parametrizations",
    ),
    "another size": (put("task_heads.0.7", lambda m: nn.Linear(6, 5)), r"was float \(3, 6\) an"),
    "a layer that was traced": (
        put("task_heads.0.7", fx.symbolic_trace),
        r"'task_heads.0.7' was a .*Linear and is a torch.fx.graph_module.GraphModule",
    ),
    "a compiled layer": (
        put("task_heads.0.7", lambda m: torch.compile(m, backend="eager")),
        r"'task_heads.0.7' was a .*Linear and is a .*OptimizedModule",
    ),
    "no bias": (put("task_heads.0.7", lambda m: nn.Linear(6, 3, bias=False)), "7.bias' was taken"),
    "a setting": (at("0", lambda m: setattr(m, "stride", (2, 2))), "'_0' .*: stride was .1, 1."),
    "a setting of a norm": (at("1", lambda m: setattr(m, "eps", 0.1)), "eps was 1e-05 and is 0.1"),
    "a setting of a head": (
        at("task_heads.1.3", lambda m: setattr(m, "padding_mode", "circular")),
        "'head1_3' .*: padding_mode was 'zeros' and is 'circular'",
    ),
    "a module more": (lambda m: m.add_module("more", nn.ReLU()), r"module 'more' .*ReLU. was put"),
    "a module less": (put("2", lambda m: None), "module '2' was taken out of it"),
    "a head less": (put("task_heads.0", lambda m: None), "node 'head0_3' needs '3', which is not"),
    "a buffer more": (lambda m: m.register_buffer("more", torch.ones(1)), "a tensor 'more' was"),
    "a tensor more": (lambda m: setattr(m, "more", torch.ones(1)), "a tensor 'more' was put into"),
    "a buffer less": (at("1", lambda m: m._buffers.pop("running_mean")), "'1.running_mean' was"),
    "a hook": (
        at("0", lambda m: m.register_forward_hook(print)),
        "module '0' has a forward hook, builtins.print: remove it first",
    ),
    "a hook before": (lambda m: m.register_forward_pre_hook(print), "it has a forward pre hook"),
    "a hook of gradients": (
        at("task_heads.0.3", lambda m: m.register_full_backward_hook(print)),
        "module 'task_heads.0.3' has a backward hook, builtins.print",
    ),
    "a hook before gradients": (
        at("0", lambda m: m.register_full_backward_pre_hook(print)),
        "module '0' has a backward pre hook",
    ),
    "a patched forward": (
        at("0", lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x, m))),
        r"'forward' of module '0' was replaced, by .*test_made.<lambda>",
    ),
    "a patched forward of all": (
        lambda m: setattr(m, "forward", lambda x: x),
        r"'forward' of it was replaced, by .*test_made.<lambda>",
    ),
    "a tie": (tie, "'task_heads.1.7.bias' was tied to 'task_heads.0.7.bias'"),
    "outputs in another order": (swap_outputs, "at node 'output' .*it read"),
    "a sparse tensor": (parameter(Tensor.to_sparse), r"'task_heads.0.7.weight' is of layout .*spa"),
    "a quantized one": (
        buffer(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
        "'1.running_mean' is quantized: save before that",
    ),
    "a nested one": (
        buffer(lambda t: torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.ones(2, 3) > 0)),
        "'1.running_mean' is nested: pad it",
    ),
    "a subclass": (buffer(lambda t: t.as_subclass(Odd)), r"running_mean' is a .*_made.Odd"),
    "a subclass as a parameter": (parameter(lambda t: t.as_subclass(Odd)), "is a .*_made.Odd: "),
    "a fake one": (buffer(lambda t: FakeTensorMode().from_tensor(t)), "is a .*FakeTensor: put"),
    "one of functionalization": (buffer(torch._to_functional_tensor), "is a wrapper of torch.func"),
    "one without values": (buffer(lambda t: t.to("meta")), '\'1.running_mean\' is on the device'),
    "one whose memory was freed": (buffer(freed), "the memory of '1.running_mean' was freed"),
    "another kind of numbers": (buffer(Tensor.long), r"'1.running_mean' was float .8,. and is "),
    "a dtype without a name": (
        buffer(lambda t: t.to(torch.float8_e4m3fnuz)),
        "is of torch.float8_e4m3fnuz, for which there is no name in safetensors",
    ),
    "a lazy one": (
        put("task_heads.0.7", lambda m: nn.LazyLinear(3)),
        r"'task_heads.0.7.weight' is a torch.nn.parameter.UninitializedParameter",
    ),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_load_could_not_bring_back_is_refused(name: str, tmp_path: Path) -> None:
    change, says = REFUSED[name]
    path = tmp_path / "merged"
    merged = zipped()
    zipfx.save(merged, path)
    before = path.read_bytes()
    change(merged)
    with pytest.raises(zipfx.ZipError, match=says) as raised:
        zipfx.save(merged, path)
    assert str(raised.value).startswith("this merge can not be saved as it is now: ")
    assert "load could not bring that back" in str(raised.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["merged"]


@pytest.mark.parametrize("name", ["an adapter", "a patched forward", "a hook", "a setting"])
def test_loaded_merges_and_heads_and_copies_are_refused_alike(name: str, tmp_path: Path) -> None:
    change, says = REFUSED[name]
    merged = zipped()
    zipfx.save(merged, tmp_path / "merged")
    loaded = zipfx.load(tmp_path / "merged", models())
    for other in (loaded, copy.deepcopy(merged), zipfx.head(merged, 1), zipfx.head(loaded, 0)):
        zipfx.save(other, tmp_path / "other")
        change(other)
        with pytest.raises(zipfx.ZipError, match=says):
            zipfx.save(other, tmp_path / "other")


KEPT: dict[str, Callable[[Any], Any]] = {
    "pruning that is permanent": lambda m: (
        prune.l1_unstructured(m.get_submodule("0"), "weight", 0.5),
        prune.remove(m.get_submodule("0"), "weight"),
    ),
    "a parametrization that was removed": lambda m: (
        nn.utils.parametrizations.weight_norm(m.get_submodule("0")),
        parametrize.remove_parametrizations(m.get_submodule("0"), "weight"),
    ),
    "a hook that was removed": lambda m: m.register_forward_hook(print).remove(),
    "a fresh layer": put("task_heads.0.7", lambda m: nn.Linear(6, 3)),
    "train mode": lambda m: m.train(),
    "frozen weights": lambda m: m.requires_grad_(False),
    "gradients": lambda m: sum(y.sum() for y in m(images())).backward(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "channels last": lambda m: m.to(memory_format=torch.channels_last),
    "a compiled call": lambda m: m.compile(backend="eager"),
    "values from elsewhere": lambda m: m.load_state_dict(zipped("2").state_dict(), assign=True),
    "an 8-bit float": buffer(lambda t: t.to(torch.float8_e4m3fn)),
    "entries that are one": buffer(lambda t: torch.full((1,), 2.0).expand(8)),
    "every second entry": buffer(lambda t: torch.arange(16.0)[::2]),
    "a view with the sign flipped": buffer(lambda t: torch.ones(8).to(torch.cfloat).conj().imag),
    "zeros without memory": buffer(lambda t: torch._efficientzerotensor(8)),
    "a tensor that requires gradients": buffer(lambda t: t.clone().requires_grad_() * 2),
    "nan and inf": buffer(lambda t: t.fill_(float("nan")).index_fill_(0, torch.tensor(0), -1e400)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", KEPT)
def test_what_else_is_done_to_a_merge_comes_back(name: str, tmp_path: Path) -> None:
    merged = zipped()
    KEPT[name](merged)
    zipfx.save(merged, tmp_path / "merged")
    found = zipfx.load(tmp_path / "merged", models())
    assert equal(merged, found)
    assert [m.training for m in merged.modules()] == [m.training for m in found.modules()]
    grads = [p.requires_grad for p in merged.parameters()]
    assert grads == [p.requires_grad for p in found.parameters()]
    zipfx.save(found, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "merged").read_bytes()


def test_what_is_inserted_must_make_sense(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)) for _ in range(2)]
    merged = zipfx.zip(made, [torch.randn(32, 4)], partial="0", progress=False)
    zipfx.save(merged, tmp_path / "merged")

    def inserted(header: Any, target: str) -> Any:
        steps = header["recipe"]["steps"]
        return next(s for s in steps if s["source"] is None and s["does"]["target"] == target)

    buffer = "task_heads.0.unmerge_0"
    for change, says in (
        (lambda t, h: inserted(h, "index_select").update(dims=[]), "copies no node of a model"),
        (lambda t, h: inserted(h, "index_select").update(dims=[1, 1]), "copies no node of a model"),
        (lambda t, h: inserted(h, "index_select").update(dims=[10**9]), "along dimensions"),
        (lambda t, h: inserted(h, "index_select").update(part=None), "copies no node of a model"),
        (lambda t, h: inserted(h, "index_select").update(reads=["_0"]), "copies no node of a mod"),
        (lambda t, h: inserted(h, "index_select").update(reads=["_0"] * 2), "is no unmerge matrix"),
        (lambda t, h: inserted(h, "index_select")["does"].update(target="mix"), "is no unmerge"),
        (lambda t, h: inserted(h, "index_select")["does"].update(target="system"), "copies no nod"),
        (lambda t, h: inserted(h, "unmerge_0")["does"].update(target="unmerge_١"), "copies no"),
        (lambda t, h: inserted(h, "unmerge_0").update(reads=["_0"]), "copies no node of a model"),
        (lambda t, h: t.update({buffer: torch.ones(8)}), "is no unmerge matrix"),
        (lambda t, h: t.update({buffer: torch.ones(2, 2).long()}), "is no unmerge matrix"),
    ):
        refuse(edited(tmp_path / "merged", tmp_path, change), says, made)


def test_inside_of_vmap_nothing_is_saved(tmp_path: Path) -> None:
    merged = zipped()

    def inner(x: Tensor) -> Tensor:
        buffer(lambda _: x)(merged)
        with pytest.raises(zipfx.ZipError, match=r"inside a transform of torch.func"):
            zipfx.save(merged, tmp_path / "merged")
        return x

    torch.vmap(inner)(torch.ones(2, 8))


def test_sharded_tensors_are_refused(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without it")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    merged = zipped()
    distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=distributed.FileStore(str(tmp_path / "store"), 1)
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter(lambda t: distribute_tensor(t, mesh))(merged)
        with pytest.raises(
            zipfx.ZipError, match=r"'task_heads.0.7.weight' is a .*DTensor: put pla"
        ):
            zipfx.save(merged, tmp_path / "merged")
    finally:
        distributed.destroy_process_group()
