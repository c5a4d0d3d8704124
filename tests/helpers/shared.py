"""What lies beside the repository: models, data and pictures that not every clone has."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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


def shared_module(path: str) -> ModuleType:
    """A Python file of ../shared as a module; skips if it is absent."""
    file = shared(path)
    name = "shared_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        ours = sys.modules.pop("models", None)  # it may want a neighbour of the same name
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules.pop("models", None)
            if ours is not None:
                sys.modules["models"] = ours
            if str(file.parent) in sys.path:
                sys.path.remove(str(file.parent))
    return sys.modules[name]
