"""Matchers are found by name; what is none is refused."""

from __future__ import annotations

import pytest

from zipfx import match
from zipfx.errors import ZipError
from zipfx.match import Identity, Permute, Zip


def test_resolve() -> None:
    assert match.resolve("zip") == Zip()
    assert match.resolve("permute") == Permute()
    assert match.resolve("identity") == Identity()
    matcher = Zip(alpha=0.1, beta=0.8)
    assert match.resolve(matcher) is matcher


@pytest.mark.parametrize(
    ("matcher", "message"),
    [
        (
            "Permut",
            r"no matcher 'Permut'; did you mean 'permute'\? Known: identity, kmeans, optimal",
        ),
        ("xyz", r"no matcher 'xyz'\. Known: identity"),
        (Zip, r"the matcher is the class Zip: pass an instance"),
        (3, r"the matcher is a int: pass one of identity, .*, or a callable"),
    ],
)
def test_resolve_refuses(matcher: object, message: str) -> None:
    with pytest.raises(ZipError, match=message):
        match.resolve(matcher)  # type: ignore[arg-type]
