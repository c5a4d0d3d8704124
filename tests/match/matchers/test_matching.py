from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.match.matchers.matching import Matching


@st.composite
def matchings(draw: st.DrawFn) -> Matching:
    sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    raw = draw(st.lists(st.integers(0, 6), min_size=sum(sizes), max_size=sum(sizes)))
    assignment = torch.unique(torch.tensor(raw, dtype=torch.int64), return_inverse=True)[1]
    return Matching(assignment, sizes, merged=len(set(raw)))


@settings(max_examples=30, deadline=None)
@given(matchings(), st.sampled_from([torch.float32, torch.float64]))
def test_unmerge_is_the_pseudoinverse_of_merge(matching: Matching, dtype: torch.dtype) -> None:
    merge, unmerge = matching.merge_matrix(dtype), matching.unmerge_matrix(dtype)
    total = sum(matching.sizes)
    assert merge.shape == (matching.merged, total)
    assert unmerge.shape == (total, matching.merged)
    assert merge.dtype == unmerge.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        merge @ unmerge, torch.eye(matching.merged, dtype=dtype), rtol=0, atol=tolerance
    )
    if total:
        torch.testing.assert_close(torch.linalg.pinv(merge), unmerge, rtol=0, atol=10 * tolerance)
    assert set(unmerge.flatten().tolist()) <= {0.0, 1.0}


@settings(max_examples=30, deadline=None)
@given(matchings())
def test_counts_and_matches_against_plain_sets(matching: Matching) -> None:
    groups: list[list[int]] = [[] for _ in range(matching.merged)]
    for model in range(len(matching.sizes)):
        assert matching.of(model).shape == (matching.sizes[model],)
        for merged in matching.of(model).tolist():
            groups[merged].append(model)
    assert matching.counts.tolist() == [len(group) for group in groups]
    assert matching.within == sum(len(group) - len(set(group)) for group in groups)
    assert matching.across == sum(len(set(group)) - 1 for group in groups)
    assert matching.within + matching.across == sum(matching.sizes) - matching.merged


def test_worked_example() -> None:
    # Groups {a0, a1, b0}, {b1, c0}, {c1}: one within-match, two across.
    matching = Matching(torch.tensor([0, 0, 0, 1, 1, 2]), (2, 2, 2), 3)
    assert matching.counts.tolist() == [3, 2, 1]
    assert matching.of(2).tolist() == [1, 2]
    assert (matching.within, matching.across) == (1, 2)
    third = 1 / 3
    assert matching.merge_matrix()[0].tolist() == [third, third, third, 0, 0, 0]


@pytest.mark.parametrize(
    ("assignment", "sizes", "merged", "message"),
    [
        (torch.tensor([0, 1, 0]), (2, 2), 2, r"shape \(3,\).*\(2, 2\) sum to 4.*\(4,\)"),
        (torch.tensor([[0, 1]]), (1, 1), 2, r"shape \(1, 2\)"),
        (torch.tensor([0.0, 1.0]), (1, 1), 2, r"torch.float32 on cpu: it must be torch.int64"),
        (torch.tensor([0, 1], device="meta"), (1, 1), 2, r"torch.int64 on meta"),
        (torch.tensor([0, 2]), (1, 1), 2, r"1 of 2 features .* outside the 2 .* first to 2"),
        (torch.tensor([0, -1]), (1, 1), 2, r"the first to -1"),
        (torch.tensor([0, 2]), (1, 1), 4, r"no feature maps to 2 of the 4 .* of them 1"),
        (torch.tensor([0]), (2, -1), 1, r"sizes are \(2, -1\)"),
        (torch.tensor([0]), (), 1, r"sizes are \(\)"),
    ],
)
def test_refuses(assignment: Tensor, sizes: tuple[int, ...], merged: int, message: str) -> None:
    with pytest.raises(ZipError, match=message):
        Matching(assignment, sizes, merged)


@pytest.mark.parametrize("model", [-1, 2])
def test_of_refuses_an_unknown_model(model: int) -> None:
    with pytest.raises(ZipError, match=rf"no model {model}: the matching has models 0 .. 1"):
        Matching(torch.tensor([0, 0]), (1, 1), 1).of(model)
