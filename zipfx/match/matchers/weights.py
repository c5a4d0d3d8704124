"""Match by the weights alone, without data."""

from __future__ import annotations

from dataclasses import dataclass

from zipfx.checks import whole
from zipfx.match.matchers.matching import Matching
from zipfx.match.matchers.permute import Permute
from zipfx.observe.statistics import Statistics


@dataclass(frozen=True)
class Weights:
    """Permute features so that the weights of the models are as alike as possible (Ainsworth et
    al., Git Re-Basin, ICLR 2023, section 3.2): no data needed.

    The sum of the inner products of all corresponding weights is raised by re-assigning one space
    at a time while all others stay, by `Permute`; see `match_weights`. The statistics it is called
    with are inner products of the features' weights.

    Args:
        sweeps: over all spaces at most; it ends earlier when nothing changes.

    Raises:
        ZipError: sweeps is no whole number, or below 1.

    >>> import torch, zipfx
    >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(4, 3)
    >>> spaces = zipfx.analyze(a, x)
    >>> b = spaces.permuted(a, spaces.random_permutations(1))
    >>> merged = zipfx.zip([a, b], None, matcher="weights", repair="none", example_inputs=x)
    >>> torch.allclose(merged(x), a(x), atol=1e-6)
    True
    """

    sweeps: int = 100

    def __post_init__(self) -> None:
        whole("sweeps", self.sweeps, 1)

    def __call__(
        self, statistics: Statistics, merged: int, *, across_only: bool = False
    ) -> Matching:
        """See `Matcher`; the result is always across models only.

        Raises:
            ZipError: a model has not exactly `merged` features.
        """
        return Permute(similarity="covariance")(statistics, merged)
