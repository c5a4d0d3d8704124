"""Choose places: at which nodes of the graph a space is observed, a choice for each name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zipfx.analysis import Place, Space

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
    the others, say, may have made their mean the same for all inputs.
    """
    reads, sharp = all_reads(space), _sharp(space)
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
