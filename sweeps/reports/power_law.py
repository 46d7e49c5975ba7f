"""Power laws through a few sizes: lines of ln(loss) over ln(compute), and what two of them have between them.

**Modelled**: the mean ln(loss) of a size lies on a line in ln(compute), up to a misfit of that size which is normal with one
spread for all sizes. The misfit holds everything by which a size is off the line: the noise of its seeds, its own shape, its
own learning rate from a coarse grid. Of two mixers the misfits of one size may be correlated (the same shape, the same seeds).

**Not modelled**: a loss that no compute removes (the law bends towards it; with three to six sizes it cannot be told from the
slope), other bends, and the choice of test documents, which all runs share.

The seeds of a size share its misfit, so they are no independent draws around the line: an interval from all runs would shrink with
the number of seeds while the line is as wrong as before. Size means are the data, each of equal weight, and the intervals are
Student's t with (sizes - 2) degrees of freedom: wide for few sizes, as they should be. With equal numbers of seeds the line itself
is the least-squares line through all runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from sweeps.reports.compare import ALPHA, Estimate, t_interval

LEAST = 3
"""Sizes without which there is no line with an error."""

SIZES = "sizes"

FARTHEST = math.log(1e6)
"""An interval that allows a factor of a million allows anything."""


@dataclass(frozen=True)
class Line:
    """Least squares through size means. ``x_S`` ln(compute) and ``y_S`` ln(loss), one for each of S sizes."""

    x_S: np.ndarray
    y_S: np.ndarray

    def __post_init__(self) -> None:
        if self.x_S.shape != self.y_S.shape or len(self.x_S) < LEAST or len(np.unique(self.x_S)) < 2:
            raise ValueError(
                f"a line with an error needs {LEAST} sizes of different compute; there are {len(self.x_S)}"
            )

    @property
    def df(self) -> int:
        return len(self.x_S) - 2

    @property
    def slope_weights_S(self) -> np.ndarray:
        """The slope is the sum of these times y."""
        centred = self.x_S - self.x_S.mean()
        return centred / np.square(centred).sum()

    def weights_at_S(self, x: float) -> np.ndarray:
        """The height of the line at ``x`` is the sum of these times y."""
        return 1 / len(self.x_S) + (x - self.x_S.mean()) * self.slope_weights_S

    @property
    def residuals_S(self) -> np.ndarray:
        """By how much each size lies above the line."""
        slope = self.slope_weights_S @ self.y_S
        return self.y_S - self.y_S.mean() - slope * (self.x_S - self.x_S.mean())

    @property
    def misfit(self) -> float:
        """Standard deviation of a size around the line, as a share of its loss."""
        return math.sqrt(float(np.square(self.residuals_S).sum()) / self.df)

    def slope(self) -> Estimate:
        return self._estimate(self.slope_weights_S)

    def at(self, x: float) -> Estimate:
        """The line's own height at ``x`` with its interval; not that of a new run."""
        return self._estimate(self.weights_at_S(x))

    def _estimate(self, weights_S: np.ndarray) -> Estimate:
        error = self.misfit * float(np.linalg.norm(weights_S))
        return t_interval(float(weights_S @ self.y_S), error, self.df, len(self.x_S), SIZES)


@dataclass(frozen=True)
class Pair:
    """A mixer's line and the reference's, over the same sizes in the same order; each has compute of its own.

    A difference is a weighted sum of both lines' means. Its variance is from the residuals of both, whose covariance over sizes
    is what pairing takes away. Where the compute of the two differs by one factor, the interval of the difference of exponents is
    exactly that of a line through the paired differences; else (sizes - 2) degrees of freedom are on the safe side.
    """

    mine: Line
    theirs: Line

    def __post_init__(self) -> None:
        if len(self.mine.x_S) != len(self.theirs.x_S):
            raise ValueError(f"{len(self.mine.x_S)} and {len(self.theirs.x_S)} sizes: pairs need the same ones")

    def slopes(self) -> Estimate:
        """Mine minus theirs."""
        return self._estimate(self._slopes)

    def at(self, x: float) -> Estimate:
        """ln of my loss over theirs where both have used the compute exp(x)."""
        return self._estimate(self._at(x))

    def multiplier(self, x: float) -> Estimate | None:
        """ln of how many times the compute exp(x) the reference needs for the loss that I have there.

        The two lines' distance in height over the reference's slope, with Fieller's interval for a ratio (1954), which holds 0 just
        where that of `at` does. None where the reference's slope is not told from 0, or hardly: any compute could be the answer.
        """
        top, bottom = self._at(x), np.stack([np.zeros_like(self.theirs.x_S), self.theirs.slope_weights_S])
        distance, slope = self._value(top), self._value(bottom)
        t2 = float(stdtrit(self.mine.df, 1 - ALPHA / 2)) ** 2
        a = slope**2 - t2 * self._covariance(bottom, bottom)
        b = distance * slope - t2 * self._covariance(top, bottom)
        c = distance**2 - t2 * self._covariance(top, top)
        if a <= 0:
            return None
        half = math.sqrt(max(0.0, b * b - a * c)) / a
        low, high = b / a - half, b / a + half
        if max(-low, high) > FARTHEST:
            return None
        return Estimate(distance / slope, low, high, len(self.mine.x_S), SIZES)

    # A weighting is (2, S): the weights of my means, and of the reference's.

    @property
    def _slopes(self) -> np.ndarray:
        return np.stack([self.mine.slope_weights_S, -self.theirs.slope_weights_S])

    def _at(self, x: float) -> np.ndarray:
        return np.stack([self.mine.weights_at_S(x), -self.theirs.weights_at_S(x)])

    def _value(self, weights_2S: np.ndarray) -> float:
        return float(weights_2S[0] @ self.mine.y_S + weights_2S[1] @ self.theirs.y_S)

    def _covariance(self, one_2S: np.ndarray, other_2S: np.ndarray) -> float:
        residuals_2S = np.stack([self.mine.residuals_S, self.theirs.residuals_S])
        between_22 = residuals_2S @ residuals_2S.T / self.mine.df
        return float(np.sum((one_2S @ other_2S.T) * between_22))

    def _estimate(self, weights_2S: np.ndarray) -> Estimate:
        error = math.sqrt(max(0.0, self._covariance(weights_2S, weights_2S)))
        return t_interval(self._value(weights_2S), error, self.mine.df, len(self.mine.x_S), SIZES)
