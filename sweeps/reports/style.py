"""One colour and one marker per mixer, the same in every figure, table and study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIXED = (
    "transformer",
    "swa",
    "mamba2",
    "deltanet",
    "gated_deltanet",
    "xlstm",
    "hyena",
    "mesa",
    "toeplitz",
    "maglev",
)
"""The named mixers keep their place, so that a colour means the same mixer in every report."""

# Okabe and Ito's colour-blind-safe palette for the eight that are neither attention nor its window, which stay neutral;
# markers and labels at the lines tell apart what colour alone does not. The second of a pair is for a dark page.
COLOURS = (
    ("#24292f", "#e6e8eb"),
    ("#7d8896", "#97a3b2"),
    ("#e69f00", "#f0b429"),
    ("#56b4e9", "#7cc7f2"),
    ("#0072b2", "#3d9be0"),
    ("#cc79a7", "#e195bf"),
    ("#009e73", "#2fc59b"),
    ("#d55e00", "#f57f2b"),
    ("#8f7a00", "#cbb53c"),
    ("#6f4bb2", "#a98be0"),
    ("#8c1d40", "#d9638c"),
    ("#1a9fb0", "#5fd0de"),
    ("#8aa81e", "#b8d650"),
    ("#3b3f9c", "#8d92f2"),
    ("#e0637f", "#f59ab0"),
    ("#7a4a21", "#c48a5c"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h", "p", "<", ">", "d", "8", "H", "o")


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn."""

    light: str
    dark: str
    marker: str
    css: str  # the name of its colour on the page


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label. Mixers without a fixed place get the remaining ones in the order of their names.

    Variants of a named mixer (``mesa_native``, ``swa (window=32)``) are mixers of their own.
    """
    places = {label: FIXED.index(label) for label in labels if label in FIXED}
    free = [i for i in range(len(COLOURS)) if i >= len(FIXED)] + [
        i for i in range(len(FIXED)) if FIXED[i] not in labels
    ]
    for number, label in enumerate(sorted(label for label in labels if label not in FIXED)):
        places[label] = free[number % len(free)] if free else number % len(COLOURS)
    return {
        label: Look(*COLOURS[places[label]], MARKERS[places[label]], f"--mixer-{number}")
        for number, label in enumerate(labels)
    }
