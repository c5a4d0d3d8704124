"""The modules of ../shared/cases: structures on which published tools break or go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import zipfx
from tests.helpers.laws import EXACT, error, merge, run
from tests.helpers.shared import shared_module
from zipfx.model.tensors import widened

NAMES = """
    cat_same_twice cat_then_residual cat_network_input inception_bn_after_cat chunk_csp_c2f
    overlapping_slices slice_is_also_output partial_conv maxout_pairs focus_space_to_depth
    grouped_conv channel_shuffle transposed_conv transposed_conv_grouped pixel_shuffle flatten_chw
    flatten_channels_last broadcast_mask channel_statistics convnext_channels_last group_norm
    shared_head_two_levels tied_embedding_output functional_weights weight_norm_conv
    qkv_view_permute grouped_query_attention patch_merging lstm_two_layers_bidirectional
    einsum_contraction stacked_experts token_mixer sinusoid_in_forward inplace_chain
    two_inputs_dict_output dict_batch_input dtype_mix shape_dependent_branch slice_assignment
    list_input_iteration
""".split()
MORE = """
    dispatched_experts fourier_layer_complex identity_branch_in_kernel meta_branch
    packed_sequence_lstm spectral_norm_convs
""".split()  # of models2.py
FLOWS = """
    dtype_of_a_weight dynamically_quantised endless_generator exported_modules extra_keywords
    flat_parameters inside_inference_mode jit_traced
""".split()  # of use
EVERY = [*NAMES, *MORE]

Element = tuple[str, int, int, "tuple[int, int] | None"]  # parameter, dim, index, rows
Axis = tuple[str, int, Tensor, "tuple[int, int] | None"]


def fetch(name: str) -> tuple[nn.Module, Any, Any]:
    """A case in float64, its inputs, and the module that says what is true of it."""
    cases = shared_module("cases/models2.py" if name in MORE else "cases/models.py")
    make, inputs = cases.CASES[name]
    model = make().double()
    for p in model.parameters():
        p.data = widened(p.data)  # complex ones, too
    return model, as_double(inputs), cases


def as_double(inputs: Any) -> Any:
    return tree_map(widened, inputs)


def moved(axes: Iterable[Axis], size: int) -> list[Counter[Element]]:
    """For every feature of a space: how often each (parameter, dim, index) moves with it."""
    found: list[Counter[Element]] = [Counter() for _ in range(size)]
    for parameter, dim, index, rows in axes:
        for feature, indices in enumerate(index.tolist()):
            found[feature].update((parameter, dim, i, rows) for i in indices)
    return found


def found_spaces(model: nn.Module, spaces: Iterable[zipfx.Space]) -> list[list[Counter[Element]]]:
    """What moves with each feature: one list for every block of a space."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = []
    for space in spaces:
        features: list[Counter[Element]] = [Counter() for _ in range(space.size)]
        for a in space.axes:
            length, rows = tensors[a.parameter].shape[a.dim], None
            parts = a.index // length
            cells = parts.split(list(space.blocks)) if space.blocks else [parts]
            moves = any(bool((cell != cell[:1]).any()) for cell in cells)  # whole parts, with rows
            skip = a.implied or (a.by >= 0 and moves)
            for feature, indices in enumerate([] if skip else a.index.tolist()):
                for i in indices:
                    if a.by >= 0:
                        assert a.by == 0
                        step = len(tensors[a.parameter]) // a.parts
                        rows = (i // length * step, (i // length + 1) * step)
                    features[feature][a.parameter, a.dim, i % length, rows] += 1
        start = 0
        for size in space.blocks or (space.size,):
            found.append(features[start : start + size])
            start += size
    return found


def contains(own: Sequence[Counter[Element]], true: Sequence[Counter[Element]]) -> bool:
    """Whether every true feature lies in exactly one of ours, each in another."""
    homes = [[j for j, o in enumerate(own) if t <= o] for t in true]
    return len(own) == len(true) and sorted(homes) == [[j] for j in range(len(own))]


def test_every_case_is_listed() -> None:
    assert sorted(shared_module("cases/models.py").CASES) == sorted(NAMES)
    more = shared_module("cases/models2.py")
    assert sorted(more.CASES) == sorted(MORE)
    assert sorted(more.FLOWS) == sorted(FLOWS)


@pytest.mark.parametrize("name", EVERY)
def test_ground_truth(name: str) -> None:
    model, inputs, cases = fetch(name)
    ours = found_spaces(model, zipfx.analyze(model, inputs, verify=False))
    for size, axes in cases.SPACES[name]:
        true = moved(axes, size)
        assert any(contains(own, true) for own in ours), (name, size, axes[0][0])


@pytest.mark.parametrize("name", EVERY)
def test_law_1_holds_so_that_no_trap_is_taken(name: str) -> None:
    model, inputs, _ = fetch(name)
    spaces = zipfx.analyze(model, inputs, verify=False)
    expected = run(model, inputs)
    for seed in range(3):
        twin = spaces.permuted(model, spaces.random_permutations(seed))
        assert error(expected, run(twin, inputs)) < EXACT


@pytest.mark.parametrize("name", EVERY)
def test_no_trap_is_a_space(name: str) -> None:
    """A trap is a grouping that changes the function; one that lies in a space would do so."""
    model, inputs, cases = fetch(name)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ours = found_spaces(model, zipfx.analyze(model, inputs, verify=False))
    for size, axes in cases.TRAPS[name]:
        assert {axis[0] for axis in axes} <= set(tensors)
        trap = moved(axes, size)
        assert trap not in ours


@pytest.mark.parametrize("name", EVERY)
def test_law_3(name: str) -> None:
    model, inputs, _ = fetch(name)
    spaces = zipfx.analyze(model, inputs)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    generator = torch.Generator().manual_seed(0)

    def fresh(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return noise if t.is_floating_point() else t

    data = [tree_map(fresh, inputs) for _ in range(30)]
    merged = merge([model, twin], data, matcher="permute")
    assert error(run(model, inputs), run(merged, inputs)) < EXACT


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("name", FLOWS)
def test_flows(name: str) -> None:
    """Ways of use that went wrong without a word."""
    right, what = shared_module("cases/models2.py").FLOWS[name]
    assert right(zipfx), what
