"""Containers, layers of two names and extra state come back in the tree of a merge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, permuted, run, unharmed
from tests.helpers.models import NETS, Net
from tests.helpers.named import X, check_copies, check_law_7, made


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.sweep
@pytest.mark.parametrize("repair", ["none", "refit"])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_law_7(net: Net, repair: str) -> None:
    models = [net.build(seed) for seed in (0, 1)]
    merged = merge(models, net.batches(), repair=repair)
    again, x = net.build(2), net.inputs(4)
    again.load_state_dict(merged.state_dict())
    assert list(again.state_dict()) == list(merged.state_dict())
    assert error(run(merged, x), run(again, x)) < EXACT


# ------------------------------------------------------------------ models that are graphs
@pytest.mark.slow
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
