"""Loss against training FLOPs over the sizes of each mixer, both logarithmic."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sweeps.reports.drawing import MUTED, PAPER, SIZES, Picture, beside, figure, grid, label_ends, save, theme
from sweeps.reports.format import si
from sweeps.reports.scaling import Ladder, Scaling, factor

NAME = "scaling"
CAPTION = (
    "Each tick is one run, each marker the mean of a size. The line is the power law through the means, its band the 95 % "
    "interval of the line from the scatter of sizes. The dashed line is the middle compute, at which the table compares."
)


def picture(found: Scaling | None) -> Picture | None:
    """None where there is no ladder."""
    if found is None:
        return None
    style = found.looks
    with theme():
        canvas, axes = figure(10.4, 4.9, right=beside(style))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axvline(found.flops, color=MUTED, linewidth=1.1, dashes=(4, 3))
        ends, right = [], max(rung.flops for ladder in found.ladders for rung in ladder.rungs)
        for ladder in reversed(found.ladders):  # the best one on top
            look = style[ladder.label]
            x = np.linspace(ladder.line.x_S[0], ladder.line.x_S[-1], 60)
            mean, low, high = _band(ladder, x)
            axes.fill_between(np.exp(x), low, high, color=look.light, alpha=0.12, linewidth=0)
            axes.plot(np.exp(x), mean, color=look.light, linewidth=1.6)
            for rung in ladder.rungs:
                values = np.exp(list(rung.by_seed.values()))
                axes.plot(
                    np.full(len(values), rung.flops), values, "_", color=look.light, markersize=12, markeredgewidth=0.6
                )
                size = 6 * SIZES.get(look.marker, 1)
                axes.plot(rung.flops, np.exp(rung.mean), look.marker, color=look.light, markersize=size, markeredgecolor=PAPER, markeredgewidth=0.7, zorder=3)  # fmt: skip
            last, height = float(np.exp(x[-1])), float(mean[-1])
            # Names stand side by side where the longest line ends, so that none lies on another mixer's line.
            axes.plot([last, right], [height, height], color=look.light, linewidth=0.6, alpha=0.6)
            ends.append((ladder.label, right, height, look))
        axes.set_ylim(*_limits(found))
        grid(axes)
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=14))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.set_xlabel("training FLOPs of a run")
        split = found.metric.partition("/")[0]
        axes.set_title(f"{split}, {found.unit}", loc="left")
        label_ends(canvas, axes, ends)
        return save(canvas, NAME, "Loss against compute, by size", CAPTION, style)


def _band(ladder: Ladder, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Height of the line and its interval at each ln(compute), in the metric's unit."""
    at = [factor(ladder.line.at(float(one))) for one in x]
    return tuple(np.array([getattr(e, name) for e in at]) for name in ("mean", "low", "high"))  # type: ignore[return-value]


def _limits(found: Scaling) -> tuple[float, float]:
    """Of the points: bands of few sizes may be wider than all they are about, and leave the figure."""
    values = [np.exp(value) for ladder in found.ladders for rung in ladder.rungs for value in rung.by_seed.values()]
    room = (max(values) / min(values)) ** 0.12 * 1.005
    return float(min(values) / room), float(max(values) * room)
