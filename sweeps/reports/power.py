"""How many seeds would tell two mixers apart, and how small a difference the seeds at hand would find.

Both are of a paired two-sided t-test at 80 % power. The level is what Holm's correction asks of the clearest of a family,
``alpha / tests``: a later step of it asks less, so the numbers are on the safe side. The standard deviation is that of the
paired differences, an estimate itself: from three pairs it may be off by half.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import nctdtr, stdtrit

POWER = 0.8
MOST = 1000
"""More seeds than this are nobody's plan: the answer is then None."""


def power(effect: float, n: int, alpha: float) -> float:
    """The chance that ``n`` pairs tell a difference of ``effect`` standard deviations from none."""
    if n < 2:
        return 0.0
    critical, shift = float(stdtrit(n - 1, 1 - alpha / 2)), abs(effect) * math.sqrt(n)
    above, below = nctdtr(n - 1, shift, critical), nctdtr(n - 1, shift, -critical)
    # Far out the distribution function overflows to NaN, where the shift is beyond any doubt.
    return 1.0 if math.isnan(above) else float(1 - above + (0.0 if math.isnan(below) else below))


def seeds_needed(difference: float, sd: float, *, alpha: float, tests: int = 1, least: float = POWER) -> int | None:
    """The fewest pairs with which a true ``difference`` is found with a chance of ``least``. Both in the metric's unit.

    None if that takes more than `MOST`, or if there is no difference to be found. Raises ValueError for ``sd`` below 0.
    """
    if sd < 0:
        raise ValueError(f"a standard deviation of {sd}: must be 0 or more")
    if difference == 0:
        return None
    if sd == 0:
        return 2
    level, effect = alpha / tests, difference / sd
    low, high = 1, MOST
    if power(effect, high, level) < least:
        return None
    while high - low > 1:  # power grows with the number of pairs
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= least else (middle, high)
    return high


def detectable(sd: float, n: int, *, alpha: float, tests: int = 1, least: float = POWER) -> float:
    """The smallest true difference that ``n`` pairs find with a chance of ``least``, in the unit of ``sd``."""
    if sd == 0:
        return 0.0
    level = alpha / tests
    high = 1.0
    while power(high, n, level) < least:
        high *= 2
    return sd * float(brentq(lambda effect: power(effect, n, level) - least, 0.0, high, xtol=1e-6))
