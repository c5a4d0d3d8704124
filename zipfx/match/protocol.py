"""What every matcher is, and the checks they share."""

from __future__ import annotations

from typing import Protocol

from zipfx.errors import ZipError
from zipfx.matrices import Matching
from zipfx.statistics import Statistics


class Matcher(Protocol):
    """Statistics of one feature space -> which features become one.

    A matcher is a pure function: no random numbers, no state, the same result on every call.
    """

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """Match the N features of all models down to `merged`, M.

        Args:
            statistics: of all models side by side; never modified.
            merged: M, normally the size of one model.
            across_only: never join two features of one model.

        Raises:
            ZipError: the matcher cannot give M merged features for these sizes.
        """
        ...


def check_one_to_one(statistics: Statistics, merged: int, matcher: str) -> None:
    """Raise ZipError unless every model has exactly `merged` features."""
    if any(size != merged for size in statistics.sizes):
        raise ZipError(
            f"matcher {matcher!r} pairs features one to one, but the models have "
            f"{statistics.sizes} features and {merged} are to remain: the numbers must be equal; "
            "for unequal numbers use matcher 'zip'"
        )
