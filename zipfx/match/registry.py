"""Registry: the matchers by name, and the check of one that is given."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from zipfx.errors import ZipError
from zipfx.match.by_weights import Weights
from zipfx.match.matchers.kmeans import KMeans
from zipfx.match.matchers.one_to_one import Identity, Permute
from zipfx.match.matchers.optimal import Optimal
from zipfx.match.matchers.protocol import Matcher, wanted
from zipfx.match.matchers.svd import Svd
from zipfx.match.matchers.zip import Zip

__all__ = [
    "Identity",
    "KMeans",
    "Matcher",
    "Optimal",
    "Permute",
    "Svd",
    "Weights",
    "Zip",
    "resolve",
    "wanted",
]

_NAMED: dict[str, Callable[[], Matcher]] = {
    "identity": Identity,
    "kmeans": KMeans,
    "optimal": Optimal,
    "permute": Permute,
    "svd": Svd,
    "weights": Weights,
    "zip": Zip,
}


def resolve(matcher: str | Matcher) -> Matcher:
    """The matcher of that name with its defaults, or the given matcher itself.

    Raises:
        ZipError: unknown name, or something that is not called as a matcher is.

    >>> resolve("zip")
    Zip(alpha=0.3, beta=1.0)
    >>> resolve("zipp")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zipfx.errors.ZipError: no matcher 'zipp'; did you mean 'zip'? Known: identity, kmeans, ...
    """
    if isinstance(matcher, str):
        if matcher in _NAMED:
            return _NAMED[matcher]()
        close = difflib.get_close_matches(matcher.lower(), _NAMED, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ZipError(f"no matcher {matcher!r}{hint} Known: {', '.join(_NAMED)}")
    if isinstance(matcher, type):
        raise ZipError(f"the matcher is the class {matcher.__name__}: pass an instance of it")
    if not callable(matcher):
        raise ZipError(
            f"the matcher is a {type(matcher).__name__}: pass one of {', '.join(_NAMED)}, "
            "or a callable (statistics, merged, *, across_only) -> Matching or LinearMerge"
        )
    return matcher
