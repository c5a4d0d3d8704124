"""Every matcher against a plain computation of what it promises, and through whole networks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zipfx
from tests.helpers.laws import EXACT, error, heads_error, merge, run, running_modules
from tests.helpers.models import NETS
from zipfx import LinearMerge, Matching, Statistics, ZipError
from zipfx.match.matchers import optimal
from zipfx.match.matchers.greedy import join_in_rounds
from zipfx.match.matchers.protocol import UNMERGES

quick = settings(max_examples=40, deadline=None)
KINDS = """
BatchNorm CatResidual Experts GroupNorms Grouped HeadNorms Hierarchy OptionA SEGate TiedDecoder
Transformer
""".split()  # every kind of space: plain, in blocks, tied, of blocks
POINTS = [
    zipfx.Zip(), zipfx.Permute(), zipfx.Optimal(), zipfx.KMeans(),
    zipfx.Permute(similarity="covariance"), zipfx.Permute(similarity="cosine"),
    zipfx.Zip(unmerge="lstsq"), zipfx.Permute(unmerge="lstsq"),
]  # fmt: skip


def samples(seed: int, sizes: tuple[int, ...], ties: bool = False) -> Tensor:
    """(S, N) correlated features; with ties many are equal, and some constant."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = rng.normal(size=(40, n)) + rng.normal(size=(40, 3)) @ rng.normal(size=(3, n))
    if ties and n:
        x = np.where(rng.random(n) < 0.3, 1.0, x[:, rng.integers(0, n, n)])
    return torch.from_numpy(x)


def statistics_of(x: Tensor, sizes: tuple[int, ...]) -> Statistics:
    cov = torch.cov(x.T, correction=0).reshape(x.shape[1], x.shape[1])
    return Statistics(len(x), x.mean(0), cov, sizes)


def joined(similarity: Tensor, assignment: Tensor) -> float:
    """The sum over the pairs inside the groups."""
    same = assignment[:, None] == assignment
    return float(similarity[same.triu(1)].sum())


def best_pairs(similarity: Tensor, free: list[int], count: int) -> float:
    """The largest sum of `count` disjoint pairs, by trying all."""
    if not count:
        return 0.0
    if len(free) < 2 * count:
        return -np.inf
    a, rest = free[0], free[1:]
    tried = (
        float(similarity[a, b]) + best_pairs(similarity, [f for f in rest if f != b], count - 1)
        for b in rest
    )
    return max([best_pairs(similarity, rest, count), *tried])


class TestOptimal:
    @quick
    @given(st.integers(0, 999), st.integers(1, 8), st.booleans(), st.data())
    def test_finds_the_best_pairs(self, seed: int, n: int, ties: bool, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, n // 2))
        s = statistics_of(samples(seed, (n,), ties), (n,))
        found = zipfx.Optimal()(s, n - count)
        similarity = s.similarity()
        assert int(found.counts.max()) <= 2
        wanted = best_pairs(similarity, list(range(n)), count)
        assert joined(similarity, found.assignment) == pytest.approx(wanted, abs=1e-9)

    @quick
    @given(st.integers(0, 99), st.integers(2, 24), st.booleans())
    def test_both_libraries_agree(self, seed: int, n: int, ties: bool) -> None:
        pytest.importorskip("rustworkx", reason="only networkx is installed")
        s = statistics_of(samples(seed, (n,), ties), (n,))
        with pytest.MonkeyPatch.context() as patch:
            fast = zipfx.Optimal()(s, n - n // 2).assignment
            patch.setattr(optimal, "rustworkx", None)
            assert torch.equal(zipfx.Optimal()(s, n - n // 2).assignment, fast)

    @quick
    @given(st.integers(0, 99), st.integers(1, 6))
    def test_is_never_worse_than_the_greedy_one(self, seed: int, n: int) -> None:
        s = statistics_of(samples(seed, (n, n)), (n, n))
        best, greedy = zipfx.Optimal()(s, n), zipfx.Zip(alpha=0)(s, n)
        of = s.similarity()
        assert joined(of, best.assignment) >= joined(of, greedy.assignment) - 1e-9

    @quick
    @given(st.integers(0, 99), st.integers(2, 3), st.integers(1, 5))
    def test_across_models_only_it_is_permute(self, seed: int, models: int, n: int) -> None:
        s = statistics_of(samples(seed, (n,) * models), (n,) * models)
        for found in (zipfx.Optimal(beta=0)(s, n), zipfx.Optimal()(s, n, across_only=True)):
            assert torch.equal(found.assignment, zipfx.Permute()(s, n).assignment)

    @quick
    @given(st.integers(0, 99), st.integers(1, 9), st.data())
    def test_any_number_of_merged_features(self, seed: int, n: int, data: st.DataObject) -> None:
        merged = data.draw(st.integers(1, n))
        s = statistics_of(samples(seed, (n,)), (n,))
        assert zipfx.Optimal()(s, merged).merged == merged

    def test_says_how_long_it_would_take(self) -> None:
        s = statistics_of(samples(0, (20,)), (20,))
        with pytest.raises(ZipError, match=r"of 20 features .* minutes \(at most 10 .*'zip'"):
            zipfx.Optimal(most=10)(s, 10)

    def test_knows_no_budget(self) -> None:
        with pytest.raises(ZipError, match=r"beta is 0\.5: .*use matcher 'zip'"):
            zipfx.Optimal(beta=0.5)


class TestRounds:
    @quick
    @given(st.integers(0, 999), st.integers(2, 16), st.booleans(), st.data())
    def test_equal_one_join_at_a_time(
        self, seed: int, n: int, ties: bool, data: st.DataObject
    ) -> None:
        alpha = data.draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))
        merged = data.draw(st.integers(1, n))
        s = statistics_of(samples(seed, (n,), ties), (n,))
        first = join_in_rounds(s.similarity(), alpha, merged, np.zeros(n, np.int64), False)
        rank = torch.from_numpy(np.unique(first, return_inverse=True)[1])
        assert torch.equal(rank, zipfx.Zip(alpha)(s, merged).assignment)

    @quick
    @given(st.integers(0, 999), st.integers(1, 9), st.booleans())
    def test_across_two_models(self, seed: int, n: int, ties: bool) -> None:
        s = statistics_of(samples(seed, (n, n), ties), (n, n))
        first = join_in_rounds(s.similarity(), 0.3, n, np.repeat([0, 1], n), True)
        rank = torch.from_numpy(np.unique(first, return_inverse=True)[1])
        assert torch.equal(rank, zipfx.Zip(0.3, beta=0)(s, n).assignment)


class TestKMeans:
    @quick
    @given(st.integers(0, 999), st.integers(1, 10), st.booleans(), st.data())
    def test_no_feature_is_nearer_to_another_mean(
        self, seed: int, n: int, ties: bool, data: st.DataObject
    ) -> None:
        """The condition in which Lloyd's iterations end, computed on the features themselves."""
        merged = data.draw(st.integers(1, n))
        x = samples(seed, (n,))
        s = statistics_of(x[:, torch.randint(n, (n,))] if ties else x, (n,))
        found = zipfx.KMeans(similarity="cosine")(s, merged)
        values, vectors = torch.linalg.eigh(s.similarity("cosine"))
        points = vectors * values.clamp(min=0).sqrt()  # their inner products are the similarities
        means = found.merge_matrix() @ points
        distance = torch.cdist(points, means)
        own = distance.gather(1, found.assignment[:, None]).flatten()
        # up to ties, and to the last member of a cluster, which must stay
        single = found.counts[found.assignment] == 1
        assert bool(((own <= distance.min(1)[0] + 1e-5) | single).all())

    def test_groups_copies(self) -> None:
        x = samples(0, (6,))[:, [0, 1, 2, 0, 2, 1, 0, 0]]
        found = zipfx.KMeans()(statistics_of(x, (4, 4)), 3)
        assert found.assignment.tolist() == [0, 1, 2, 0, 2, 1, 0, 0]

    def test_refuses_no_iterations(self) -> None:
        with pytest.raises(ZipError, match="iterations is 0"):
            zipfx.KMeans(iterations=0)


class TestSVD:
    @quick
    @given(st.integers(0, 99), st.integers(1, 5), st.data())
    def test_no_merge_keeps_more(self, seed: int, n: int, data: st.DataObject) -> None:
        sizes, merged = (n, n), data.draw(st.integers(1, 2 * n))
        s = statistics_of(samples(seed, sizes), sizes)

        def lost(found: zipfx.Matching | zipfx.LinearMerge) -> float:
            m = found.merge_matrix()
            best = torch.linalg.lstsq(  # the best U for this M
                m @ s.covariance @ m.T, m @ s.covariance, driver="gelsd"
            ).solution.T
            rest = torch.eye(2 * n).double() - best @ m
            return float((rest @ s.covariance @ rest.T).trace())

        best = zipfx.Svd()(s, merged)
        rest = torch.eye(2 * n).double() - best.unmerge @ best.merge
        mine = float((rest @ s.covariance @ rest.T).trace())
        largest = torch.linalg.eigvalsh(s.covariance).flip(0)
        assert mine == pytest.approx(float(largest[merged:].sum()), abs=1e-9)
        for other in (zipfx.Zip(), zipfx.KMeans(), zipfx.Optimal()):
            assert mine <= lost(other(s, merged)) + 1e-9

    def test_needs_freedom(self) -> None:
        with pytest.raises(ZipError, match="mixes all features"):
            zipfx.Svd()(statistics_of(samples(0, (2, 2)), (2, 2)), 2, across_only=True)

    def test_is_exact_in_a_linear_network_of_low_rank(self) -> None:
        """Nothing but linear layers, and no more directions than merged features."""
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).double() for _ in range(2)]
        data = [torch.randn(64, 3).double()]
        merged = zipfx.zip(models, data, matcher="svd", repair="none", progress=False)
        with torch.no_grad():
            mean = (models[0](data[0]) + models[1](data[0])) / 2
            # a constant part has no variance: it is what the merge may lose
            kept, wanted = merged(data[0]), mean
            assert error(wanted - wanted.mean(0), kept - kept.mean(0)) < 1e-10


class TestUnmerge:
    @quick
    @given(st.integers(0, 99), st.integers(1, 6), st.data())
    def test_is_the_least_squares_solution(self, seed: int, n: int, data: st.DataObject) -> None:
        merged = data.draw(st.integers(1, 2 * n))
        x = samples(seed, (n, n)) + 0.5
        found = zipfx.Zip(unmerge="lstsq", ridge=1e-12)(statistics_of(x, (n, n)), merged)
        y = x @ found.merge_matrix().T
        wanted = torch.linalg.lstsq(y, x, driver="gelsd").solution.T
        assert error(wanted, found.unmerge_matrix()) < 1e-6

    @quick
    @given(st.integers(0, 99), st.integers(1, 6), st.floats(1e-9, 1))
    def test_changes_nothing_where_nothing_is_lost(self, seed: int, n: int, ridge: float) -> None:
        x = samples(seed, (n,))
        s = statistics_of(torch.cat([x, x.flip(1)], 1), (n, n))
        plain, better = (zipfx.Permute(unmerge=u, ridge=ridge)(s, n) for u in UNMERGES)
        assert torch.equal(plain.assignment, better.assignment)
        assert torch.equal(plain.unmerge_matrix(), better.unmerge_matrix())

    def test_goes_into_the_weights_of_the_heads(self) -> None:
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
            for _ in range(2)
        ]
        data = [torch.randn(64, 3)]
        seen = {}
        for matcher in (zipfx.Zip(), zipfx.Zip(unmerge="lstsq")):
            merged = zipfx.zip(
                models, data, matcher=matcher, partial="3", repair="none", progress=False
            )
            with torch.no_grad():
                wanted = [m(data[0]) for m in models]
                seen[matcher] = sum(
                    float((a - b).square().sum())
                    for a, b in zip(merged(data[0]), wanted, strict=True)
                )
        plain, better = seen.values()
        assert better < plain

    @pytest.mark.parametrize("option", [{"unmerge": "pin"}, {"similarity": "angle"}])
    def test_unknown_options(self, option: dict[str, str]) -> None:
        with pytest.raises(ZipError, match="is unknown; choose one of"):
            zipfx.Zip(**option)  # type: ignore[arg-type]

    @pytest.mark.parametrize("ridge", [0, -1, 2, float("nan")])
    def test_ridge_out_of_range(self, ridge: float) -> None:
        with pytest.raises(ZipError, match="ridge is"):
            zipfx.Permute(ridge=ridge)


class TestSimilarity:
    @quick
    @given(st.integers(0, 99), st.integers(2, 6))
    def test_equals_that_of_the_samples(self, seed: int, n: int) -> None:
        x = samples(seed, (n,)) + 0.3
        s = statistics_of(x, (n,))
        apart = 1e-6  # what a difference of means may cost
        cosine = nn.functional.cosine_similarity(x[:, :, None], x[:, None, :], dim=0)
        assert torch.allclose(s.similarity("cosine"), cosine, atol=apart)
        scaled = s.covariance / s.covariance.diagonal().max()
        scaled.fill_diagonal_(1)
        assert torch.allclose(s.similarity("covariance"), scaled, atol=apart)

    def test_no_nan_for_extreme_values(self) -> None:
        mean = torch.tensor([0, 1e200, -1e200, 1e-300], dtype=torch.float64)
        variance = torch.tensor([0, 1e300, 0, 1e-300], dtype=torch.float64)
        s = Statistics(9, mean, torch.diag(variance), (2, 2))
        for kind in ("correlation", "covariance", "cosine"):
            assert bool(s.similarity(kind).isfinite().all())  # type: ignore[arg-type]


class TestWeights:
    @pytest.mark.parametrize("name", sorted(NETS))
    def test_finds_permuted_copies_without_data(self, name: str) -> None:
        net = NETS[name]
        model, x = net.build(), net.inputs(4)
        spaces = zipfx.analyze(model, x)
        twins = [spaces.permuted(model, spaces.random_permutations(seed)) for seed in (3, 4)]
        merged = merge([model, *twins], None, matcher="weights", example_inputs=x)
        assert error(run(model, x), run(merged, x)) < EXACT

    @quick
    @given(st.integers(0, 99))
    def test_reaches_the_best_of_all_permutations(self, seed: int) -> None:
        """One hidden layer: the coordinate descent is one assignment, and exact."""
        torch.manual_seed(seed)
        nets = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2)]
        rows = [torch.cat([n[0].weight, n[0].bias[:, None], n[2].weight.T], 1) for n in nets]
        with torch.no_grad():
            best = max(
                itertools.permutations(range(5)),
                key=lambda order: float((rows[0] * rows[1][list(order)]).sum()),
            )
            x = torch.randn(2, 3)
            merged = zipfx.zip(nets, None, matcher="weights", example_inputs=x, progress=False)
            wanted = (nets[0][0].weight + nets[1][0].weight[list(best)]) / 2
            assert torch.allclose(merged.get_submodule("0").weight, wanted, atol=1e-6)

    def test_the_order_of_the_features_does_not_matter(self) -> None:
        torch.manual_seed(0)
        net = NETS["BatchNorm"]
        a, b, x = net.build(), net.build(1000), net.inputs(4)
        spaces = zipfx.analyze(a, x)
        moved = [spaces.permuted(m, spaces.random_permutations(i)) for i, m in enumerate((a, b))]
        one, two = (merge(m, None, matcher="weights", example_inputs=x) for m in ([a, b], moved))
        assert error(run(one, x), run(two, x)) < 1e-10

    def test_input_is_guessed_and_said(self) -> None:
        models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)) for _ in "ab"]
        merged = zipfx.zip(models, None, matcher="weights")
        report = merged.meta["zipfx"]
        assert report.repair == "none"
        assert any("random inputs of shape (2, 3, 32, 32)" in note for note in report.notes)
        assert "nan" not in str(report)

    def test_no_shape_fits(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(3, 3)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                z: Tensor = self.a(x + y)
                return z

        with pytest.raises(ZipError, match=r"takes none of the shapes .*example_inputs"):
            zipfx.zip([Odd(), Odd()], None, matcher="weights")

    def test_refuses_no_sweeps(self) -> None:
        with pytest.raises(ZipError, match="sweeps is 0"):
            zipfx.Weights(sweeps=0)


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


class TestOwnMatchers:
    def models(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)]

    def zipped(self, matcher: object) -> object:
        return zipfx.zip(
            self.models(),
            [torch.randn(9, 3)],
            matcher=matcher,
            progress=False,  # type: ignore[arg-type]
        )

    def test_a_function_is_enough(self) -> None:
        def reverse(s: Statistics, merged: int, *, across_only: bool = False) -> Matching:
            return Matching(torch.cat([torch.arange(4), torch.arange(4).flip(0)]), s.sizes, merged)

        torch.manual_seed(0)
        models = self.models()
        options = {"matcher": reverse, "repair": "none", "progress": False}
        merged = zipfx.zip(models, [torch.randn(9, 3)], **options)
        wanted = (models[0][0].weight + models[1][0].weight.flip(0)) / 2
        assert torch.allclose(merged.get_submodule("0").weight, wanted, atol=1e-6)

    def test_any_matrices(self) -> None:
        """M takes model 1 alone, and U gives its features back."""

        def second(s: Statistics, merged: int, *, across_only: bool = False) -> LinearMerge:
            zero, eye = torch.zeros(4, 4).double(), torch.eye(4).double()
            return LinearMerge(torch.cat([zero, eye], 1), torch.cat([zero, 2 * eye]), s.sizes)

        torch.manual_seed(0)
        models = self.models()
        options = {"matcher": second, "repair": "none", "progress": False}
        merged = zipfx.zip(models, [torch.randn(9, 3)], **options)
        x = torch.randn(5, 3)
        assert torch.allclose(merged.get_submodule("0").weight, models[1][0].weight, atol=1e-6)
        assert torch.allclose(merged.get_submodule("2").weight, models[1][2].weight, atol=1e-6)
        assert merged(x).shape == (5, 2)

    def test_nothing_else(self) -> None:
        with pytest.raises(ZipError, match=r"gave a tuple for space '0'.*zipfx.LinearMerge"):
            self.zipped(lambda s, merged, across_only: (1, 2))

    def test_wrong_shapes(self) -> None:
        def small(s: Statistics, merged: int, *, across_only: bool = False) -> LinearMerge:
            return LinearMerge(torch.zeros(3, 8).double(), torch.zeros(8, 3).double(), s.sizes)

        with pytest.raises(ZipError, match=r"gave 3 merged features from \(4, 4\).*needs 4"):
            self.zipped(small)
        with pytest.raises(ZipError, match=r"unmerge matrix has shape \(3, 8\).*must be \(8, 3\)"):
            LinearMerge(torch.zeros(3, 8).double(), torch.zeros(3, 8).double(), (4, 4))
        broken = torch.zeros(3, 8).double()
        broken[0, :2] = torch.nan
        with pytest.raises(ZipError, match="2 of 24 entries of the merge matrix are not finite"):
            LinearMerge(broken, torch.zeros(8, 3).double(), (4, 4))
