"""Choose places: at which nodes of the graph a space is observed, a choice for each name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from zipfx.analysis import Analysis, Place, Space

Choose = Callable[[Space], Sequence[Place]]


def last_read(space: Space) -> Sequence[Place]:
    """The last place where a weight reads the space (its last place, if none does).

    Places where features of other spaces lie along other dimensions are a second choice: those
    must be averaged over, since they are not in the same order in all models.
    """
    sharp = _sharp(space)
    return ([p for p in sharp if p.read] or sharp)[-1:]


def _sharp(space: Space) -> Sequence[Place]:
    for wanted in (
        [p for p in space.places if p.own and not p.blurred and not p.mixed],
        [p for p in space.places if not p.blurred and not p.mixed],
        [p for p in space.places if not p.mixed],
    ):
        if wanted:
            return wanted
    return space.places


def all_reads(space: Space) -> Sequence[Place]:
    """Every place where a weight reads the space."""
    sharp = _sharp(space)
    return [p for p in sharp if p.read] or sharp[-1:]


def reads_and_source(space: Space) -> Sequence[Place]:
    """Every read, and the place where the values of the last read were made.

    That is before the activation, where a ReLU has not yet made features dead or all but dead:
    there the correlation of a feature with its copy is 1 and that of any other two is not. Where
    that is not known (other features lie there, too) it is the first place: later a softmax over
    the others, say, may have made their mean the same for all inputs. Of what no weight reads
    (queries and keys, which meet one another) it is all places where weights make it.
    """
    sharp = _sharp(space)
    reads = [p for p in sharp if p.read]
    made = [p for p in sharp if p.source] or sharp[:1]
    sources = (p for p in made if not any(p is r for r in reads))
    return [*sources, *reads]


def everywhere(space: Space) -> Sequence[Place]:
    """Every place."""
    return _sharp(space)


PLACES: dict[str, Choose] = {
    "last": last_read,
    "reads": all_reads,
    "source": reads_and_source,
    "all": everywhere,
}


def observed(spaces: Sequence[Space]) -> list[Space]:
    """The spaces whose own places are observed: blocks are known by the features inside them."""
    known = {block.space for s in spaces if not s.of_blocks and s.places for block in s.within}
    return [s for s in spaces if s.name not in known]


def comparable(space: Space) -> Space:
    """A space with those of its places that have the same rows in all models."""
    return replace(space, places=tuple(p for p in space.places if not p.chosen))


def unknown(spaces: Sequence[Space], seen: Collection[str]) -> set[str]:
    """Names of the spaces of which nothing was observed, in themselves or in what lies in them.

    seen: names of the spaces of which something was.
    """
    blind = {s.name for s in observed(spaces) if s.name not in seen}
    blocks = {s.name: {i.name for i in inside(s, spaces)} for s in spaces if s.of_blocks}
    return blind | {name for name, inner in blocks.items() if inner and inner <= blind}


def inside(blocks: Space, spaces: Iterable[Space]) -> list[Space]:
    """The spaces of features that lie in these blocks."""
    return [s for s in spaces if any(block.space == blocks.name for block in s.within)]


def pin_hidden(analysis: Analysis) -> Analysis:
    """The same analysis with the features of spaces left where they are that can be observed
    nowhere."""
    reason = "lies inside one node of the traced graph, where it can not be observed"
    while hidden := [s.name for s in observed(tuple(analysis.spaces)) if not s.places]:
        analysis = analysis.pin(hidden, reason)
    return analysis
