"""The report's figures: each as a PNG file, and as SVG for the page, whose colours follow the page's light or dark."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sweeps.reports.drawing import MUTED, PAPER, figure, for_page, grid, label_ends, theme
from sweeps.reports.format import duration, si
from sweeps.reports.style import Look, looks
from sweeps.reports.table import Board, Row

SIZES = {"*": 1.55, "P": 1.2, "X": 1.2, "d": 1.2}
LEGEND: dict[str, Any] = {
    "loc": "lower left",
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
AXES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time"}


@dataclass(frozen=True)
class Picture:
    """One figure."""

    name: str  # of its file, without ending
    title: str
    caption: str
    png: bytes
    svg: str


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
    out = []
    for axis in AXES:
        picture = _curves(board, axis, style)
        if picture is not None:
            out.append(picture)
    out.append(_against_state(board, style))
    drift = _drift(board, style)
    return out if drift is None else [*out, drift]


def _curves(board: Board, axis: str, style: dict[str, Look]) -> Picture | None:
    key = validation_key(board)
    curves = {row.label: curve(row, axis, key) for row in board.rows}
    drawn = {label: c for label, c in curves.items() if c is not None}
    if not drawn:
        return None
    wide = axis == "tokens"
    with theme():
        canvas, axes = figure(10.4 if wide else 5.9, 4.3 if wide else 4.1, right=0.865 if wide else 0.975)
        ends = []
        for label, c in reversed(drawn.items()):  # the best one on top
            look = style[label]
            if (c.high > c.low).any():
                axes.fill_between(c.x, c.low, c.high, color=look.light, alpha=0.16, linewidth=0)
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
            axes.set_xlim(left=0)
        _y_limits(axes, list(drawn.values()), board)
        _axis_style(axes, axis)
        axes.set_xlabel(AXES[axis])
        axes.set_title(f"validation, {_unit(board, key)}", loc="left")
        if key == board.metric.replace("test/", "val/", 1):
            _draw_bar(axes, board, at=0.005 if wide else 0.995)
        if wide:
            label_ends(canvas, axes, ends)
        else:  # ends lie anywhere; what is below the steep beginning of all curves is free
            axes.legend(handles=[_handle(row.label, style) for row in board.rows], **LEGEND)
        n = max(row.estimate.n for row in board.rows)
        seeds = " Mean over seeds; the band spans all of them." if n > 1 else " One seed."
        captions = {
            "tokens": f"What each mixer learns from equal data.{seeds}",
            "flops": "The same against the arithmetic it takes, forward and backward, solvers included.",
            "seconds": "The same against time in training steps on this hardware. It measures these implementations.",
        }
        return _save(canvas, f"curve_{axis}", f"Learning against {AXES[axis]}", captions[axis], style)


def _handle(label: str, style: dict[str, Look]) -> Line2D:
    look = style[label]
    return Line2D([], [], color=look.light, marker=look.marker, markeredgecolor="none", linewidth=1.8, label=label)


def _against_state(board: Board, style: dict[str, Look]) -> Picture:
    with theme():
        canvas, axes = figure(10.4, 4.1, right=0.95)
        ends = []
        axes.set_xscale("log", base=2)
        for row in reversed(board.rows):
            look, e = style[row.label], row.estimate
            x = max(1.0, row.count("state_bytes"))
            if e.low is not None and e.high is not None:
                axes.plot([x, x], [e.low, e.high], color=look.light, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
            axes.plot(
                x,
                e.mean,
                look.marker,
                color=look.light,
                markersize=9 * SIZES.get(look.marker, 1),
                markeredgecolor=PAPER,
            )
            ends.append((row.label, x, e.mean, look))
        means = [row.estimate.mean for row in board.rows]
        pad = 0.35 * (max(means) - min(means)) or 0.05 * abs(means[0]) or 1
        bar = [] if board.bar is None or not _near(board.bar.value, means) else [board.bar.value]
        axes.set_ylim(min(means + bar) - pad, max(means + bar) + pad)
        low, high = axes.get_xlim()
        axes.set_xlim(low / 1.3, high * 2.2)  # room for labels
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, "B", 1024)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        grid(axes)
        axes.set_xlabel("state after one training window, for one sequence (float32)")
        axes.set_title(f"test, {board.unit}", loc="left")
        _draw_bar(axes, board, at=0.995)
        label_ends(canvas, axes, ends)
        caption = (
            "What must be kept to go on, against quality: low and left is good. Whiskers are the table's intervals, "
            "cut off where they leave the figure."
        )
        return _save(canvas, "quality_state", "Quality against state", caption, style)


def _drift(board: Board, style: dict[str, Look]) -> Picture | None:
    """Two-pass models: how far the decoder's memory is from the prefiller's, fed the prefiller's or its own."""
    rows = [row for row in board.rows if all("drift" in run.record for run in row.entry.runs)]
    if not rows:
        return None
    with theme():
        canvas, axes = figure(10.4, 4.1, right=0.82)
        ends = []
        for row in rows:
            look, records = style[row.label], [run.record["drift"] for run in row.entry.runs]
            edges = np.array(records[0]["edges"], dtype=float)
            middles = np.sqrt(np.maximum(edges[:-1], 1) * edges[1:])
            for name, dashes in (("recurrent", (1, 0)), ("teacher_forced", (3, 2))):
                curves = np.array([record[name] for record in records])
                axes.plot(middles, curves.mean(0), color=look.light, linewidth=1.8, dashes=dashes)
                if name == "recurrent":
                    axes.fill_between(middles, curves.min(0), curves.max(0), color=look.light, alpha=0.16, linewidth=0)
                    ends.append((row.label, middles[-1], float(curves.mean(0)[-1]), look))
        length = rows[0].entry.runs[0].record["drift"]["train_length"]
        axes.axvline(length, color=MUTED, linewidth=1.1, dashes=(4, 3))
        axes.annotate(
            "training length", (length, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
            textcoords="offset points", color=MUTED, fontsize=8.5,
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        grid(axes)
        axes.set_xlabel("position in the text, tokens")
        axes.set_title("distance from the prefiller's memory, RMS (of at most 2)", loc="left")
        label_ends(canvas, axes, ends)
        caption = (
            "Solid: the memory that the deployed decoder feeds itself. Dashed: the decoder's memory when it is fed the "
            "prefiller's, as in training. Mean over seeds; the band spans all of them."
        )
        return _save(canvas, "drift", "Drift of the memory", caption, style)


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


def _near(value: float, others: Sequence[float]) -> bool:
    """Would showing ``value`` leave the others room enough to be told apart?"""
    spread = max(others) - min(others)
    return min(others) - 0.6 * spread <= value <= max(others) + 0.6 * spread


def _y_limits(axes: Axes, curves: Sequence[Curve], board: Board) -> None:
    """The first half of training is steep and tells little: it may leave the figure at the top."""
    late = [c.high[np.flatnonzero(c.x >= 0.45 * c.x[-1])[0] :].max() for c in curves]
    ends = [float(c.mean[-1]) for c in curves]
    low, high = min(float(c.low.min()) for c in curves), max(late)
    if board.bar is not None and _near(board.bar.value, [*ends, high]):
        low, high = min(low, board.bar.value), max(high, board.bar.value)
    pad = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - pad, high + pad)


def _draw_bar(axes: Axes, board: Board, at: float) -> None:
    """The yardstick, where the axis reaches it; a word at the edge where it does not."""
    if board.bar is None:
        return
    low, high = axes.get_ylim()
    value, place = board.bar.value, {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    if low <= value <= high:
        axes.axhline(value, color=MUTED, linewidth=1.1, dashes=(4, 3))
        text, y = f"{board.bar.name}  {value:.3f}", value
    else:
        below = value < low
        text, y = f"{board.bar.name} {value:.3f}, {'below' if below else 'above'} this axis", low if below else high
    axes.annotate(text, (at, y), xytext=(0, 4), ha="left" if at < 0.5 else "right", color=MUTED, fontsize=8.5, **place)  # type: ignore[arg-type]


def _save(figure: Figure, name: str, title: str, caption: str, style: dict[str, Look]) -> Picture:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=170, facecolor=PAPER, metadata={"Software": None})
    figure.patch.set_alpha(0)
    with matplotlib.rc_context({"svg.hashsalt": name}):  # equal runs, equal bytes
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return Picture(name, title, caption, png.getvalue(), for_page(svg.getvalue(), name, title, style))
