"""Numbers as a reader wants them."""

from __future__ import annotations

import math

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
