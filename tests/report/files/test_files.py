"""Saved merges: what comes back is what was saved, and what is no saved merge is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

import zipfx
from tests.helpers.graphs import Plan, plans
from tests.helpers.laws import merge, run, running_modules, unharmed
from tests.helpers.models import NETS, Net
from zipfx.report.format import container

QUIET = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are the same to the bit (NaN where NaN is)."""
    (ours, structure), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(
        torch.equal(torch.isnan(x), torch.isnan(y)) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(ours, theirs, strict=True)
    )


def reloaded(merged: nn.Module, models: Sequence[nn.Module], folder: Path, **options: Any) -> Any:
    """Saved and loaded: the same module but for what it computes, which is up to the caller."""
    one, two = folder / "one.safetensors", folder / "two.safetensors"
    zipfx.save(merged, one)  # type: ignore[arg-type]
    seen = [m for m in models if not any(p.is_meta for p in m.parameters())]
    found = unharmed(seen, lambda: zipfx.load(one, models, **options))
    if isinstance(found, Exception):
        raise found
    zipfx.save(found, two)
    assert one.read_bytes() == two.read_bytes()
    assert found.code == merged.code
    assert str(found) == str(merged)
    ours, theirs = merged.state_dict(), found.state_dict()
    assert list(ours) == list(theirs)
    for t, u in zip(ours.values(), theirs.values(), strict=True):
        assert (t.dtype, t.stride()) == (u.dtype, u.stride())
    assert [m.training for m in merged.modules()] == [m.training for m in found.modules()]
    assert repr(as_stored(merged)) == repr(as_stored(found))
    return found


def as_stored(merged: Any) -> dict[str, Any]:
    """The meta of a merge, but for what was measured while it was made, which is not stored."""
    report = dataclasses.replace(merged.meta["zipfx"], seconds={}, bytes={})
    return {**merged.meta, "zipfx": report}


# ------------------------------------------------------------------ what comes back
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_every_net_comes_back(net: Net, dtype: torch.dtype, tmp_path: Path) -> None:
    models = [net.build(0, dtype), net.build(1, dtype)]
    cuts = running_modules(models[0])
    x = net.inputs(3, dtype=dtype)
    fresh = net.build(7, dtype)
    for cut, repair in ((None, "refit"), (cuts[len(cuts) // 2], "none")):
        merged = merge(models, net.batches(2, dtype=dtype), partial=cut, repair=repair)
        found = reloaded(merged, [fresh, fresh], tmp_path)
        assert same(run(found, x), run(merged, x))


@settings(max_examples=25, **QUIET)
@given(plans(), st.integers(0, 7), st.sampled_from((2, 3)))
def test_random_networks_come_back(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan, at: int, count: int
) -> None:
    net, x = plan.net(), plan.net().inputs(3)
    models = [net.build(plan.seed + k) for k in range(count)]
    cuts = [None, *running_modules(models[0])]
    try:
        merged = merge(models, net.batches(1, 16), partial=cuts[at % len(cuts)], matcher="zip")
    except zipfx.ZipError:  # a cut that is not possible
        return
    folder = tmp_path_factory.mktemp("random")
    assert same(run(reloaded(merged, [net.build(99)] * count, folder), x), run(merged, x))


def network(outputs: int = 3, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, outputs),
    )  # fmt: skip


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 8, 8, generator=generator).to(dtype)


def zipped(partial: str | None = "2", models: Sequence[nn.Module] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    models = models or [network().eval(), network().eval()]
    return zipfx.zip(models, [images()], partial=partial, progress=False, **options)


@pytest.mark.parametrize("partial", [None, "0", "2", "7"])
@pytest.mark.parametrize("repair", ["bn", "refit"])
def test_three_models_with_heads_of_their_own(
    partial: str | None, repair: str, tmp_path: Path
) -> None:
    same_head = partial in (None, "7")
    makers = [lambda k=k: network(3 if same_head else 3 + k).eval() for k in range(3)]
    merged = zipped(partial, [make() for make in makers], repair=repair)
    found = reloaded(merged, [make() for make in makers], tmp_path)
    assert same(found(images()), merged(images()))
    assert found.meta["zipfx"] == merged.meta["zipfx"]
    assert str(found.meta["zipfx"]) == str(as_stored(merged)["zipfx"])
    for k in range(0 if partial is None else 3):
        head = zipfx.head(found, k)
        assert same(head(images()), merged(images())[k])
        alone = reloaded(head, [make() for make in makers], tmp_path)
        assert same(alone(images()), merged(images())[k])


@pytest.mark.parametrize(
    "matcher", ["zip", "permute", "kmeans", "svd", zipfx.Zip(unmerge="lstsq"), zipfx.Identity()]
)
def test_every_matcher_comes_back(matcher: str | zipfx.Matcher, tmp_path: Path) -> None:
    for partial in ("0", "3"):
        merged = zipped(partial, matcher=matcher)
        found = reloaded(merged, [network(), network()], tmp_path)
        assert same(found(images()), merged(images()))


def test_what_is_done_to_a_merge_comes_back(tmp_path: Path) -> None:
    merged = zipped().to(memory_format=torch.channels_last)
    merged.train()
    merged.get_submodule("1").eval()
    merged.get_parameter("0.weight").requires_grad_(False)
    sum(y.sum() for y in merged(images())).backward()
    with torch.no_grad():
        for p in merged.parameters():
            p.sub_(0 if p.grad is None else p.grad)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        found = reloaded(merged.to(dtype), [network(), network()], tmp_path)
        for a, b in zip(merged.parameters(), found.parameters(), strict=True):
            assert (a.requires_grad, a.dtype, a.stride()) == (b.requires_grad, b.dtype, b.stride())
            assert torch.equal(a, b)


def test_a_loaded_merge_is_one_to_work_with(tmp_path: Path) -> None:
    merged = zipped()
    found = reloaded(merged, [network(), network()], tmp_path)
    x, expected = images(), merged(images())
    assert same(copy.deepcopy(found)(x), expected)
    assert same(pickle.loads(pickle.dumps(found))(x), expected)
    assert same(torch.compile(found, backend="eager")(x), expected)
    assert same(torch.export.export(found, (x,)).module()(x), expected)
    (tmp_path / "one.safetensors").write_bytes(b"")  # the file is not used any more
    assert same(found(x), expected)
    again = zipfx.zip([found, zipped()], [x], progress=False, repair="none")
    assert same(reloaded(again, [found, found], tmp_path)(x), again(x))


class Attention(nn.Module):
    """Token ids, a mask, an optional argument and a number; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.l, self.h = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 11)

    def forward(
        self, ids: Tensor, pads: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        y = self.e(ids) * scale
        y = y + self.a(y, y, y, key_padding_mask=pads)[0]
        for i in range(ids.shape[1]):  # needs the length
            y = y + y[:, i : i + 1] / 8
        return {"logits": self.h(self.l(y)[0])}


@pytest.mark.parametrize("partial", [None, "e", "a", "l"])
@pytest.mark.parametrize("names", [("ids",), ("ids", "pads"), ("ids", "scale")])
@pytest.mark.parametrize("meta", [False, True])
def test_inputs_of_every_kind_are_stood_in_for(
    names: tuple[str, ...], partial: str | None, meta: bool, tmp_path: Path
) -> None:
    ids = torch.randint(5, 11, (32, 4), generator=torch.Generator().manual_seed(0))
    given = {"ids": ids, "pads": ids > 9, "scale": 0.5}
    batch = {name: given[name] for name in names}
    batch.update({"pads": ids > 11} if "pads" in names else {})
    models = [Attention().eval(), Attention().eval()]
    merged = zipfx.zip(models, [batch], partial=partial, progress=False)
    with torch.device("meta" if meta else "cpu"):
        fresh = Attention()
    found = reloaded(merged, [fresh, fresh], tmp_path)
    assert same(found(**batch), merged(**batch))


class Odd(nn.Module):
    """A layer that a tracer of one's own leaves whole, with tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(6, 8)), torch.full((1,), 0.7)  # no buffer
        self.register_buffer("shift", torch.arange(6) / 6, persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.w) * self.scale + self.get_buffer("shift")
        return (y * self.get_buffer("turn")).real


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Odd) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("partial", [None, "0", "2"])
def test_a_tracer_of_ones_own_is_given_again(partial: str | None, tmp_path: Path) -> None:
    make = lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Odd(), nn.Linear(6, 2))  # noqa: E731
    torch.manual_seed(0)
    x = torch.randn(32, 5)
    models = [make(), make()]
    if partial == "0":  # heads need not have the same constants
        models[1][2].scale.fill_(0.5)
    merged = zipfx.zip(models, [x], partial=partial, progress=False, tracer=Leaves())
    fresh = [make(), make()]
    fresh[0][2].scale.fill_(9.0)
    found = reloaded(merged, fresh, tmp_path, tracer=Leaves())
    assert same(found(x), merged(x))
    with pytest.raises(zipfx.ZipError, match="zip was given tracer=Leaves: give the same"):
        zipfx.load(tmp_path / "one.safetensors", fresh)


# ------------------------------------------------------------------ what is refused
@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "merged.safetensors"
    zipfx.save(zipped("0"), path)
    return path


def refuse(path: Path, says: str, models: Sequence[nn.Module] | None = None) -> None:
    with pytest.raises(zipfx.ZipError, match=says) as raised:
        zipfx.load(path, models or [network(), network()])
    assert str(raised.value).startswith(f"{str(path)!r} can not be loaded: ")


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (lambda: [network()] * 3, "it is a merge of 2 models, and 3 are given"),
        (lambda: [network()], "at least two models; got 1"),
        (lambda: [network(width=9)] * 2, r"model 0 .* node '_0' .* out_channels was 8 and is 9"),
        (lambda: [network(), network(4)], r"model 1 .* node '_7' .*: out_features was 3 and is 4"),
        (lambda: [network()[:3]] * 2, "it has no node '_3' .call_module 3."),
        (lambda: [nn.Linear(2, 2)] * 2, "model 0 is not of the architecture that was saved"),
        (
            lambda: [nn.Sequential(*network()[:4], nn.GELU(), *network()[5:])] * 2,
            "layer was ReLU and is GELU",
        ),
    ],
)
def test_other_models(models: Callable[[], list[nn.Module]], says: str, file: Path) -> None:
    refuse(file, says, models())


def test_models_that_are_tied_otherwise(tmp_path: Path) -> None:
    def make(tie: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        if tie:
            model[2].weight = model[0].weight
        return model

    path, x = tmp_path / "merged.safetensors", torch.randn(32, 4)
    for tie, says in ((True, "in the file only"), (False, "in the models only")):
        zipfx.save(zipfx.zip([make(tie), make(tie)], [x], progress=False), path)
        refuse(path, f"'2.weight' is tied to another tensor {says}", [make(not tie)] * 2)


@pytest.mark.parametrize("size", [0, 7, 100, 5000, -1])
def test_a_part_of_a_file(size: int, file: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.safetensors"
    part.write_bytes(file.read_bytes()[:size])
    refuse(part, "no safetensors file, or only a part of one .* save it again")


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "other"
    torch.save(network().state_dict(), path)
    refuse(path, "no safetensors file")
    save_file({"a": torch.ones(2)}, path)
    refuse(path, "was not written by zipfx.save")
    with pytest.raises(OSError, match="No such file"):
        zipfx.load(tmp_path / "none", [network(), network()])


def edited(file: Path, folder: Path, change: Callable[[dict[str, Any], Any], Any]) -> Path:
    """A copy of a file, with its tensors and its header changed, and with the right checksum."""
    with safetensors.safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["zipfx"])
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    del header["sha256"]
    change(found, header)
    path = folder / "edited.safetensors"
    with path.open("wb") as out:
        container.write(out, json.dumps(header), found)
    return path


EVIL = "x(); __import__('os').abort()"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, h: t.pop("0.bias"), "models have a tensor '0.bias', and the file does not"),
        (lambda t, h: t.update(more=torch.ones(1)), "the file has a tensor 'more'"),
        (lambda t, h: t.update({"0.bias": torch.ones(9)}), r"'0.bias' is float \(9,\) in the file"),
        (lambda t, h: t.update({"0.bias": torch.ones(8).int()}), "is integer .* and float"),
        (
            lambda t, h: h.update(version=3, zipfx="9.9"),
            "by zipfx 9.9, in version 3 .* a later zipf",
        ),
        (lambda t, h: h.update(version="1"), "header is damaged"),
        (lambda t, h: h.pop("recipe"), "header is damaged .*Header is not complete"),
        (lambda t, h: h.update(report=None), "header is damaged .*Header.report is None"),
        (
            lambda t, h: h.update(frozen=[1]),
            "header is damaged .*Header.frozen is 1, not of type st",
        ),
        (lambda t, h: h.update(more=1), "header is damaged .*Header has no field 'more'"),
        (lambda t, h: h["report"].update(layers=[1]), "Header.report.layers has 1 items, not 2"),
        (
            lambda t, h: h.update(strides={"0.weight": [9, 9, 3, 1]}),
            "'0.weight' is damaged .strides",
        ),
        (lambda t, h: h.update(complex=["0.bias"]), "'0.bias' is damaged"),
        (lambda t, h: h.update(tied={"q": "0.bias"}), "the file has a tensor 'q'"),
        (lambda t, h: h["recipe"].update(heads=[0, 2]), "heads .0, 2. of 2 models make no sense"),
        (lambda t, h: h["recipe"].update(heads=[0]), "2 results are not one for each part"),
        (lambda t, h: h["recipe"].update(results=[]), "0 results are not one for each part"),
        (lambda t, h: h["recipe"]["steps"].reverse(), "which does not come before it"),
        (lambda t, h: h["recipe"]["steps"].append(h["recipe"]["steps"][0]), "two nodes 'input_1'"),
        (lambda t, h: h["recipe"]["steps"][1].update(reads=[]), "reads 0 nodes, that of the model"),
        (lambda t, h: h["recipe"]["steps"][1].update(part=7), "is of head 7, which is not there"),
        (lambda t, h: h["recipe"]["steps"][1].update(source=EVIL), "it has no node"),
        (lambda t, h: h["recipe"]["steps"][1].update(source=None), "copies no node of a model"),
        (lambda t, h: h["recipe"]["steps"][1]["does"].update(target=EVIL), "target was x"),
    ],
)
def test_headers_that_make_no_sense(
    change: Callable[[Any, Any], Any], says: str, file: Path, tmp_path: Path
) -> None:
    refuse(edited(file, tmp_path, change), says)


def test_names_are_no_code(file: Path, tmp_path: Path) -> None:
    """Node names become variables of generated code; these are made of letters only."""

    def rename(tensors: Any, header: Any) -> None:
        text = json.dumps(header).replace('"_0"', json.dumps(EVIL))
        header.update(json.loads(text.replace(f'"source": {json.dumps(EVIL)}', '"source": "_0"')))

    found = zipfx.load(edited(file, tmp_path, rename), [network(), network()])
    assert "x___import___os_abort_ = " in found.code
    assert same(found(images()), zipfx.load(file, [network(), network()])(images()))


def test_data_is_not_stored(file: Path) -> None:
    with safetensors.safe_open(file, "pt") as opened:
        inputs = json.loads(opened.metadata()["zipfx"])["traced"]["inputs"]
    assert inputs == {"tuple": [{"shape": [2, 3, 8, 8], "dtype": "float32", "largest": None}]}


def test_only_merges_are_saved(tmp_path: Path) -> None:
    path, merged = tmp_path / "merged.safetensors", zipped()
    loaded = pickle.loads(pickle.dumps(merged))
    for other in (network(), fx.symbolic_trace(network()), loaded, 3):
        with pytest.raises(zipfx.ZipError, match=r"can not be saved: only what zipfx.zip"):
            zipfx.save(other, path)
    with pytest.raises(zipfx.ZipError, match="was compiled"):
        zipfx.save(torch.compile(merged), path)  # type: ignore[arg-type]
    *_, last, output = merged.graph.nodes
    with merged.graph.inserting_after(last):
        output.args = (output.args[0][0],)
    with pytest.raises(zipfx.ZipError, match=r"no longer returns a tuple .* for each of 2 heads"):
        zipfx.save(merged, path)
    with merged.graph.inserting_after(last):
        output.args = ((last, merged.graph.call_function(torch.relu, (last,))),)
    with pytest.raises(zipfx.ZipError, match=r"'relu' .call_function relu. was put into its graph"):
        zipfx.save(merged, path)
    with pytest.raises(zipfx.ZipError, match=r"'0.weight' is on the device .meta.: it holds no va"):
        zipfx.save(zipped().to("meta"), path)
    assert not path.exists()


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(zipfx.ZipError, match=r"pip install 'zipfx\[save\]'"):
        zipfx.save(zipped(), tmp_path / "merged.safetensors")
