"""Where the boxes of a picture lie, and which way its edges take."""

from __future__ import annotations

import numpy as np
import pytest

from zipfx.analysis.spaces.layout import HEIGHT, PITCH, Box, layout, ranks


# ------------------------------------------------------------------ layout
def random_graph(seed: int, n: int = 60) -> list[Box]:
    generator = np.random.default_rng(seed)
    boxes = []
    for i in range(n):
        reads = generator.integers(0, i, generator.integers(0, 4)) if i else []
        boxes.append(
            Box(f"n{i}", "x" * int(generator.integers(1, 30)), tuple(f"n{j}" for j in reads))
        )
    return boxes


@pytest.mark.parametrize("seed", range(5))
def test_boxes_do_not_overlap_and_edges_go_down(seed: int) -> None:
    boxes = random_graph(seed)
    placed = layout(boxes)
    n = len(boxes)
    gap = np.abs(placed.x[:n, None] - placed.x[:n]) - (placed.width[:, None] + placed.width) / 2
    same_rank = np.abs(placed.y[:n, None] - placed.y[:n]) < HEIGHT
    np.fill_diagonal(same_rank, False)
    assert (gap[same_rank] > 0.1).all()
    above, below = placed.lines.T
    assert np.allclose(placed.y[below] - placed.y[above], PITCH)
    edges = {
        (f"n{s}", boxes[v].name) for s, v, end in zip(placed.source, below, placed.ends) if end
    }
    assert edges == {(name, box.name) for box in boxes for name in box.inputs}


def test_edges_of_one_box_share_their_way() -> None:
    chain = [Box(f"n{i}", "x", (f"n{i - 1}", "n0") if i > 1 else ("n0",) * i) for i in range(12)]
    assert len(layout(chain).x) == len(chain) + 10  # bends beside n1 to n10, not for each reader


def test_a_chain_is_straight_and_a_shortcut_goes_round_it() -> None:
    names = ["a", "bb" * 9, "c", "d", "e"]
    chain = [Box(b, b, (a,) if a else ()) for a, b in zip(["", *names], names, strict=False)]
    assert np.ptp(layout(chain).x) < 1e-6
    placed = layout([*chain[:-1], Box("e", "e", ("d", "a"))])
    bends, inner = placed.x[5:], placed.x[1:4]
    assert (np.abs(bends - inner) > placed.width[1:4] / 2).all()


def test_ranks_are_longest_paths_and_inputs_lie_by_their_readers() -> None:
    assert ranks([[], [0], [1], [0, 2], [], [3, 4]]).tolist() == [0, 1, 2, 3, 3, 4]
