"""Saved merges: what comes back is what was saved, and what is no saved merge is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, fx, nn

import zipfx
from tests.helpers.graphs import Plan, plans
from tests.helpers.laws import merge, run, running_modules
from tests.helpers.models import NETS, Net
from tests.helpers.saved import (
    QUIET,
    Attention,
    as_stored,
    edited,
    equal,
    images,
    models,
    network,
    refuse,
    reloaded,
    same,
    state,
    zipped,
)
from tests.helpers.shared import ROOT
from zipfx.report.files import files, stand_ins


# ------------------------------------------------------------------ what comes back
@pytest.mark.sweep
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


@pytest.mark.slow
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


EVIL = "x(); __import__('os').abort()"


@pytest.mark.sweep
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


# ------------------------------------------------------------------ where it is saved and loaded
@pytest.mark.parametrize("as_path", [str, Path, os.fsencode, Path.as_posix])
def test_paths_of_every_kind(as_path: Any, tmp_path: Path) -> None:
    path, merged = as_path(tmp_path / "ä.safetensors"), zipped()
    zipfx.save(merged, path)
    assert same(zipfx.load(path, models())(images()), merged(images()))


@pytest.mark.slow
def test_what_is_no_file_is_neither_written_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(zipfx.ZipError, match="give the path of a file"):
            zipfx.save(zipped(), path)
        refuse(path, "it is no regular file")
    for path in (3, None, ""):
        with pytest.raises(zipfx.ZipError, match="path"):
            zipfx.save(zipped(), path)  # type: ignore[arg-type]
        with pytest.raises(zipfx.ZipError, match="path"):
            zipfx.load(path, models())  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="there is no such folder: make it first"):
        zipfx.save(zipped(), tmp_path / "none" / "merged")
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(sys.platform == "win32", reason="modes and links of Unix")
def test_a_saved_file_is_one_like_any_other(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        zipfx.save(zipped(), tmp_path / "merged")
    finally:
        os.umask(before)
    assert (tmp_path / "merged").stat().st_mode & 0o777 == 0o640
    (tmp_path / "merged").chmod(0o600)
    (tmp_path / "link").symlink_to("merged")
    zipfx.save(zipped("0"), tmp_path / "link")
    assert (tmp_path / "merged").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()
    assert zipfx.load(tmp_path / "merged", models()).meta["zipfx"].partial == "0"


@pytest.mark.parametrize("where", ["inference", "meta", "double", "no_grad"])
def test_the_callers_surroundings_do_not_matter(where: str, tmp_path: Path) -> None:
    merged = zipped()
    zipfx.save(merged, tmp_path / "one")
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode, "meta": lambda: torch.device("meta"),
        "no_grad": torch.no_grad, "double": lambda: default_dtype(torch.float64),
    }  # fmt: skip
    fresh = models()
    with contexts[where]():
        zipfx.save(merged, tmp_path / "two")
        found = zipfx.load(tmp_path / "one", fresh if where == "meta" else models())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert equal(merged, found)
    assert same(found(images()), merged(images()))
    found.train()
    sum(y.sum() for y in found(images())).backward()  # which inference tensors could not
    assert all(p.grad is not None for p in found.parameters())


class default_dtype:  # noqa: N801
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def test_what_was_made_in_inference_mode_is_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        merged = zipped()
    zipfx.save(merged, tmp_path / "merged")
    assert equal(zipfx.load(tmp_path / "merged", models()), merged)


SAVER = """
import sys
sys.path.insert(0, sys.argv[3])
from tests.helpers.saved import zipped
import zipfx
merged = zipped(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    zipfx.save(merged, sys.argv[1])
"""


@pytest.mark.slow
def test_of_two_processes_that_save_one_wins_and_the_file_is_whole(tmp_path: Path) -> None:
    path, here = tmp_path / "merged", str(ROOT)
    pipe = subprocess.PIPE
    seen = set()
    with contextlib.ExitStack() as stack:
        savers = []
        for cut in ("0", "2"):
            command = [sys.executable, "-c", SAVER, str(path), cut, here]
            saver = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            savers.append(stack.enter_context(saver))
            stack.callback(saver.kill)
        assert [s.stdout.readline() for s in savers if s.stdout] == ["ready\n"] * 2
        for saver in savers:
            assert saver.stdin is not None
            saver.stdin.write("go\n")
            saver.stdin.flush()
        while any(saver.poll() is None for saver in savers):
            if path.exists():
                seen.add(zipfx.load(path, models()).meta["zipfx"].partial)
        assert [saver.wait() for saver in savers] == [0, 0]
    assert seen <= {"0", "2"}
    assert os.listdir(tmp_path) == ["merged"]


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors opens a file twice, and would mix two files of one size."""
    one, two = zipped(), zipped()
    with torch.no_grad():
        two.get_submodule("0").weight.zero_()
    for merged, name in ((one, "one"), (two, "two"), (one, "merged")):
        zipfx.save(merged, tmp_path / name)
    opened, safe_open = [], safetensors.safe_open

    def replaced(path: str, framework: str) -> Any:
        found = safe_open(path, framework)
        opened.append(path)
        if len(opened) < 3:  # another process saves just now
            (tmp_path / "next").write_bytes((tmp_path / "two").read_bytes())
            os.replace(tmp_path / "next", tmp_path / "merged")
        return found

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    assert equal(zipfx.load(tmp_path / "merged", models()), two)
    assert len(opened) == 3

    def always(path: str, framework: str) -> Any:
        opened.clear()
        return replaced(path, framework)

    monkeypatch.setattr(safetensors, "safe_open", always)
    refuse(tmp_path / "merged", "it was replaced all the time while it was read")


def test_saving_what_can_not_be_written_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep: Any = torch.ones(2)
    for _ in range(60):
        deep = [deep]
    merged = zipped()
    traced = stand_ins.Traced(stand_ins.described((deep,)))
    merged.meta["zipfx"] = dataclasses.replace(merged.meta["zipfx"], traced=traced)
    with pytest.raises(
        zipfx.ZipError, match="can not be written: lists and dicts lie more than 100"
    ):
        zipfx.save(merged, tmp_path / "merged")
    monkeypatch.setattr(files, "LONGEST", 1000)
    with pytest.raises(
        zipfx.ZipError, match=r"has 14 nodes, and its header .* load reads 1,000 at mo"
    ):
        zipfx.save(zipped(), tmp_path / "merged")
    assert not os.listdir(tmp_path)


def test_a_loaded_merge_needs_no_file(deeper: Path, tmp_path: Path) -> None:
    path = tmp_path / "merged"
    path.write_bytes(deeper.read_bytes())
    found = zipfx.load(path, models())
    before = {name: t.clone() for name, t in state(found).items()}
    path.write_bytes(bytes(len(path.read_bytes())))  # in place
    assert all(torch.equal(t, before[name]) for name, t in state(found).items())
    path.unlink()
    zipfx.save(found, path)
    assert path.read_bytes() == deeper.read_bytes()
