"""One version, wherever it is asked for."""

from __future__ import annotations

import importlib.metadata
import re

import zipfx
from zipfx.version import __version__


def test_what_is_installed_has_the_version_of_the_package() -> None:
    assert zipfx.__version__ == __version__ == importlib.metadata.version("zipfx")


def test_it_is_one_that_installers_can_compare() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", __version__)
