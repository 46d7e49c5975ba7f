"""The report's figures: each as PNG and SVG files, and as SVG for the page, whose colours follow its light or dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sweeps.reports import plots_evaluations, plots_scaling, scaling
from sweeps.reports.drawing import PAPER, SIZES, Picture, beside, figure, grid, label_ends, save, theme
from sweeps.reports.format import duration, si
from sweeps.reports.plots_inside import by_position, diagnostics, drift
from sweeps.reports.plots_quality import against, by_slice
from sweeps.reports.plots_tuning import sensitivity
from sweeps.reports.style import Look, looks
from sweeps.reports.table import Board, Row

LEGEND: dict[str, Any] = {
    "ncols": 2,
    "frameon": False,
    "fontsize": 8.5,
    "labelcolor": "linecolor",
    "columnspacing": 1.2,
    "handlelength": 1.4,
    "borderaxespad": 0.2,
}
TIMES = [k * unit for unit, ks in ((1, (1, 2, 5, 10, 20)), (60, (0.5, 1, 2, 5, 10, 20))) for k in ks]
TIMES += [3600 * k for k in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)]
MANY = 5
"""Curves from which on their bands are drawn faintly."""

AXES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time"}


@dataclass(frozen=True)
class Curve:
    """Validation of one mixer over training: mean over its runs, and their range."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def validation_key(board: Board) -> str:
    """The validation metric that goes with the table's, where it was recorded during training."""
    key = board.metric.replace("test/", "val/", 1)
    recorded = all(any(key in row for row in run.rows) for run in board.runs)
    return key if recorded else "val/bits_per_byte"


def curve(row: Row, axis: str, key: str) -> Curve | None:
    """Over the steps at which all runs of the row were validated; None where there is none."""
    series = [{r["step"]: r for r in run.rows if key in r} for run in row.entry.runs]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    if not steps:
        return None
    y = np.array([[one[step][key] for step in steps] for one in series])
    tokens = np.array([series[0][step]["tokens"] for step in steps], dtype=float)
    if axis == "tokens":
        x = tokens
    elif axis == "flops":
        x = tokens * row.count("train_flops_per_token")
    else:
        clocks = []
        for run in row.entry.runs:
            timed = [(r["step"], r["seconds"]) for r in run.rows if "seconds" in r]
            if not timed:
                return None
            at, seconds = zip(*timed, strict=True)
            clocks.append(np.interp(steps, at, seconds))
        x = np.mean(clocks, axis=0)
    return Curve(x, y.mean(axis=0), y.min(axis=0), y.max(axis=0))


# ---- figures ---------------------------------------------------------------------------------------------------------


def pictures(board: Board) -> list[Picture]:
    """All figures that the runs have the rows for."""
    style = looks([row.label for row in board.rows])
    found = [
        *(_curves(board, axis, style) for axis in AXES),
        against(board, style, "state"),
        against(board, style, "params"),
        sensitivity(board, style),
        by_slice(board, style),
        by_position(board, style),
        drift(board, style),
        diagnostics(board, style),
        *plots_evaluations.pictures(board.evaluations, style),
        plots_scaling.picture(scaling.find(board)),
    ]
    return [picture for picture in found if picture is not None]


def _curves(board: Board, axis: str, style: dict[str, Look]) -> Picture | None:
    key = validation_key(board)
    curves = {row.label: curve(row, axis, key) for row in board.rows}
    drawn = {label: c for label, c in curves.items() if c is not None}
    if not drawn:
        return None
    wide = axis == "tokens"
    with theme():
        canvas, axes = figure(10.4 if wide else 5.9, 4.3 if wide else 4.1, right=beside(drawn) if wide else 0.975)
        ends = []
        for label, c in reversed(drawn.items()):  # the best one on top
            look = style[label]
            if (c.high > c.low).any():
                faint = 0.16 if len(drawn) <= MANY else 0.06  # of many bands one would see the overlaps alone
                axes.fill_between(c.x, c.low, c.high, color=look.light, alpha=faint, linewidth=0)
            axes.plot(c.x, c.mean, color=look.light, linewidth=1.8, solid_joinstyle="round")
            axes.plot(
                c.x[-1],
                c.mean[-1],
                look.marker,
                color=look.light,
                markersize=6.5 * SIZES.get(look.marker, 1),
                markeredgecolor=PAPER,
            )
            ends.append((label, c.x[-1], c.mean[-1], look))
        if axis != "tokens":
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=_begin(drawn.values(), limits(board, key)))
        axes.set_ylim(*limits(board, key))
        _axis_style(axes, axis)
        axes.set_xlabel(AXES[axis])
        axes.set_title(f"validation, {_unit(board, key)}", loc="left")
        if wide:
            label_ends(canvas, axes, ends)
        else:  # ends lie anywhere; what is beside the steep beginning of all curves is free
            place: dict[str, Any] = {"loc": "lower left" if board.lower_is_better else "upper left"}
            axes.legend(handles=[_handle(row.label, style) for row in board.rows], **place, **LEGEND)
        n = max(row.estimate.n for row in board.rows)
        seeds = " Mean over seeds; the band spans all of them." if n > 1 else " One seed."
        captions = {
            "tokens": f"What each mixer learns from equal data.{seeds}",
            "flops": "The same against the arithmetic it takes, forward and backward, solvers included.",
            "seconds": "The same against time in training steps on this hardware. It measures these implementations.",
        }
        return save(canvas, f"curve_{axis}", f"Learning against {AXES[axis]}", captions[axis], style)


def _begin(curves: Iterable[Curve], shown: tuple[float, float]) -> float:
    """Where the first curve comes into the figure: what lies before would be empty. 0 if that is where it starts."""
    entries = []
    for c in curves:
        inside = np.flatnonzero((c.mean >= shown[0]) & (c.mean <= shown[1]))
        entries.append(float(c.x[max(0, inside[0] - 1)]) if len(inside) else 0.0)
    first = min(entries)
    return 0.0 if first <= 0.1 * max(float(c.x[-1]) for c in curves) else first


def _handle(label: str, style: dict[str, Look]) -> Line2D:
    look = style[label]
    return Line2D([], [], color=look.light, marker=look.marker, markeredgecolor="none", linewidth=1.8, label=label)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _axis_style(axes: Axes, axis: str) -> None:
    grid(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value) if axis == "seconds" else si(value)))
    if axis == "tokens":
        axes.xaxis.set_major_locator(MaxNLocator(7))
        return
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    if axis == "flops":
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    else:
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(FixedLocator([t for t in TIMES if low <= t <= high]))


def _unit(board: Board, key: str) -> str:
    return board.unit if key == board.metric.replace("test/", "val/", 1) else "bits per byte"


def limits(board: Board, key: str) -> tuple[float, float]:
    """The loss axis, the same in all three figures, so that they can be laid side by side.

    The first half of training is steep and tells little: it may leave the figure at the top (accuracies: at the bottom).
    """
    curves = [c for row in board.rows if (c := curve(row, "tokens", key)) is not None]
    late = [np.flatnonzero(c.x >= 0.45 * c.x[-1])[0] for c in curves]
    if board.lower_is_better:
        low = min(float(c.low.min()) for c in curves)
        high = max(float(c.high[i:].max()) for c, i in zip(curves, late, strict=True))
    else:
        low = min(float(c.low[i:].min()) for c, i in zip(curves, late, strict=True))
        high = max(float(c.high.max()) for c in curves)
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad
