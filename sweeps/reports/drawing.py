"""How figures are drawn: theme, labels at points, and SVG whose colours follow the page's light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sweeps.reports.style import Look

INK, MUTED, RULE, PAPER = "#1c1e22", "#6a6f78", "#dedcd4", "#fffefb"
SIZES = {"*": 1.55, "P": 1.2, "X": 1.2, "d": 1.2}
"""Markers that look smaller than the others at the same size."""

VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}


@dataclass(frozen=True)
class Picture:
    """One figure."""

    name: str  # of its files, without ending
    title: str
    caption: str
    png: bytes
    svg: str  # a file of its own
    inline: str  # for the page, whose colours it follows


def theme() -> Any:
    """A context with the look of all figures. The font is matplotlib's own: with whatever a machine has, labels would
    stand elsewhere, and the same runs would not make the same bytes."""
    return matplotlib.rc_context(
        {
            "font.family": ["DejaVu Sans"],
            "font.size": 10,
            "svg.fonttype": "none",
            "axes.edgecolor": RULE,
            "axes.labelcolor": MUTED,
            "axes.titlecolor": INK,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.labelsize": 9.5,
            "axes.unicode_minus": True,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "text.color": INK,
        }
    )


def figure(width: float, height: float, right: float) -> tuple[Figure, Axes]:
    """One figure with one set of axes; ``width`` and ``height`` in inches, ``right`` as a share of the width."""
    made = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(made)
    axes = made.add_axes((0.52 / width, 0.55 / height, right - 0.52 / width, 1 - 0.95 / height))
    axes.set_facecolor("none")
    return made, axes


def beside(labels: Iterable[str], width: float = 10.4) -> float:
    """The right end of axes that leaves room for the longest of ``labels`` at the ends of curves, as a share of the width."""
    return min(0.9, 1 - (0.4 + 0.064 * max(map(len, labels), default=0)) / width)


def panels(
    count: int, columns: int, looks: dict[str, Look], width: float = 10.4, height: float = 3.0
) -> tuple[Figure, list[Axes]]:
    """Small multiples: ``count`` axes in rows of ``columns``, ``height`` inches each row, under one legend of all
    ``looks``."""
    rows, head = -(-count // columns), 0.4
    whole = height * rows + head
    made = Figure(figsize=(width, whole), facecolor=PAPER)
    FigureCanvasAgg(made)
    left, gap = 0.52 / width, 0.5 / width
    wide = (0.985 - left - gap * (columns - 1)) / columns
    handles = [
        Line2D([], [], color=look.light, marker=look.marker, markeredgecolor="none", linewidth=1.6, label=label)
        for label, look in looks.items()
    ]
    made.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left - 0.01, 1.0), ncols=min(8, len(handles)), frameon=False,
        fontsize=8.5, labelcolor="linecolor", handlelength=1.4, columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip
    all_axes = []
    for i in range(count):
        row, column = divmod(i, columns)
        bottom = ((rows - 1 - row) * height + 0.55) / whole
        axes = made.add_axes((left + column * (wide + gap), bottom, wide, (height - 0.95) / whole))
        axes.set_facecolor("none")
        all_axes.append(axes)
    return made, all_axes


def grid(axes: Axes) -> None:
    """Horizontal rules only."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", length=0, pad=6)


def label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[str, float, float, Look]]) -> None:
    """A name at each point, moved up or down until none covers another, with a thin line back to the point.

    ``ends``: (label, x, y, look) in data coordinates.
    """
    size, gap = 9.0, 16.0
    height, width = 1.45 * size * figure.dpi / 72, 0.62 * size * figure.dpi / 72
    bottom, top = axes.transData.transform((ends[0][1], axes.get_ylim()[0]))[1], axes.transAxes.transform((0, 1))[1]
    points = [axes.transData.transform((x, y)) for _, x, y, _ in ends]
    spans = [(p[0] + gap, p[0] + gap + width * len(label)) for p, (label, *_) in zip(points, ends, strict=True)]
    heights = [float(min(max(p[1], bottom), top)) for p in points]
    for _ in range(300):
        moved = False
        for i in range(len(ends)):
            for j in range(i):
                together = spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1]
                up, down = (i, j) if (points[i][1], i) > (points[j][1], j) else (j, i)  # never swap them
                overlap = height - (heights[up] - heights[down])
                if together and overlap > 0.1:
                    heights[up] += overlap / 2
                    heights[down] -= overlap / 2
                    moved = True
        heights = [max(place, bottom + 0.3 * height) for place in heights]
        if not moved:
            break
    for (label, x, y, look), point, place in zip(ends, points, heights, strict=True):
        shift = (place - point[1]) * 72 / figure.dpi
        far = abs(shift) > 4
        line = {"arrowstyle": "-", "color": look.light, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3}
        line["relpos"] = (0, 0.5)
        axes.annotate(
            label,
            (x, y),
            xytext=(gap if far else 8, shift),
            textcoords="offset points",
            va="center",
            color=look.light,
            fontsize=size,
            annotation_clip=False,
            arrowprops=line if far else None,
        )


def for_page(svg: str, name: str, title: str, style: dict[str, Look]) -> str:
    """Inline SVG: colours by CSS variable, the page's font, ids of its own, a name for screen readers."""
    svg = svg[svg.index("<svg") :]
    names = VARIABLES | {look.light: look.css for look in style.values()}
    for colour, variable in names.items():
        svg = re.sub(re.escape(colour), f"var({variable})", svg, flags=re.IGNORECASE)
    svg = re.sub(r'font-family: [^;"]+', "font-family: inherit", svg)
    svg = re.sub(r"font: ([^;\"]*?)(\d[\d.]*px) [^;\"]+", r"font: \1\2 var(--sans)", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{rest}'


def save(made: Figure, name: str, title: str, caption: str, style: dict[str, Look]) -> Picture:
    """The figure as PNG, as an SVG file and as SVG for the page. Equal runs give equal bytes."""
    png, svg = io.BytesIO(), io.StringIO()
    made.savefig(png, format="png", dpi=200, facecolor=PAPER, metadata={"Software": None})
    made.patch.set_alpha(0)
    with matplotlib.rc_context({"svg.hashsalt": name}):
        made.savefig(svg, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    drawn = svg.getvalue()
    return Picture(name, title, caption, png.getvalue(), drawn, for_page(drawn, name, title, style))
