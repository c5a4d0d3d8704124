"""Which features a layer is to compute: M times those of the models, or those of one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.analysed import analysed
from tests.helpers.blocks import Net, data
from zipfx import LinearMerge, Matching
from zipfx.analysis.analysis import Analysis
from zipfx.repair.features import made_at, made_by_rows, merged_features, own_features
from zipfx.repair.layers.kinds import layer_of
from zipfx.repair.layers.layer import Layer

SIZE = 4
#: features 0 and 1 of model 0 are one in the merge, as are all but one of model 1
ASSIGNMENT = torch.tensor([0, 0, 1, 2, 3, 3, 3, 0])
EVEN = torch.arange(SIZE)[:, None]


def zipped() -> Matching:
    return Matching(ASSIGNMENT, (SIZE, SIZE), SIZE)


def linear() -> LinearMerge:
    eye = torch.eye(SIZE, dtype=torch.float64)
    return LinearMerge(torch.cat([eye, eye], 1) / 2, torch.cat([eye, eye]), (SIZE, SIZE))


def at(analysis: Analysis, name: str) -> int:
    return [n.name for n in analysis.module.graph.nodes].index(name)


def layer(module: Any) -> Layer:
    found = layer_of(module)
    assert found is not None
    return found


def test_a_head_has_the_features_of_its_model_on_its_own_data() -> None:
    matrices, asked = own_features(1, 3, 1)
    assert [list(m) for m in matrices] == [[1]]
    assert asked[0].tolist() == [True] * 3
    matrices, asked = own_features(1, 3, 2)
    assert [a.tolist() for a in asked] == [[False] * 3, [True] * 3]
    assert len(matrices) == 2


def test_the_trunk_has_m_times_the_features_of_the_models() -> None:
    (matrices,), (asked,) = merged_features([(EVEN, zipped())], SIZE, 2, 1)
    merge = zipped().merge_matrix()
    assert torch.allclose(matrices[0], merge[:, :SIZE])
    assert torch.allclose(matrices[1], merge[:, SIZE:])
    assert asked.all()


def test_with_data_of_its_own_a_model_is_asked_for_what_it_has_a_share_of() -> None:
    matrices, asked = merged_features([(EVEN, zipped())], SIZE, 2, 2)
    assert [list(m) for m in matrices] == [[0], [1]]
    assert [a.tolist() for a in asked] == [[True, True, True, False], [True, False, False, True]]
    for k, matrix in enumerate(matrices):
        sums = matrix[k].sum(1)
        assert torch.allclose(sums[asked[k]], torch.ones(int(asked[k].sum())).double())
    assert torch.allclose(matrices[0][0][0], torch.tensor([0.5, 0.5, 0, 0]).double())


def test_outputs_of_the_network_are_averaged() -> None:
    (matrices,), _ = merged_features([], 3, 2, 1)
    assert [m.tolist() for m in matrices.values()] == [[0.5] * 3] * 2
    matrices, asked = merged_features([], 3, 2, 2)  # type: ignore[assignment]
    assert [{k: m.tolist() for k, m in one.items()} for one in matrices] == [
        {0: [1.0] * 3}, {1: [1.0] * 3},
    ]  # fmt: skip
    assert all(bool(a.all()) for a in asked)


def test_of_a_dense_matrix_all_data_is_asked() -> None:
    matrices, asked = merged_features([(EVEN, linear())], SIZE, 2, 2)
    assert matrices[0] == matrices[1]
    assert all(bool(a.all()) for a in asked)


def test_the_spaces_that_a_layer_makes_and_where_they_lie() -> None:
    model = Net(lambda s, x: s.h(s.a(x).relu().flatten(1)), a=nn.Conv2d(3, SIZE, 1),
                h=nn.Linear(4 * SIZE, 2))  # fmt: skip
    found = analysed(model, data(3, 2, 2))
    merges = {"a": zipped()}
    made = made_at(found, merges, at(found, "a"), layer(model.a))
    assert made is not None
    ((index, merge),) = made
    assert index.tolist() == EVEN.tolist()
    assert merge is merges["a"]
    assert made_at(found, {}, at(found, "h"), layer(model.h)) == []
    # flattened, features no longer lie where a convolution would put them
    assert made_at(found, merges, at(found, "flatten"), layer(nn.Conv2d(3, SIZE, 1))) is not None


def test_features_along_another_dimension_are_none_of_a_layer() -> None:
    model = Net(lambda s, x: s.h(s.a(x).relu().transpose(1, 2)).amax((1, 2)),
                a=nn.Linear(3, SIZE), h=nn.Linear(5, 5))  # fmt: skip
    found = analysed(model, data(5, 3))
    merges = {space.name: zipped() for space in found.spaces}
    assert made_at(found, merges, at(found, "transpose"), layer(nn.Linear(5, 5))) is None
    assert made_at(found, merges, at(found, "a"), layer(model.a)) is not None


def packed(x: Tensor) -> tuple[Analysis, dict[str, Any]]:
    model = Net(lambda s, y: s.h(s.w(y)[:, :SIZE].relu() * s.w(y)[:, SIZE:].tanh()),
                w=nn.Linear(3, 2 * SIZE), h=nn.Linear(SIZE, 2))  # fmt: skip
    found = analysed(model, x)
    return found, {space.name: zipped() for space in found.spaces}


@pytest.mark.parametrize("start", [0, SIZE])
def test_some_rows_of_a_packed_weight_make_their_own_features(start: int) -> None:
    found, merges = packed(data(3))
    made = made_by_rows(found, merges, "w.weight", start, start + SIZE)
    assert made is not None
    assert [(index[:, 0].tolist(), merge.merged) for index, merge in made] == [
        (list(range(SIZE)), SIZE)
    ]
    assert made_by_rows(found, merges, "h.weight", 0, 2) == []


def test_rows_that_cut_a_space_make_nothing_whole() -> None:
    found, merges = packed(data(3))
    assert made_by_rows(found, merges, "w.weight", 1, SIZE) is None
