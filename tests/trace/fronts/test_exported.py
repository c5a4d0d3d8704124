"""Models that no symbol can follow, through torch.export: right for other sizes, or an error."""

from __future__ import annotations

import logging
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, unharmed
from zipfx import Export, ZipError
from zipfx.model.calls.expect import expect_absent, expect_equal, expect_off
from zipfx.model.calls.sizes import expect_sizes
from zipfx.trace.fronts.exported import switched_off, unwrapped
from zipfx.trace.record import record_of
from zipfx.trace.tracing import given_of, trace

X = torch.randn(4, 6, 5, dtype=torch.float64)


class Net(nn.Module):
    """forward is a function of (module, x), which only Python can run."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = [function]
        self.a, self.b, self.h = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("table", torch.rand(8), persistent=False)
        self.calls = 0
        self.double().eval()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Any:
        return self.function[0](self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.h(m.b(m.a(x).relu()).relu())
    return y


def exported(function: Any, x: Any = X, front: Any = "export") -> Any:
    return trace(Net(function), inputs=(x, None, False), front=front)


def net(function: Any, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(function)


def test_every_size_that_a_model_leaves_free_stays_free() -> None:
    model = net(plain)
    module = trace(model, inputs=(X, None, False), front="export")
    for shape in ((4, 6, 5), (1, 6, 5), (9, 2, 5), (3, 1, 5)):
        x = torch.randn(*shape, dtype=torch.float64)
        assert error(model(x), module(x)) < EXACT
    sizes = [e for e in record_of(module).expects if e.check is expect_sizes]
    assert [e.wanted[0] for e in sizes] == ["x: (4, 6, 5)"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (lambda m, x: plain(m, x) if x.shape[1] < 10 else m.h(m.a(x)), (4, 9, 5), (4, 10, 5)),
        (lambda m, x: plain(m, x) * (2 if x.shape[0] % 2 == 0 else 1), (8, 6, 5), (3, 6, 5)),
        (lambda m, x: plain(m, x) * (2 if x.shape[0] == 1 else 1), (3, 6, 5), (1, 6, 5)),
        (lambda m, x: sum(plain(m, x[:, i : i + 1]) for i in range(x.shape[1])),
         (2, 6, 5), (2, 7, 5)),
    ],
)  # fmt: skip
def test_sizes_for_which_forward_goes_another_way_are_an_error(
    function: Any, good: Any, bad: Any
) -> None:
    model = net(function)
    models = [model, net(function, 1)]
    data = [torch.randn(*X.shape, dtype=torch.float64) for _ in range(3)]
    merged: Any = zipfx.zip(
        models, data, front="export", example_inputs=(X,), partial="a", repair="none",
        progress=False,
    )  # fmt: skip
    x = torch.randn(*good, dtype=torch.float64)
    assert merged(x)[0].shape == model(x).shape
    with pytest.raises(ZipError, match=r"traced by torch\.export for other sizes: with "):
        merged(torch.randn(*bad, dtype=torch.float64))


def test_which_sizes_may_change_can_be_said() -> None:
    free = Export({"x": {0: Dim.AUTO}, "mask": None, "flag": None})
    module = exported(plain, front=free)
    (sizes,) = [e for e in record_of(module).expects if e.check is expect_sizes]
    assert "L['x'].size()[1] == 6" in sizes.wanted
    assert not any("L['x'].size()[0] ==" in text for text in sizes.wanted)
    with pytest.raises(ZipError, match=r"torch\.export can not trace Net: "):
        exported(plain, front=Export({"nothing": None}))


def test_settings_and_what_is_absent_are_expected() -> None:
    checks = {e.name: e.check for e in record_of(exported(plain)).expects}
    assert checks["mask"] is expect_absent
    assert checks["flag"] is expect_equal


def test_caches_are_off() -> None:
    class Cached(Net):
        def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:  # type: ignore[override]
            y = plain(self, x)
            return y if use_cache is False else {"y": y, "cache": object()}

    model = Cached(plain)
    given = switched_off(given_of(model, (X, None)))
    assert list(given.values or ()) == [X, False] or given.values[1] is False  # type: ignore[index]
    merged: Any = zipfx.zip([model, Cached(plain)], [X, X], progress=False, front="export")
    assert torch.equal(merged(X), merged(X, use_cache=False))
    with pytest.raises(ZipError, match="'use_cache' was off when the models were traced, and is T"):
        merged(X, use_cache=True)
    assert expect_off in {e.check for e in record_of(trace(model, inputs=(X, None),
                                                           front="export")).expects}  # fmt: skip


def data_branch(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) if bool(x.sum() > 0) else plain(m, x * 2)


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return plain(m, x) * m.calls


def lucky(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) * random.random()


def by_numpy(m: Any, x: Tensor) -> Tensor:
    z: Tensor = m.h(torch.from_numpy(np.tanh(m.a(x).detach().numpy())))
    return z


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (data_branch, r"torch\.export can not trace Net: Could not guard on data-dependent"),
        (counts, "Net computes something else when it is run again"),
        (lucky, "the traced graph does not compute what Net computes"),
        (by_numpy, r"torch\.export can not trace Net"),
    ],
)
def test_what_a_graph_can_not_hold_is_an_error(
    function: Any, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    models = [net(function), net(function, 1)]
    found = unharmed(models, lambda: zipfx.zip(models, [X], front="export", progress=False))
    assert isinstance(found, ZipError)
    assert re.search(says, str(found))
    assert capfd.readouterr() == ("", "")  # torch.export is quiet about it
    if function is not counts:
        with pytest.raises(ZipError, match=r"Nor does front=.export.: "):
            exported(function, front="auto")
    assert logging.getLogger("torch.export").level != logging.CRITICAL


@pytest.mark.parametrize("partial", [None, "a", "b"])
def test_law_3(partial: str | None) -> None:
    model = net(lambda m, x: plain(m, x * m.table.mean()))
    spaces = zipfx.analyze(model, (X,), front="export")
    assert [s.name for s in spaces] == ["a", "b"]
    twin = spaces.permuted(model, spaces.random_permutations(1))
    merged = zipfx.zip([model, twin], [(X,)] * 2, matcher="permute", repair="none", front="export",
                       partial=partial, progress=False)  # fmt: skip
    if partial is None:
        assert error(model(X), merged(X)) < EXACT
        assert set(merged.state_dict()) == set(model.state_dict())
        again = net(plain, 3)
        again.load_state_dict(merged.state_dict())
    else:
        assert heads_error(merged, [model(X)] * 2, (X,)) < EXACT


def test_a_constant_buffer_is_none_of_the_weights() -> None:
    models = [net(lambda m, x: plain(m, x * m.table.sum()), seed) for seed in (0, 1)]
    with pytest.raises(ZipError, match=r"'table'.*differs between models 0 and 1"):
        zipfx.zip(models, [X], front="export", progress=False)


def test_heads_may_differ_behind_the_cut() -> None:
    models = [net(plain, 0), net(plain, 1)]
    models[1].h = nn.Linear(8, 7).double()
    merged: Any = zipfx.zip(models, [X], partial="b", front="export", progress=False)
    assert [tuple(y.shape) for y in merged(X)] == [(4, 6, 3), (4, 6, 7)]
    assert list(merged.task_heads[1].state_dict()) == ["h.weight", "h.bias"]


def test_one_that_needs_it_takes_all_along() -> None:
    class Asks(Net):
        def forward(self, x: Tensor, mask: Any = None, flag: bool = False) -> Any:
            return plain(self, x) if isinstance(x, Tensor) else x

    models = [net(plain), Asks(plain)]
    merged = zipfx.zip(models, [X, X], matcher="permute", progress=False)
    assert merged.meta["zipfx"].front == "export"


def test_exported_programs_are_models() -> None:
    models = [net(plain, seed) for seed in (0, 1)]
    free = {"x": {0: Dim.AUTO}}
    with torch.no_grad():
        programs = [torch.export.export(m, (X,), dynamic_shapes=free) for m in models]
    assert all(isinstance(m, nn.Module) for m in unwrapped(programs))
    assert [s.name for s in zipfx.analyze(programs[0], (X,))] == ["a", "b"]  # type: ignore[arg-type]
    merged: Any = zipfx.zip(programs, [X, X], progress=False)  # type: ignore[arg-type]
    own: Any = zipfx.zip(models, [X, X], front="export", progress=False)
    assert error(own(X), merged(X)) < 1e-9
    assert merged.meta["zipfx"].front == "given"


def test_files_come_back(tmp_path: Any) -> None:
    models = [net(lambda m, x: plain(m, x) if isinstance(x, Tensor) else x, s) for s in (0, 1)]
    merged: Any = zipfx.zip(models, [X, X], partial="a", progress=False)
    assert merged.meta["zipfx"].front == "export"
    zipfx.save(merged, tmp_path / "m")
    loaded: Any = zipfx.load(tmp_path / "m", models)
    assert all(map(torch.equal, loaded(X), merged(X)))
    assert loaded.meta["zipfx"] == merged.meta["zipfx"]
    with pytest.raises(ZipError, match=r"traced by torch\.export for other sizes"):
        loaded(torch.randn(4, 6, 4, dtype=torch.float64))


def in_tuple(m: Any, x: Any) -> Tensor:
    y: Tensor = plain(m, x[0]) * x[1][0]
    return y


def maybe(m: Any, x: Any) -> Tensor:
    y = plain(m, x["x"])
    return y if x.get("y") is None else y + plain(m, x["y"])


def summed(m: Any, x: Any) -> Tensor:
    y: Tensor = sum(plain(m, t) for t in x)  # type: ignore[assignment]
    return y


def by_rank(m: Any, x: Tensor) -> Tensor:
    return plain(m, x.mean(1) if x.ndim == 4 else x)


def by_dtype(m: Any, x: Any) -> Tensor:
    y, mask = plain(m, x["x"]), x["mask"]
    return torch.where(mask[..., None], y, 0.0) if mask.dtype == torch.bool else y * mask[..., None]


Y = torch.rand(4, 6, dtype=torch.float64)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("function", "traced", "given", "fronts"),
    [
        (in_tuple, (X, [2.0]), (X, [3.0]), ["export"]),
        (maybe, {"x": X}, {"x": X, "y": X}, ["export", "auto"]),
        (maybe, {"x": X, "y": None}, {"x": X, "y": X}, ["export", "auto"]),
        (summed, [X, X], [X, X, X], ["export", "auto"]),
        (summed, [X, X], [X], ["export", "auto"]),
        (by_rank, X, X[:, None].expand(4, 3, 6, 5), ["export"]),
        (by_dtype, {"x": X, "mask": Y}, {"x": X, "mask": Y > 0.5}, ["export"]),
    ],
)
def test_inputs_made_otherwise_are_refused(
    function: Any, traced: Any, given: Any, fronts: list[str]
) -> None:
    for front in fronts:
        merged: Any = zipfx.zip([net(function), net(function)], [traced], repair="none",
                                batch_to_args=lambda b: (b,), front=front,
                                progress=False)  # fmt: skip
        assert error(net(function)(traced), merged(traced)) < EXACT
        with pytest.raises(
            ZipError, match=r"'x' was .* when the models were traced, which decided"
        ):
            merged(given)
