from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zipfx.analysis.rules.register import TAUGHT

pytest.register_assert_rewrite("tests.helpers")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _forget_rules() -> Iterator[None]:
    """What a test teaches the analysis ends with it."""
    before = dict(TAUGHT)
    yield
    TAUGHT.clear()
    TAUGHT.update(before)
