from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from zipfx.analysis.rules.register import TAUGHT

pytest.register_assert_rewrite("tests.helpers")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a sweep over many cases the first and the middle one are quick."""
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        quick = {0, len(cases) // 2}
        for i, item in enumerate(cases):
            if i not in quick:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _forget_rules() -> Iterator[None]:
    """What a test teaches the analysis ends with it."""
    before = dict(TAUGHT)
    yield
    TAUGHT.clear()
    TAUGHT.update(before)
