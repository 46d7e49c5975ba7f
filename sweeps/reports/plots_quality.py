"""Quality against what it costs to keep and to store, and by parts of a task's test split."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from sweeps.reports.drawing import MUTED, PAPER, SIZES, Picture, figure, grid, label_ends, panels, save, theme
from sweeps.reports.format import si
from sweeps.reports.slices import METRICS, Slice
from sweeps.reports.style import Look
from sweeps.reports.table import Board

COSTS = {
    "state": ("state_bytes", "B", 1024, "state after one training window, for one sequence (float32)"),
    "params": ("params_non_embedding", "", 1000, "parameters without embeddings"),
}
CAPTIONS = {
    "state": "What must be kept to go on, against quality: {good} is good. Whiskers are the table's intervals, cut off where "
    "they leave the figure.",
    "params": "Mixers of equal size stand above each other; where they do not, part of a difference is size. Whiskers as "
    "before.",
}
TITLES = {"state": "Quality against state", "params": "Quality against parameters"}


def against(board: Board, style: dict[str, Look], what: str) -> Picture:
    """One point for each mixer: the table's metric over ``state`` or ``params``."""
    count, unit, base, label = COSTS[what]
    wide = what == "state"
    with theme():
        canvas, axes = figure(10.4, 4.1, right=0.95)
        ends = []
        axes.set_xscale("log", base=2 if wide else 10)
        for row in reversed(board.rows):
            look, e = style[row.label], row.estimate
            x = max(1.0, row.count(count))
            if e.low is not None and e.high is not None:
                axes.plot([x, x], [e.low, e.high], color=look.light, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
            size = 9 * SIZES.get(look.marker, 1)
            axes.plot(x, e.mean, look.marker, color=look.light, markersize=size, markeredgecolor=PAPER)
            ends.append((row.label, x, e.mean, look))
        means = [row.estimate.mean for row in board.rows]
        pad = 0.35 * (max(means) - min(means)) or 0.05 * abs(means[0]) or 1
        bar = [] if board.bar is None or not near(board.bar.value, means) else [board.bar.value]
        axes.set_ylim(min(means + bar) - pad, max(means + bar) + pad)
        counts = [max(1.0, row.count(count)) for row in board.rows]
        low, high = min(counts), max(counts)
        room = (high / low) ** 0.12 * 1.06  # on both sides; names stand to the right of their points
        axes.set_xlim(low / room, high * room**2.6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, unit, base)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if not wide:
            axes.set_xticks(_ticks(*axes.get_xlim()))
        axes.minorticks_off()
        grid(axes)
        axes.set_xlabel(label)
        axes.set_title(f"test, {board.unit}", loc="left")
        draw_bar(axes, board, at=0.995)
        label_ends(canvas, axes, ends)
        good = "low and left" if board.lower_is_better else "high and left"
        return save(canvas, f"quality_{what}", TITLES[what], CAPTIONS[what].format(good=good), style)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round values, also where the axis spans a few per cent only."""
    from matplotlib.ticker import MaxNLocator

    if high / low < 8:
        return [float(t) for t in MaxNLocator(7).tick_values(low, high) if low <= t <= high]
    steps = [m * 10.0**k for k in range(15) for m in (1, 2, 5)]
    return [t for t in steps if low <= t <= high]


def near(value: float, others: Sequence[float]) -> bool:
    """Would showing ``value`` leave the others room enough to be told apart?"""
    spread = max(others) - min(others)
    return min(others) - 0.6 * spread <= value <= max(others) + 0.6 * spread


def draw_bar(axes: Axes, board: Board, at: float) -> None:
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
    ha = "left" if at < 0.5 else "right"
    axes.annotate(text, (at, y), xytext=(0, 4), ha=ha, color=MUTED, fontsize=8.5, **place)  # type: ignore[arg-type]


# ---- slices ----------------------------------------------------------------------------------------------------------


def by_slice(board: Board, style: dict[str, Look]) -> Picture | None:
    """One small figure for each slice of a task's test split; None where there is none."""
    found = board.slices
    if not found:
        return None
    with theme():
        columns = min(3, max(2, len(found)))
        canvas, all_axes = panels(len(found), columns, style, height=3.4)
        low, high = _slice_limits(found)
        for one, axes in zip(found, all_axes, strict=True):
            _draw_slice(axes, one, board, style)
            axes.set_ylim(low, high)
            grid(axes)
            axes.set_title(one.name, loc="left")
        metric, chance = METRICS[found[0].metric], found[0].chance
        known = "" if chance is None else f" The dashed line is chance over the whole split, {chance:.3g}."
        several = max(row.estimate.n for row in board.rows) > 1
        over = "mean with 95 % interval over seeds" if several else "one seed"
        caption = f"{metric.capitalize()} by part of the test split, {over}.{known}"
        return save(canvas, "slices", "Where they succeed", caption, style)


def _slice_limits(found: Sequence[Slice]) -> tuple[float, float]:
    """Common to all slices; of accuracies from 0 to 1."""
    if found[0].metric == "accuracy":
        return -0.03, 1.05
    means = [e.mean for one in found for values in one.by_mixer.values() for e in values if e is not None]
    return min(0.0, *means) - 0.03 * max(means), 1.08 * max(means)


def _draw_slice(axes: Axes, one: Slice, board: Board, style: dict[str, Look]) -> None:
    """Labels are numbers of no common scale (gaps of 1, 2, 4, 8, ...): evenly spaced, in order."""
    for row in reversed(board.rows):
        look = style[row.label]
        points = [(x, e) for x, e in enumerate(one.by_mixer[row.label]) if e is not None]
        if not points:
            continue
        x, known = zip(*points, strict=True)
        axes.plot(x, [e.mean for e in known], color=look.light, linewidth=1.6, marker=look.marker, markersize=6, markeredgecolor=PAPER, markeredgewidth=0.6)  # fmt: skip
        if all(e.low is not None for e in known):
            axes.fill_between(x, [e.low for e in known], [e.high for e in known], color=look.light, alpha=0.13, linewidth=0)  # fmt: skip
    if one.chance is not None:
        axes.axhline(one.chance, color=MUTED, linewidth=1.1, dashes=(4, 3))
    every = -(-len(one.labels) // 8)
    axes.set_xticks(range(0, len(one.labels), every), [str(v) for v in one.labels[::every]])
    axes.set_xlim(-0.3, len(one.labels) - 0.7)
