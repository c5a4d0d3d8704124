"""By needs: every space is matched by what its matcher needs, as far as that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zipfx.analysis import Space
from zipfx.match.by_weights import Weights, check_finite, match_weights
from zipfx.match.matchers.protocol import Matcher, needs_of, wanted
from zipfx.match.spaces import Matched, match_spaces
from zipfx.observe import Seen, unknown


@dataclass(frozen=True, eq=False)
class Matches:
    """by_space: what becomes of each space, and the pairs that were joined; blind: the spaces that
    were not matched by activations although these were observed, since none were seen there;
    observed: the spaces whose activations were seen."""

    by_space: Matched
    blind: frozenset[str]
    observed: frozenset[str]


def match_models(
    matcher: Matcher,
    spaces: Sequence[Space],
    seen: Seen | None,
    parameters: Callable[[], Mapping[str, Sequence[Tensor]]],
    models: int,
    *,
    progress: bool = False,
) -> Matches:
    """Match all spaces: by activations, by weights, or by position, as the matcher needs.

    Spaces of which no activation was seen are matched by the weights, whatever the matcher, but for
    one that needs nothing.

    Args:
        seen: statistics of the spaces, given out one by one; None: nothing was observed.
        parameters: gives the K corresponding tensors of every parameter, by its name in model 0.

    Raises:
        ZipError: a matcher fails; a parameter along which features lie is NaN or Inf, where no
            activations say so.
    """
    needs = needs_of(matcher)
    blind = set() if seen is None else unknown(spaces, seen.names)
    tensors = parameters() if seen is None or blind else {}
    check_finite(tensors, [s for s in spaces if seen is None or s.name in blind])
    matched: Matched = {}
    if needs != "weights":
        known = [s for s in spaces if s.name not in blind]
        take = None if seen is None else lambda name: seen.take(name, *wanted(matcher))
        matched = match_spaces(matcher, known, take, models, progress=progress)
    if needs == "nothing":
        rest = [s for s in spaces if s.name in blind]
        matched |= match_spaces(matcher, rest, None, models)
    elif needs == "weights" or blind:
        how = matcher if needs == "weights" else Weights()
        matched = match_weights(how, spaces, tensors, matched)
    names = frozenset(s.name for s in spaces if seen is not None and s.name not in blind)
    return Matches(matched, frozenset(blind if needs != "nothing" else ()), names)
