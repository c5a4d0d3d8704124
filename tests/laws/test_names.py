"""What a model calls its layers and tensors is what the merge calls them: names that `torch.fx`
uses itself, several names of one thing, and state that is no tensor. Law 7: the state of a full zip
loads strictly into the class of the models, which then computes the merge."""

from __future__ import annotations

import copy
import io
import keyword
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, permuted, run, unharmed
from tests.helpers.models import NETS, Net
from zipfx.trace.symbolic import Tracer

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)).double()


def made(kind: Callable[[], nn.Module], count: int = 2) -> list[nn.Module]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(kind().double().eval())
    return found


def check_law_7(kind: Callable[[], nn.Module], **options: Any) -> Any:
    """Merge two models that differ, and load what comes out into a third one."""
    models, inputs = made(kind), (X,)
    merged = merge(models, None if options else [inputs], **options)
    again = made(kind, 3)[2]
    again.load_state_dict(merged.state_dict())
    assert list(merged.state_dict()) == list(again.state_dict())
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in again.named_parameters()]
    assert error(run(merged, inputs), run(again, inputs)) < EXACT
    merged.load_state_dict(models[0].state_dict())
    assert error(run(models[0], inputs), run(merged, inputs)) < EXACT
    return merged


def same(expected: Any, found: Any) -> bool:
    pairs = (
        zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    )
    return all(torch.equal(a, b) for a, b in pairs)


def check_copies(merged: Any, models: Sequence[nn.Module], inputs: Sequence[Any], to: Path) -> None:
    """All that can be done with a merge gives the same again."""
    expected, names = run(merged, inputs), list(merged.state_dict())
    file = io.BytesIO()
    torch.save(merged, file)
    file.seek(0)
    zipfx.save(merged, to / "merged")
    twins = {
        "deepcopy": copy.deepcopy(merged),
        "copy": copy.copy(merged),
        "pickle": torch.load(file, weights_only=False),
        "load": zipfx.load(to / "merged", models),
        "twice": zipfx.load(to / "merged", [copy.deepcopy(merged), merged])
        if merged.meta["zipfx"].partial is None
        else merged,
    }
    for how, twin in twins.items():
        assert same(expected, run(twin, inputs)), how
        assert list(twin.state_dict()) == names, how
        assert twin.meta["zipfx"].models == 2
        assert twin.code == merged.code or how == "pickle"
    interpreter = fx.Interpreter(merged)
    assert same(expected, interpreter.run(*inputs))
    merged.graph.lint()
    moved = copy.deepcopy(merged).float()
    moved(*(x.float() for x in inputs))
    assert moved.train().training


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


class Keys(nn.Module):
    """Containers with such keys, and an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.ModuleDict({"code": nn.Linear(4, 6), "graph": nn.Linear(6, 6)})
        self.graph = nn.ParameterDict({"meta": nn.Parameter(torch.randn(6))})
        self._code = nn.ParameterList([torch.randn(6)])
        self.code, self.h = torch.tensor(0.5).double(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.meta["code"](x)) * self.graph["meta"]
        return self.h(torch.relu(self.meta["graph"](x)) + self._code[0]) * self.code


@pytest.mark.parametrize("repair", ["none", "refit"])
def test_containers(repair: str, tmp_path: Path) -> None:
    merged = check_law_7(Keys)
    check_copies(merged, made(Keys), (X,), tmp_path)
    for cut in ("meta", "meta.code", "meta.graph"):
        models = made(Keys)
        found = merge(models, [(X,)], partial=cut, repair=repair)
        check_copies(found, models, (X,), tmp_path)


# ------------------------------------------------------------------ several names
class Stem(nn.Module):
    """A layer and a block under two names each, a tied layer that is only read by the other name,
    a parameter of two names, and one that no graph reads."""

    def __init__(self, first: bool = True) -> None:
        super().__init__()
        layers = nn.ModuleList([nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))])
        if first:
            self.stem, self.block = layers[0], layers[1]
        self.layers = layers
        if not first:
            self.stem, self.block = layers[0], layers[1]
        self.a, self.b, self.h = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight
        self.scale = self.factor = nn.Parameter(torch.randn(5))
        self.register_buffer("table", torch.rand(5))
        self.register_buffer("again", self.table)
        self.register_buffer("hidden", torch.rand(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.block(torch.relu(self.stem(x))))
        x = torch.relu(nn.functional.linear(x, self.a.weight)) * self.factor
        return self.h(x + self.again)


class Late(Stem):
    def __init__(self) -> None:
        super().__init__(first=False)


@pytest.mark.parametrize("kind", [Stem, Late])
def test_a_layer_of_two_names_keeps_both(kind: type[Stem], tmp_path: Path) -> None:
    merged = check_law_7(kind)
    assert merged.stem is merged.layers[0]
    assert merged.block is merged.layers[1]
    assert merged.b.weight is merged.a.weight
    assert merged.scale is merged.factor
    assert "hidden" not in merged.state_dict()
    assert sum(p.numel() for p in merged.parameters()) == sum(
        p.numel() for p in kind().parameters()
    )
    models = made(kind)
    for repair in ("none", "refit"):
        found = merge(models, [(X,)], repair=repair)
        check_copies(found, models, (X,), tmp_path)
        assert copy.deepcopy(found).stem is not found.stem


@pytest.mark.parametrize("kind", [Stem, Late])
@pytest.mark.parametrize(
    ("one", "other"),
    [("stem", "layers.0"), ("block", "layers.1"), ("block.0", "layers.1.0")],
)
def test_a_cut_has_either_name(kind: type[Stem], one: str, other: str, tmp_path: Path) -> None:
    models = made(kind)
    twin = permuted(models[0], (X,))
    expected = run(models[0], (X,))
    codes = []
    for cut in (one, other):
        merged = merge([models[0], twin], [(X,)], partial=cut, matcher="permute", places="all")
        assert heads_error(merged, [expected, expected], (X,)) < EXACT
        assert merged.meta["zipfx"].partial == cut
        assert merged.stem is merged.layers[0]
        codes.append(merged.code)
        check_copies(merged, [models[0], twin], (X,), tmp_path)
        check_copies(zipfx.head(merged, 1), [models[0], twin], (X,), tmp_path)
    assert codes[0] == codes[1]


def test_a_name_of_fx_for_a_layer_that_has_another() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.meta, self.h = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)
            self.code = self.meta[0]
            self.graph = self.meta

        def forward(self, x: Tensor) -> Tensor:
            return self.h(self.graph(x))

    check_law_7(Both)
    for cut in ("code", "meta", "graph", "graph.0"):
        assert len(merge(made(Both), [(X,)], partial=cut)(X)) == 2


# ------------------------------------------------------------------ state that is no tensor
class Extra(nn.Module):
    """Extra state at the root, in a container that is traced through, in a leaf and in a module
    that has nothing else and does not run."""

    def __init__(self, state: Any = 3) -> None:
        super().__init__()
        self.inner, self.leaf, self.idle = Inner(state), Leaf(4, 4), Idle()
        self.leaf.state = state
        self.state = {"epochs": [state, 2], "scale": torch.tensor(2.0)}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.relu(self.leaf(x)))

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Inner(nn.Sequential):
    def __init__(self, state: Any) -> None:
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Leaf(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Idle(nn.Module):
    def get_extra_state(self) -> Any:
        return "idle"

    def set_extra_state(self, state: Any) -> None:
        assert state == "idle"


EXTRAS = ["_extra_state", "inner._extra_state", "leaf._extra_state", "idle._extra_state"]


def test_extra_state_is_kept(tmp_path: Path) -> None:
    merged = check_law_7(Extra)
    models = made(Extra)
    merged = unharmed(models, lambda: merge(models, [(X,)]))
    assert merged.meta["zipfx"].notes == ()
    assert merged.state_dict()["inner._extra_state"] == 3
    check_copies(merged, models, (X,), tmp_path)
    found = copy.deepcopy(merged).state_dict()["_extra_state"]
    assert found["epochs"] == [3, 2]
    cut = merge(models, [(X,)], partial="inner.0")
    names = {n for n in cut.state_dict() if n.endswith("_extra_state")}
    assert {"_extra_state", "inner._extra_state", "leaf._extra_state"} <= names
    assert {"task_heads.0._extra_state", "task_heads.1.inner._extra_state"} <= names
    check_copies(cut, models, (X,), tmp_path)
    check_copies(zipfx.head(cut, 1), models, (X,), tmp_path)


def test_extra_state_that_differs_is_a_note(tmp_path: Path) -> None:
    models = [Extra(3).double().eval(), Extra(4).double().eval()]
    merged = merge(models, [(X,)])
    notes = [note for note in merged.meta["zipfx"].notes if "extra state" in note]
    assert len(notes) == 3
    assert "'inner' differs between the models: that of model 0 is kept" in "\n".join(notes)
    assert [merged.state_dict()[name] for name in EXTRAS[1:]] == [3, 3, "idle"]
    cut = merge(models, [(X,)], partial="inner.0")
    assert cut.state_dict()["task_heads.1.inner._extra_state"] == 4
    zipfx.save(merged, tmp_path / "a")
    assert zipfx.load(tmp_path / "a", models).state_dict()["inner._extra_state"] == 3
    with pytest.raises(zipfx.ZipError, match=r"extra state .* of module .* is not in the file"):
        zipfx.load(tmp_path / "a", models[::-1])
    merged.inner.set_extra_state(7)
    with pytest.raises(zipfx.ZipError, match=r"extra state .* of module 'inner' was changed"):
        zipfx.save(merged, tmp_path / "a")


def test_extra_state_that_fails_is_an_error_that_says_so() -> None:
    class Bad(Inner):
        def __init__(self) -> None:
            super().__init__(None)

        def get_extra_state(self) -> Any:
            raise ValueError("not now")

    with pytest.raises(zipfx.ZipError, match=r"get_extra_state of a Bad fails.*not now"):
        merge(made(lambda: nn.Sequential(Bad())), [(X,)])


# ------------------------------------------------------------------ law 7
class Versioned(nn.Sequential):
    """What is loaded into it is asked for its version, as in torchvision's MNASNet."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def _load_from_state_dict(self, *args: Any) -> None:
        assert args[2].get("version") == 2
        super()._load_from_state_dict(*args)


def test_versions_of_states_are_kept() -> None:
    check_law_7(Versioned)
    check_law_7(lambda: nn.Sequential(Versioned(), nn.Linear(3, 3)))


def test_a_state_that_does_not_load_is_a_note() -> None:
    class Renaming(nn.Sequential):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            return {f"model.{name}": t for name, t in found.items()}

    merged = merge(made(lambda: Renaming(nn.Linear(4, 3))), [(X,)])
    (note,) = merged.meta["zipfx"].notes
    assert "does not load strictly into a Renaming: it lacks model.0.bias" in note


@pytest.mark.parametrize("repair", ["none", "refit"])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_law_7(net: Net, repair: str) -> None:
    models = [net.build(seed) for seed in (0, 1)]
    merged = merge(models, net.batches(), repair=repair)
    again, x = net.build(2), net.inputs(4)
    again.load_state_dict(merged.state_dict())
    assert list(again.state_dict()) == list(merged.state_dict())
    assert error(run(merged, x), run(again, x)) < EXACT


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


# ------------------------------------------------------------------ models that are graphs
def test_merges_of_merges_and_of_graphs(tmp_path: Path) -> None:
    for kind in (Keys, Stem, Extra):
        models = made(kind, 4)
        pairs = [merge(models[i : i + 2], [(X,)]) for i in (0, 2)]
        merged = unharmed(pairs, lambda: merge(pairs, [(X,)], repair="refit"))  # noqa: B023
        assert isinstance(merged, fx.GraphModule), merged
        again = made(kind, 3)[2]
        again.load_state_dict(merged.state_dict())
        assert error(run(merged, (X,)), run(again, (X,))) < EXACT
        check_copies(merged, pairs, (X,), tmp_path)
    for model in made(Stem, 1):
        graph = fx.symbolic_trace(model)
        merged = merge([graph, copy.deepcopy(graph)], [(X,)], matcher="permute")
        assert merged.state_dict().keys() == graph.state_dict().keys()
        assert error(run(graph, (X,)), run(merged, (X,))) < EXACT


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
