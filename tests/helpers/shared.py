"""What lies beside the repository: trained models that not every clone has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared(path: str) -> Path:
    """A path in ../shared (or in the folder ZIPFX_SHARED names); skips the test if it is absent."""
    found = Path(os.environ.get("ZIPFX_SHARED", ROOT.parent / "shared")) / path
    if not found.exists():
        pytest.skip(
            f"{path} is not in the folder shared/ beside the repository; set ZIPFX_SHARED to it"
        )
    return found
