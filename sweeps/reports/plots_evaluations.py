"""Figures of evaluations, one for each suite that has curves: of its first table, which is that of most mixers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from evals.names import split
from sweeps.reports.compare import Estimate, over_seeds
from sweeps.reports.drawing import MUTED, PAPER, SIZES, Picture, beside, figure, grid, label_ends, panels, save, theme
from sweeps.reports.evaluations import Cell, Line, Table
from sweeps.reports.format import si
from sweeps.reports.style import Look

PREFIX = "evaluation_"
LEFT = 0.014
"""Share of a figure's width that long numbers need beside what an axis leaves them."""


@dataclass(frozen=True)
class Panel:
    """One metric over one label."""

    metric: str
    label: str
    title: str
    axis: str
    logarithmic: bool = True


PANELS = {
    "extrapolation": [
        Panel("loss", "length", "nats per token, all positions", "length, tokens"),
        Panel("last", "length", "nats per token, last training length", "length, tokens"),
        Panel("gain", "length", "the same, minus without what lies before", "length, tokens"),
    ],
    "niah": [
        Panel("accuracy", "length", "accuracy", "length of the prompt, tokens"),
        Panel("exact", "length", "said in full", "length of the prompt, tokens"),
    ],
    "information": [
        Panel("retained/frozen", "compute", "retained, the run's own weights", "share of the decoder's training", False),
        Panel("retained/end_to_end", "compute", "retained, trained end to end", "share of the decoder's training", False),
    ],
    "fredholm": [
        Panel("index", "layer", "Fredholm index, mean over filters", "layer", False),
        Panel("initial_index", "layer", "the same before training", "layer", False),
        Panel("autoencoder_index", "layer", "trained to rebuild the input", "layer", False),
    ],
}  # fmt: skip
SPEED = [
    ("prefill_tokens_per_s", min, "prefill, tokens per second"),
    ("decode_tokens_per_s", min, "decoding, tokens per second"),
    ("decode_tokens_per_s", max, "decoding side by side, tokens per second"),
    ("state_bytes", min, "state"),
]
"""Column of the table's rows, which of its batches, title."""

TITLES = {
    "positions": "Difference by position",
    "extrapolation": "Loss against length",
    "niah": "Needles found",
    "information": "Retained share",
    "fredholm": "Index by layer",
    "mesa": "Loss against solver steps",
    "speed": "Speed against context",
}
NAMES = {f"{PREFIX}{suite}" for suite in TITLES}


def pictures(tables: Sequence[Table], style: dict[str, Look]) -> list[Picture]:
    """All figures that the tables have the numbers for."""
    draw: dict[str, Callable[[Table, dict[str, Look]], Picture | None]] = {
        **dict.fromkeys(PANELS, _panels), "positions": _positions, "mesa": _mesa, "speed": _speed
    }  # fmt: skip
    first: dict[str, Table] = {}
    for table in tables:
        first.setdefault(table.suite, table)
    found = [draw[suite](table, style) for suite, table in first.items() if suite in draw]
    return [picture for picture in found if picture is not None]


def _shown(lines: Sequence[Line], style: dict[str, Look]) -> dict[str, Look]:
    return {line.label: style[line.label] for line in lines}


def _by_length(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick at each of the values, or of every second or third where there are many."""
    axes.set_xscale("log", base=2)
    _ticks(axes, values)


def _ticks(axes: Axes, values: Sequence[float]) -> None:
    ticks = sorted(set(values))
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 8)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


Point = tuple[float, float, float, float]
"""Where, the mean, and both ends of the band: of figures over seeds the seeds' own range."""


def _point(x: float, cell: Cell) -> Point:
    return x, cell.estimate.mean, min(cell.values), max(cell.values)


def _curve(axes: Axes, look: Look, points: Sequence[Point], *, solid: bool = True) -> None:
    x, mean, low, high = zip(*points, strict=True)
    axes.plot(
        x, mean, color=look.light, linewidth=1.7, dashes=(1, 0) if solid else (3, 2), marker=look.marker,
        markersize=6.2 * SIZES.get(look.marker, 1), markeredgecolor=PAPER, markeredgewidth=0.6,
    )  # fmt: skip
    if low != high:
        axes.fill_between(x, low, high, color=look.light, alpha=0.13, linewidth=0)


def _finish(axes: Axes, title: str, axis: str) -> None:
    """Rules and words; values that differ little have long numbers, which need room at the left."""
    grid(axes)
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    place = axes.get_position()
    axes.set_position((place.x0 + LEFT, place.y0, place.width - LEFT, place.height))


def _over(lines: Sequence[Line]) -> str:
    several = any(len(line.runs) > 1 for line in lines)
    return "Mean over seeds, the band spans all of them." if several else "One seed."


# ---- metrics by a label ----------------------------------------------------------------------------------------------


def _points(line: Line, panel: Panel) -> list[Point]:
    out = []
    for metric, cell in line.cells.items():
        name, labels = split(metric)
        if name == panel.metric and list(labels) == [panel.label]:
            out.append(_point(float(labels[panel.label]), cell))
    return sorted(out)


def _panels(table: Table, style: dict[str, Look]) -> Picture | None:
    lines = [line for line in table.deployed() if line.cells]
    there = [panel for panel in PANELS[table.suite] if any(_points(line, panel) for line in lines)]
    if not there:
        return None
    drawn = [line for line in lines if any(_points(line, panel) for panel in there)]
    with theme():
        canvas, all_axes = panels(len(there), min(2, len(there)), _shown(drawn, style), height=3.7)
        for panel, axes in zip(there, all_axes, strict=True):
            points = {line.label: _points(line, panel) for line in drawn}
            for label, found in reversed(points.items()):
                if found:
                    _curve(axes, style[label], found)
            x = [point[0] for found in points.values() for point in found]
            (_by_length if panel.logarithmic else _ticks)(axes, x)
            _finish(axes, panel.title, panel.axis)
            if table.suite == "extrapolation":
                _mark(axes, min(x))
            if table.suite == "niah":
                axes.set_ylim(-0.03, max(0.2, axes.get_ylim()[1]))
            if (chance := lines[0].results[0]["tables"].get("chance")) is not None and panel.metric == "accuracy":
                axes.axhline(chance, color=MUTED, linewidth=1.1, dashes=(4, 3))
        alike = [axes for panel, axes in zip(there, all_axes, strict=True) if panel.metric != "gain"]
        low, high = zip(*(axes.get_ylim() for axes in alike), strict=True)
        for axes in alike:
            axes.set_ylim(min(low), max(high))
        caption = (
            _over(drawn)
            + {
                "extrapolation": " The dashed line is the training length. What a mixer cannot read is not drawn.",
                "niah": " The dashed line is chance.",
                "information": " 0: the vector says no more than the unigram; 1: it says all.",
                "fredholm": " 0: the filter has a stable inverse; below: what it loses for ever, in tokens of delay.",
            }[table.suite]
        )
        title = TITLES[table.suite]
        return save(canvas, f"{PREFIX}{table.suite}", title, caption, style)


def _mark(axes: Axes, length: float) -> None:
    axes.axvline(length, color=MUTED, linewidth=1.1, dashes=(4, 3))


# ---- positions -------------------------------------------------------------------------------------------------------


def paired_by_place(line: Line, reference: Line) -> list[Estimate] | None:
    """The difference to the reference in each range of positions: of each sequence the mean over the seeds that both have,
    then Student's t over sequences. None where the two were not cut alike."""
    theirs = {run.seeds: one["tables"] for run, one in zip(reference.runs, reference.results, strict=True)}
    gaps = []
    for run, one in zip(line.runs, line.results, strict=True):
        mine, other = one["tables"], theirs.get(run.seeds)
        if other is None:
            continue
        a, b = (np.array(tables.get("sequences", []), dtype=np.float64) for tables in (mine, other))
        if a.shape != b.shape or a.size == 0 or mine["edges"] != other["edges"]:
            return None
        gaps.append(a - b)
    if not gaps:
        return None
    gap_NR = np.mean(gaps, axis=0)
    columns = [column[~np.isnan(column)] for column in gap_NR.T]
    return [over_seeds(column) for column in columns] if all(len(column) > 1 for column in columns) else None


def _positions(table: Table, style: dict[str, Look]) -> Picture | None:
    lines = {line.label: line for line in table.deployed() if line.cells}
    reference = lines.pop(table.reference, None)
    if reference is None:
        return None
    found = {label: gaps for label, line in lines.items() if (gaps := paired_by_place(line, reference))}
    if not found:
        return None
    edges = np.array(reference.results[0]["tables"]["edges"], dtype=float)
    middles = np.sqrt(np.maximum(edges[:-1], 1) * edges[1:])
    with theme():
        canvas, axes = figure(10.4, 4.3, right=beside([*found, table.reference]))
        ends = []
        for label, gaps in reversed(found.items()):
            bands = [e.ci95 or [e.mean, e.mean] for e in gaps]
            points = [(x, e.mean, *band) for x, e, band in zip(middles.tolist(), gaps, bands, strict=True)]
            _curve(axes, style[label], points)
            ends.append((label, middles[-1], gaps[-1].mean, style[label]))
        axes.plot(middles[[0, -1]], [0, 0], color=style[table.reference].light, linewidth=1.7)
        ends.append((table.reference, middles[-1], 0.0, style[table.reference]))
        _by_length(axes, (2.0 ** np.arange(0, np.log2(edges[-1]) + 1e-9)).tolist())
        _finish(axes, f"nats per token, minus {table.reference}", "position in the text, tokens")
        label_ends(canvas, axes, ends)
        n = len(reference.results[0]["tables"]["sequences"])
        caption = (
            f"Below 0 is better than {table.reference}. Of each text the mean over seeds; the band is the 95 % interval over {n} "
            "paired texts: the chance of other texts, not of other seeds. Positions are binned."
        )
        return save(canvas, f"{PREFIX}positions", TITLES["positions"], caption, style)


# ---- Mesa's solver ---------------------------------------------------------------------------------------------------


def _mesa(table: Table, style: dict[str, Look]) -> Picture | None:
    """Two ways to stop, by a number of steps and by a residual: loss over the steps that were taken, minus that of the
    same run with most of them, since seeds differ by more than steps do."""
    lines = [line for line in table.deployed() if line.cells]
    found = {
        (line.label, way): points
        for line in lines
        for way in ("cg_steps", "tol")
        if (points := _points_of_steps(line, way))
    }
    if not found:
        return None
    with theme():
        canvas, axes = figure(10.4, 4.3, right=beside([line.label for line in lines]))
        ends = []
        for (label, way), points in found.items():
            _curve(axes, style[label], points, solid=way == "cg_steps")
            if way == "cg_steps":
                ends.append((label, *points[-1][:2], style[label]))
        axes.set_xscale("symlog", linthresh=1, linscale=0.6)
        axes.set_xlim(-0.1, 1.1 * max(points[-1][0] for points in found.values()))
        _ticks(axes, [step for step in (0, 1, 2, 5, 10, 20, 50, 100) if step <= axes.get_xlim()[1]])
        _finish(
            axes, "nats per token, minus those with the most steps", "solver steps a token, mean over heads and layers"
        )
        if ends:
            label_ends(canvas, axes, ends)
        caption = (
            f"{_over(lines)} Solid: a fixed number of steps, 0 being gated linear attention. Dashed: steps until the residual is "
            "small enough."
        )
        return save(canvas, f"{PREFIX}mesa", TITLES["mesa"], caption, style)


def _points_of_steps(line: Line, way: str) -> list[Point]:
    """(steps, loss minus the same run's with the most steps) at each setting of one way to stop."""
    most = max(
        (m for m in line.cells if m.startswith("loss/cg_steps=")), key=lambda m: int(m.partition("=")[2]), default=""
    )
    out = []
    for metric, cell in line.cells.items():
        name, labels = split(metric)
        taken = line.cells.get(f"steps/{way}={labels.get(way)}")
        if name == "loss" and list(labels) == [way] and taken is not None and most:
            base = line.cells[most]
            gaps = [
                value - base.values[base.runs.index(run)] for run, value in zip(cell.runs, cell.values, strict=True)
            ]
            out.append((taken.estimate.mean, fmean(gaps), min(gaps), max(gaps)))
    return sorted(out)


# ---- speed -----------------------------------------------------------------------------------------------------------


def _speed(table: Table, style: dict[str, Look]) -> Picture | None:
    lines = [line for line in table.deployed() if any(one["tables"]["rows"] for one in line.results)]
    batches = {row["batch"] for line in lines for one in line.results for row in one["tables"]["rows"]}
    if not batches:
        return None
    several = len(batches) > 1
    wanted = [(column, pick(batches), title) for column, pick, title in SPEED if several or pick is min]
    with theme():
        canvas, all_axes = panels(len(wanted), 2, _shown(lines, style), height=3.5)
        for (column, batch, title), axes in zip(wanted, all_axes, strict=True):
            x: list[float] = []
            for line in reversed(lines):
                curves = _rates(line, column, batch)
                most = max(curves, key=lambda steps: steps or 0, default=None)
                for steps, points in curves.items():
                    _curve(axes, style[line.label], points, solid=steps == most)
                    x += [point[0] for point in points]
            axes.set_yscale("log")
            _by_length(axes, x)
            _finish(axes, f"{title}, batch {batch}", "context, tokens")
            _rules(axes, column)
        caption = (
            "Mean over runs, the band spans all of them. Measured with this project's forms on this hardware; other hardware gives other ratios. Mesa: "
            "solid with the most solver steps, dashed with fewer."
        )
        return save(canvas, f"{PREFIX}speed", TITLES["speed"], caption, style)


def _rates(line: Line, column: str, batch: int) -> dict[int | None, list[Point]]:
    """Solver steps (None where there are none) -> a point for each context."""
    found: dict[int | None, dict[int, list[float]]] = {}
    for one in line.results:
        for row in one["tables"]["rows"]:
            if row["batch"] == batch:
                found.setdefault(row["cg_steps"], {}).setdefault(row["context"], []).append(row[column])
    return {
        steps: [(float(context), fmean(values), min(values), max(values)) for context, values in sorted(by_context.items())]
        for steps, by_context in found.items()
    }  # fmt: skip


def _rules(axes: Axes, column: str) -> None:
    """Round values on a logarithmic axis, six at most."""
    in_bytes = column.endswith("_bytes")
    unit, base = ("B", 1024) if in_bytes else ("", 1000)
    low, high = axes.get_ylim()
    steps = [2.0**k for k in range(60)] if in_bytes else [m * 10.0**k for k in range(15) for m in (1, 3)]
    inside = [step for step in steps if low <= step <= high]
    axes.yaxis.set_major_locator(FixedLocator(inside[:: -(-len(inside) // 6)] or [low, high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, unit, base)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
