"""What a model calls its layers and tensors is what the merge calls them: names that `torch.fx`
uses itself, several names of one thing, and state that is no tensor. Law 7: the state of a full zip
loads strictly into the class of the models, which then computes the merge."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, permuted, run, unharmed
from tests.helpers.named import X, check_copies, check_law_7, made
from zipfx.trace.fronts.symbolic import Tracer


# ------------------------------------------------------------------ names that fx uses
def registrable() -> list[str]:
    """Names that a graph module of fx, ours or a merge uses, and that torch lets modules have."""
    net = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    data = [torch.randn(8, 4)]
    merged = merge([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)], data)
    names = {*dir(fx.GraphModule), *dir(net), *dir(merged), *vars(fx.GraphModule), "task_heads"}
    names |= {"unmerge_0", "zipfx_head", "input", "self", "x", "torch", "_tensor_constant0", "0"}
    names |= {*keyword.kwlist, "print", "len", "getattr", "device", "NoneType", "inf", "nan"}
    free = []
    for name in sorted(names - {"__deepcopy__"}):  # such a module can not be copied
        try:
            nn.Module().register_buffer(name, torch.zeros(1))
        except KeyError:
            continue
        free.append(name)
    return free


NAMES = registrable()


class Odd(nn.Module):
    """Layers or tensors of odd names."""

    def __init__(self, names: Sequence[str], what: str, nested: bool) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        home = self.b if nested else self
        for name in names:
            if what == "module":
                home.add_module(name, nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
            elif what == "parameter":
                home.register_parameter(name, nn.Parameter(torch.rand(6) * 0.2 + 0.9))
            else:
                home.register_buffer(name, torch.rand(6) * 0.2 + 0.9)
        self.names, self.nested = names, nested

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        for name in self.names:
            thing = getattr(self.b if self.nested else self, name)
            x = thing(x) if isinstance(thing, nn.Module) else x * thing
        weight, bias = self.b.weight, self.b.bias
        return self.h(torch.relu(nn.functional.linear(x, weight, bias)))


def test_there_are_many_such_names() -> None:
    assert {"meta", "graph", "code", "_graph", "_code", "recompile", "to_folder"} <= {*NAMES}
    assert {"print_readable", "add_submodule", "_tracer_cls", "shape_env", "class"} <= {*NAMES}
    assert len(NAMES) > 60


@pytest.mark.slow
@pytest.mark.parametrize("what", ["module", "parameter", "buffer"])
def test_every_name_is_kept(what: str) -> None:
    for name in NAMES:

        def kind(name: str = name) -> nn.Module:
            return Odd([name], what, False)

        if name.startswith("_zipfx"):
            with pytest.raises(zipfx.ZipError, match=f"{name}.*rename"):
                zipfx.analyze(kind(), X.float())
        else:
            check_law_7(kind, matcher="identity", example_inputs=X, verify=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["module", "parameter", "buffer"])
@pytest.mark.parametrize("nested", [False, True])
def test_all_names_at_once(nested: bool, what: str, tmp_path: Path) -> None:
    names = [name for name in NAMES if nested or not name.startswith("_zipfx")]
    models = made(lambda: Odd(names, what, nested))
    sizes = sorted(s.size for s in zipfx.analyze(models[0], X))
    assert sizes == [5] + [6] * (1 + len(names) * (what == "module"))
    merged = check_law_7(lambda: Odd(names, what, nested))
    assert merged.meta["zipfx"].notes == ()
    check_copies(merged, models, (X,), tmp_path)
    twin = permuted(models[0], (X,))
    assert error(run(models[0], (X,)), run(twin, (X,))) < EXACT
    merged = merge([models[0], twin], [(X,)], matcher="permute")
    assert error(run(models[0], (X,)), run(merged, (X,))) < EXACT
    if nested:
        assert models[0].b._zipfx_own is not None


@pytest.mark.sweep
@pytest.mark.parametrize("what", ["module", "parameter", "buffer"])
@pytest.mark.parametrize("name", ["meta", "graph", "code", "_code", "class", "0", "unmerge_0"])
@pytest.mark.parametrize("cut", [None, "a"])
def test_what_can_be_done_with_such_a_merge(
    cut: str | None, name: str, what: str, tmp_path: Path
) -> None:
    models = made(lambda: Odd([name], what, False))
    data = [(X,)]
    merged = unharmed(models, lambda: merge(models, data, partial=cut, repair="refit"))
    assert isinstance(merged, fx.GraphModule), merged
    check_copies(merged, models, (X,), tmp_path)
    if cut is not None:
        twin = permuted(models[0], (X,))
        heads = merge([models[0], twin], data, partial=cut, matcher="permute")
        assert heads_error(heads, [run(models[0], (X,))] * 2, (X,)) < EXACT
        check_copies(zipfx.head(merged, 1), models, (X,), tmp_path)
    named = dict(merged.named_modules(remove_duplicate=False))
    assert merged.get_submodule("a") is named["a"]
    if what == "module" and cut is None:
        assert merged.get_submodule(f"{name}.0") is named[f"{name}.0"]
        assert merged.get_parameter(f"{name}.0.bias") is named[f"{name}.0"].bias


def test_heads_have_a_name_of_their_own() -> None:
    for what in ("module", "parameter", "buffer"):
        models = made(lambda: Odd(["task_heads"], what, False))  # noqa: B023
        with pytest.raises(zipfx.ZipError, match=r"'task_heads'.*rename"):
            merge(models, [(X,)], partial="h")
        assert len(merge(models, [(X,)], partial="a")(X)) == 2


class Hidden(nn.Module):
    """A layer that is registered, and not to be had by its name."""

    def __init__(self, name: str = "type") -> None:
        super().__init__()
        self.a, self.h = nn.Linear(4, 6), nn.Linear(6, 3)
        setattr(self, name, nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.relu(self.a(x)))


class Reached(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        first, last, between = self.children()
        return last(torch.relu(between(torch.relu(first(x)))))


@pytest.mark.parametrize("name", ["type", "forward", "train", "half", "state_dict"])
def test_names_of_every_module(name: str) -> None:
    check_law_7(lambda: Hidden(name))
    models = made(lambda: Reached(name))
    for action in (lambda: zipfx.analyze(models[0], X), lambda: merge(models, [(X,)])):
        with pytest.raises(zipfx.ZipError, match=f"'{name}'.*every torch.nn.Module.*rename"):
            unharmed_or_raise(models, action)


def unharmed_or_raise(models: Sequence[nn.Module], action: Callable[[], Any]) -> Any:
    found = unharmed(models, action)
    if isinstance(found, Exception):
        raise found
    return found


class Caching(nn.Module):
    """A module that keeps what it makes of its weights, as the attention of TinyViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.made = nn.Parameter(torch.randn(6)), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.made.setdefault("twice", 2 * self.bias)


class Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Caching) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("repair", ["none", "refit"])
def test_what_a_model_caches_is_no_part_of_a_merge(repair: str) -> None:
    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), Caching(), nn.ReLU(), nn.Linear(6, 3))

    models = made(kind)
    merged = merge(models, [(X,)], repair=repair, tracer=Leaves())
    again = made(kind, 3)[2]
    again.load_state_dict(merged.state_dict())
    assert error(run(again, (X,)), run(merged, (X,))) < EXACT
    assert not any(len(model[1].made) for model in models)  # type: ignore[index, arg-type]


def test_exported_models() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add, self.h = nn.Linear(4, 6), nn.Linear(6, 3)
            self.register_buffer("linear", torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.relu(self.add(x)) * self.linear)

    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    models: list[nn.Module] = [
        torch.export.export(m, (X,), dynamic_shapes=shapes).module() for m in made(Shifted)
    ]
    merged = merge(models, [(X,)])
    again = made(Shifted, 3)[2]
    again.load_state_dict(merged.state_dict())
    found = run(merged, (X,))
    assert error(found, run(again, (X,))) < EXACT
