"""How much each mixer's figure depends on what was tuned, as a rule the learning rate."""

from __future__ import annotations

from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from sweeps.reports.drawing import PAPER, SIZES, Picture, beside, figure, grid, label_ends, save, theme
from sweeps.reports.style import Look
from sweeps.reports.table import Board, Row


def _numeric(row: Row, key: str, lower: bool) -> list[tuple[float, float, bool]]:
    """(value of the key, validation, chosen?) of each trial that has a figure; of several, the best at each value."""
    best: dict[float, tuple[float, bool]] = {}
    for trial in row.entry.trials:
        x, y = trial.point.get(key), trial.value
        if isinstance(x, bool) or not isinstance(x, int | float) or x <= 0 or y is None:
            continue
        before = best.get(float(x))
        if before is None or trial.chosen or (not before[1] and (y < before[0]) == lower):
            best[float(x)] = (y, trial.chosen)
    return [(x, *best[x]) for x in sorted(best)]


def sensitivity(board: Board, style: dict[str, Look], key: str = "optimizer.lr") -> Picture | None:
    """Validation over the tuned learning rate; None where none was tuned."""
    found = {row.label: points for row in board.rows if len(points := _numeric(row, key, board.lower_is_better)) > 1}
    if not found:
        return None
    with theme():
        canvas, axes = figure(10.4, 4.1, right=beside(found))
        axes.set_xscale("log")
        ends = []
        for label, points in reversed(found.items()):
            look = style[label]
            x, y, _ = zip(*points, strict=True)
            axes.plot(x, y, color=look.light, linewidth=1.6, marker=look.marker, markersize=6)
            for a, b, one in points:
                if one:
                    size = 9.5 * SIZES.get(look.marker, 1)
                    axes.plot(a, b, look.marker, color=look.light, markersize=size, markeredgecolor=PAPER)
            ends.append((label, x[-1], y[-1], look))
        values = sorted(y for points in found.values() for _, y, _ in points)
        best = [min(y for _, y, _ in points) for points in found.values()]
        best = best if board.lower_is_better else [max(y for _, y, _ in points) for points in found.values()]
        spread = max(max(best) - min(best), 0.25 * (values[-1] - values[0])) or 0.1
        # A trial that went wrong must not flatten the others: it may leave the figure.
        low = values[0] if board.lower_is_better else max(values[0], min(best) - 2 * spread)
        high = min(values[-1], max(best) + 2 * spread) if board.lower_is_better else values[-1]
        axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
        tried = sorted({x for points in found.values() for x, _, _ in points})
        axes.xaxis.set_major_locator(FixedLocator(tried))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        grid(axes)
        axes.set_xlabel(key)
        axes.set_title(f"validation, {board.unit}", loc="left")
        label_ends(canvas, axes, ends)
        caption = (
            "Mean over the tuning seeds; large marks are what was chosen. A curve that still improves at an end of the grid "
            "was not tuned to its best."
        )
        return save(canvas, "sensitivity", "Sensitivity to the learning rate", caption, style)
