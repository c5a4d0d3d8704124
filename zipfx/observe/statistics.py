"""Statistics: the second-order statistics of one feature space, which matching works on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zipfx.errors import ZipError
from zipfx.observe.similarity import Similarity, correlations, cosines, similarities
from zipfx.values import ByValue

_STILL = 1e-10  # of the largest mean: what varies by less carries nothing
_ASYMMETRY = 1e-6  # accepted, relative to the largest entry: what float32 sums leave behind


@dataclass(frozen=True, eq=False)
class Statistics(ByValue):
    """Count, mean and covariance of N features, those of K models side by side.

    Args:
        count: samples seen (batch times positions), at least 1.
        mean: (N,) float64.
        covariance: (N, N) float64, symmetric, on the device of the mean; any common factor
            (count or count - 1 in the denominator) is fine.
        sizes: features of each model, in order; they sum to N.
        resolution: relative rounding of the activations that were observed, the eps of their dtype.
        moment: (N, N) float64, symmetric: mean products of the features where weights read them, in
            any unit, if these are not where the others were observed.
        trusted: the values are symmetric and finite by construction (an observer's are): skip the
            checks of them, which read the covariance several times.

    Raises:
        ZipError: shapes, dtypes or values that cannot be statistics of these features.

    >>> covariance = torch.tensor([[4.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    >>> statistics = Statistics(9, torch.zeros(2, dtype=torch.float64), covariance, sizes=(1, 1))
    >>> statistics.correlation()
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """

    count: int
    mean: Tensor
    covariance: Tensor
    sizes: tuple[int, ...]
    resolution: float = torch.finfo(torch.float32).eps
    trusted: bool = False
    moment: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_shapes()
        if not self.trusted:
            self._check_values()

    def _check_shapes(self) -> None:
        mean, covariance, total = self.mean, self.covariance, sum(self.sizes)
        if not self.sizes or min(self.sizes) < 0:
            raise ZipError(
                f"sizes are {self.sizes}: give the features of each model, none negative"
            )
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
            raise ZipError(f"the covariance has shape {tuple(covariance.shape)}: it must be square")
        if mean.shape != (total,) or len(covariance) != total:
            raise ZipError(
                f"the sizes {self.sizes} sum to {total} features, but the mean has shape "
                f"{tuple(mean.shape)} and the covariance {tuple(covariance.shape)}: "
                f"they must be ({total},) and ({total}, {total})"
            )
        if mean.dtype != torch.float64 or covariance.dtype != torch.float64:
            raise ZipError(
                f"the mean is {mean.dtype} and the covariance {covariance.dtype}: "
                "convert both to torch.float64"
            )

    def _check_values(self) -> None:
        if self.count < 1:
            raise ZipError(f"the statistics are of {self.count} samples: at least 1 is needed")
        if not 0 <= self.resolution < 1:
            raise ZipError(f"the resolution is {self.resolution}: it must be in 0 .. 1, as an eps")
        for name, values in (("mean", self.mean), ("covariance", self.covariance)):
            broken = int((~values.isfinite()).sum())
            if broken:
                raise ZipError(
                    f"{broken} of {values.numel()} entries of the {name} are not finite: "
                    "look for inf or nan in the activations of the calibration data"
                )
        if sum(self.sizes):
            _check_covariance(self.covariance)

    def select(self, index: Tensor, sizes: tuple[int, ...]) -> Statistics:
        """The statistics of some of the features, index (n,) int64, in this order.

        >>> statistics = Statistics(9, torch.zeros(2, dtype=torch.float64),
        ...                         torch.tensor([[4.0, 2.0], [2.0, 1.0]]).double(), (1, 1))
        >>> statistics.select(torch.tensor([1, 0]), (1, 1)).covariance
        tensor([[1., 2.],
                [2., 4.]], dtype=torch.float64)
        """
        index = index.to(self.mean.device)
        both = index[:, None], index
        moment = None if self.moment is None else self.moment[both]
        covariance = self.covariance[both]
        return replace(
            self, mean=self.mean[index], covariance=covariance, sizes=sizes, moment=moment
        )

    @property
    def constant(self) -> Tensor:
        """(N,) bool: features that never vary on the calibration data.

        A constant c that is rounded on its way shows a standard deviation of about
        resolution * |c|, and the correlation of rounding noise means nothing: up to 16 times
        that counts as constant. What was rounded may be larger than what is left of it (behind a
        norm), so up to 4 times that of the largest mean does, too, and so does a 1e-10th of it.
        """
        if not len(self.mean):
            return torch.zeros(0, dtype=torch.bool, device=self.mean.device)
        size = self.mean.abs()
        least = max(4 * self.resolution, _STILL)
        noise = torch.maximum(16 * self.resolution * size, least * size.max())
        return self.covariance.diagonal().sqrt() <= noise

    def correlation(self) -> Tensor:
        """(N, N) float64 in [-1, 1], exactly symmetric, with diagonal 1; never nan.

        Rows and columns of constant features are 0 off the diagonal.
        """
        return correlations(self.mean, self.covariance, self.constant)

    def cosine(self) -> Tensor:
        """(N, N) float64 in [-1, 1]: cosines of the features as vectors over all samples, means
        included; exactly symmetric, diagonal 1, never nan. 0 off the diagonal where a feature is
        always 0."""
        return cosines(self.mean, self.covariance, self.constant)

    def second_moment(self) -> Tensor:
        """(N, N) float64: the mean products of any two features, means included."""
        if self.moment is not None:
            return self.moment
        return torch.addr(self.covariance, self.mean, self.mean)

    def similarity(self, kind: Similarity = "correlation") -> Tensor:
        """(N, N) float64 in [-3, 1]: how well one feature can stand for another; never nan.

        - two varying features: their correlation (ZipIt!, section 4), their covariance over the
          largest variance, or the cosine of the features as vectors, as `kind` says;
        - two constants: 1 - |m_i - m_j| / (|m_i| + |m_j|) in [0, 1], and 1 at equal means. Nothing
          is lost by joining equal constants, dead ReLUs first of all, so they match before
          anything that varies;
        - a constant and a varying feature: 1 / (1 + |m_i - m_j|) - 3 in [-3, -2]. Joining them
          spoils both, so this is the last resort, below every correlation; the nearer their
          means, the less is spoilt.

        >>> covariance = torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
        >>> mean = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
        >>> Statistics(9, mean, covariance, sizes=(1, 2)).similarity()
        tensor([[ 1.0000, -2.5000, -2.7500],
                [-2.5000,  1.0000,  0.5000],
                [-2.7500,  0.5000,  1.0000]], dtype=torch.float64)
        """
        return similarities(kind, self.mean, self.covariance, self.constant)


def _check_covariance(covariance: Tensor) -> None:
    """Check that variances are not negative, and that the matrix is symmetric."""
    variance = covariance.diagonal()
    if variance.min() < 0:
        raise ZipError(
            f"the covariance has a negative diagonal, {float(variance.min()):.6g} at feature "
            f"{int(variance.argmin())}: a variance cannot be below 0; accumulate more precisely"
        )
    gap = float((covariance - covariance.T).abs().max())
    largest = float(covariance.abs().max())
    if gap > _ASYMMETRY * largest:
        raise ZipError(
            f"the covariance is not symmetric: it differs from its transpose by {gap:.6g} at "
            f"entries up to {largest:.6g} (relative {gap / largest:.2g}, at most "
            f"{_ASYMMETRY:g} is accepted)"
        )
