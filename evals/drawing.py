"""How the suites' figures look: one colour and one marker for each run, panels under one legend, notes below them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

Dashes = tuple[float | None, float | None]
INK, MUTED, RULE, PAPER = "#1c1e22", "#6a6f78", "#dedcd4", "#fffefb"
DEPLOYED: Dashes = (None, None)
OTHER_MODE: Dashes = (4, 2)
"""Dashes of a curve in the mode that is deployed, and of one in another mode."""

# The ten named mixers as `sweeps.reports.style` draws them (Okabe and Ito), so that a colour means the same mixer in every
# figure; then those for all others.
NAMED = {
    "transformer": ("#24292f", "o"),
    "swa": ("#7d8896", "s"),
    "mamba2": ("#e69f00", "^"),
    "deltanet": ("#56b4e9", "D"),
    "gated_deltanet": ("#0072b2", "v"),
    "xlstm": ("#cc79a7", "P"),
    "hyena": ("#009e73", "X"),
    "mesa": ("#d55e00", "*"),
    "toeplitz": ("#8f7a00", "h"),
    "maglev": ("#6f4bb2", "p"),
}
SIZES = {"*": 1.6, "P": 1.2, "X": 1.2, "d": 1.2}
"""Markers that look smaller than the others at the same size."""

FREE = (
    ("#8c1d40", "<"),
    ("#1a9fb0", ">"),
    ("#8aa81e", "d"),
    ("#3b3f9c", "8"),
    ("#e0637f", "H"),
    ("#7a4a21", "o"),
)


@dataclass(frozen=True)
class Look:
    """How a run is drawn."""

    colour: str
    marker: str


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label: a named mixer's own, or the next free one."""
    free = cycle([*FREE, *(look for name, look in NAMED.items() if name not in labels)])
    return {label: Look(*(NAMED[label] if label in NAMED else next(free))) for label in labels}


def theme() -> Any:
    """A context with the look of all figures, in matplotlib's own font: equal results make equal files everywhere."""
    return matplotlib.rc_context(
        {
            "font.family": ["DejaVu Sans"],
            "font.size": 10,
            "svg.fonttype": "none",
            "svg.hashsalt": "isomix",
            "axes.edgecolor": RULE,
            "axes.labelcolor": MUTED,
            "axes.titlecolor": INK,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 9.5,
            "axes.facecolor": "none",
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "text.color": INK,
            "lines.linewidth": 1.6,
            "lines.markersize": 5,
        }
    )


def panels(rows: int, columns: int, *, width: float = 5.0, height: float = 3.3) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``rows`` times ``columns`` axes, each ``width`` times ``height`` inches with its labels."""
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.03, hspace=0.04)
    made = Figure(figsize=(width * columns, height * rows + 0.5), facecolor=PAPER, layout=engine)
    FigureCanvasAgg(made)
    return made, [list(row) for row in made.subplots(rows, columns, squeeze=False)]


def plain(axes: Axes, title: str, x: str, y: str = "") -> None:
    """Horizontal rules only, a title at the left, names of both axes."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", length=0, pad=5)
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(6))


def log_x(axes: Axes, values: Sequence[float], most: int = 9) -> None:
    """Powers of two, with ticks at ``values`` themselves, or where these are many at powers of two alone."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(values))
    axes.xaxis.set_major_locator(FixedLocator(ticks) if len(ticks) <= most else LogLocator(base=2, numticks=most))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.15g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def log_y(axes: Axes) -> None:
    """Powers of ten, with 2 and 5 between them where there are few, in words such as 20k and 1.5M."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def short(value: float) -> str:
    """Three digits and a prefix, no space: 20000 -> 20k; small numbers as they are."""
    for power, prefix in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{prefix}"
    return f"{value:.3g}"


def name_at(axes: Axes, text: str, x: float, y: float, above: float, colour: str) -> None:
    """A word ``above`` (points; below if negative) a point, readable on a line that passes behind it."""
    axes.annotate(
        text, (x, y), xytext=(0, above), textcoords="offset points", ha="center", va="center", fontsize=8.5, color=colour,
        path_effects=[withStroke(linewidth=3, foreground=PAPER)], zorder=5,
    )  # fmt: skip


def legend(figure: Figure) -> None:
    """One legend above all panels, each name once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        room = figure.get_figwidth() * 11.5  # letters in a row
        fits = sum(len(name) + 7 for name in found) <= room
        columns = len(found) if fits else max(1, min(6, int(room / (max(map(len, found)) + 7))))
        figure.legend(
            found.values(), found.keys(), loc="outside upper left", ncols=columns, frameon=False,
            fontsize=9, handlelength=2.4, columnspacing=1.6,
        )  # fmt: skip


def notes(figure: Figure, lines: Sequence[str]) -> None:
    """What a reader must know, under the panels."""
    wide = int(figure.get_figwidth() * 13.5)
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, wide))
    if text:
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=MUTED)


def save(figure: Figure, stem: Path) -> list[Path]:
    """``<stem>.png`` and ``<stem>.svg``; the same figure gives the same bytes."""
    files = [stem.with_name(f"{stem.name}{ending}") for ending in (".png", ".svg")]
    for file, metadata in zip(files, ({"Software": None}, {"Date": None, "Creator": None}), strict=True):
        temporary = file.with_name(f".{file.name}.tmp")
        figure.savefig(temporary, format=file.suffix[1:], dpi=160, facecolor=PAPER, metadata=metadata)
        temporary.replace(file)
    return files
