"""Law 3 for every matcher that can find copies, through whole networks."""

from __future__ import annotations

import pytest

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, run, running_modules
from tests.helpers.models import NETS

KINDS = """
BatchNorm CatResidual Experts GroupNorms Grouped HeadNorms Hierarchy OptionA SEGate TiedDecoder
Transformer
""".split()  # every kind of space: plain, in blocks, tied, of blocks
POINTS = [
    zipfx.Zip(), zipfx.Permute(), zipfx.Optimal(), zipfx.KMeans(),
    zipfx.Permute(similarity="covariance"), zipfx.Permute(similarity="cosine"),
    zipfx.Zip(unmerge="lstsq"), zipfx.Permute(unmerge="lstsq"),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("matcher", POINTS, ids=repr)
@pytest.mark.parametrize("name", KINDS)
def test_permuted_copies_are_merged_without_loss(name: str, matcher: zipfx.Matcher) -> None:
    """Law 3, full zip, for every matcher that can find the copies."""
    net = NETS[name]
    model, x = net.build(), net.inputs(4)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(3))
    merged = merge([model, twin], net.batches(), matcher=matcher)
    assert error(run(model, x), run(merged, x)) < EXACT


@pytest.mark.parametrize("name", ["BatchNorm", "Grouped", "OptionA"])
def test_matrices_restore_the_features_of_heads(name: str) -> None:
    """A dense U, in weights of heads and where nothing can take it, that only copies."""
    net = NETS[name]
    model, x = net.build(), net.inputs(4)
    spaces = zipfx.analyze(model, x)
    twin = spaces.permuted(model, spaces.random_permutations(3))
    restored = 0
    for cut in running_modules(model):
        matcher = zipfx.Permute(unmerge="lstsq")
        merged = merge([model, twin], net.batches(), matcher=matcher, partial=cut)
        assert heads_error(merged, [run(model, x)] * 2, x) < EXACT
        restored += sum(b.ndim == 2 for n, b in merged.named_buffers() if "unmerge_" in n)
    assert restored > 0 or name == "Grouped"
