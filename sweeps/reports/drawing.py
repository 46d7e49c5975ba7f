"""How figures are drawn: theme, labels at points, and SVG whose colours follow the page's light or dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sweeps.reports.style import Look

INK, MUTED, RULE, PAPER = "#1c1e22", "#6a6f78", "#dedcd4", "#fffefb"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}


def theme() -> Any:
    """A context with the look of all figures. Inter or Helvetica where the machine has them."""
    installed = set(font_manager.get_font_names())
    family = [name for name in ("Inter", "Helvetica Neue", "Arial", "DejaVu Sans") if name in installed]
    return matplotlib.rc_context(
        {
            "font.family": family or ["sans-serif"],
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
