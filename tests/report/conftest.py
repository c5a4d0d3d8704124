from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zipfx
from tests.helpers.saved import attentions, zipped


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge with heads behind the first layer."""
    path = tmp_path_factory.mktemp("saved") / "merged.safetensors"
    zipfx.save(zipped("0"), path)
    return path


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge with heads behind the third layer."""
    path = tmp_path_factory.mktemp("saved") / "merged.safetensors"
    zipfx.save(zipped("2"), path)
    return path


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of models that are traced for a length, so that inputs are drawn to load it."""
    path = tmp_path_factory.mktemp("saved") / "looping.safetensors"
    torch.manual_seed(0)
    ids = torch.randint(5, 11, (32, 4))
    zipfx.save(zipfx.zip(attentions(), [{"ids": ids}], partial="a", progress=False), path)
    return path
