"""Numbers as a reader wants them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweeps.reports.compare import Estimate
    from sweeps.reports.table import Board

MINUS = "\N{MINUS SIGN}"
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def si(value: float, unit: str = "", base: int = 1000) -> str:
    """Three digits and a prefix: 1_638_400 -> ``1.64 M``; base 1024 writes KiB, MiB."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".strip()
    power = 0
    while power < len(PREFIXES) - 1 and (abs(value) >= base or float(f"{abs(value):.3g}") >= base):
        value, power = value / base, power + 1
    prefix = PREFIXES[power]
    if base == 1024 and prefix:
        prefix = f"{prefix.upper()}i"
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{digits} {prefix}{unit}".strip()


def duration(seconds: float) -> str:
    """``48 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60:02d} min" if minutes % 60 else "")


def signed(value: float, digits: int = 3) -> str:
    """With its sign, a true minus, and no minus zero."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return f"+{text}" if value > 0 else f"{MINUS}{text}"


def digits_for(spread: float) -> int:
    """Decimals with which differences of size ``spread`` can be seen: 3 for bits per byte, as a rule."""
    if not spread > 0 or not math.isfinite(spread):
        return 3
    return min(6, max(2, 2 - math.floor(math.log10(spread))))


def decimals(board: Board) -> int:
    """Enough to see the differences between rows, and no more than their intervals bear: two digits of the usual half-width."""
    means = [row.estimate.mean for row in board.rows]
    if len(means) < 2:
        return 3
    halves = [e.high - e.mean for row in board.rows if (e := row.estimate).high is not None]
    usual = sorted(halves)[len(halves) // 2] if halves else 0.0
    sensible = 1 - math.floor(math.log10(usual)) if usual > 0 else 4
    if board.metric.endswith("accuracy"):
        sensible = min(sensible, 4)  # a hundredth of a per cent: near 1 all is solved
    return max(3, min(digits_for(max(means) - min(means)), sensible))


def interval(e: Estimate, digits: int, sign: bool = False) -> str:
    """``1.234 [1.210, 1.258]``."""
    write = signed if sign else (lambda value, d: f"{value:.{d}f}")
    if e.low is None or e.high is None:
        return write(e.mean, digits)
    return f"{write(e.mean, digits)} [{write(e.low, digits)}, {write(e.high, digits)}]"


def half(e: Estimate, digits: int, sign: bool = False) -> str:
    """``1.234 ±0.024``: the intervals are symmetric, and a terminal is narrow."""
    mean = signed(e.mean, digits) if sign else f"{e.mean:.{digits}f}"
    return mean if e.high is None else f"{mean} ±{e.high - e.mean:.{digits}f}"


def over(board: Board) -> str:
    """What the intervals are over, for a heading."""
    kinds = {row.estimate.over for row in board.rows} - {"none"}
    return " or ".join(sorted(kinds)) or "none"
