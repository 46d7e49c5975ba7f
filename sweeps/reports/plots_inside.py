"""Loss and memory by place in the text, and what goes on inside the mixers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sweeps.reports.diagnostics import Finding, findings
from sweeps.reports.drawing import (
    MUTED,
    PAPER,
    RULE,
    SIZES,
    Picture,
    beside,
    figure,
    grid,
    label_ends,
    panels,
    save,
    theme,
)
from sweeps.reports.style import Look
from sweeps.reports.table import Board


def _middles(edges: Sequence[float]) -> np.ndarray:
    """(n,) geometric middles of (n + 1,) edges: the axis is logarithmic."""
    array = np.array(edges, dtype=float)
    return np.sqrt(np.maximum(array[:-1], 1) * array[1:])


def _by_place(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    grid(axes)
    axes.set_xlabel("position in the text, tokens")


def _mark_length(axes: Axes, length: float) -> None:
    axes.axvline(length, color=MUTED, linewidth=1.1, dashes=(4, 3))
    axes.annotate(
        "training length", (length, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", color=MUTED, fontsize=8.5,
    )  # fmt: skip


def drift(board: Board, style: dict[str, Look]) -> Picture | None:
    """Two-pass models: how far the decoder's memory is from the prefiller's, fed the prefiller's or its own."""
    rows = [row for row in board.rows if all("drift" in run.record for run in row.entry.runs)]
    if not rows:
        return None
    with theme():
        canvas, axes = figure(10.4, 4.1, right=beside(row.label for row in rows))
        ends = []
        for row in rows:
            look, records = style[row.label], [run.record["drift"] for run in row.entry.runs]
            middles = _middles(records[0]["edges"])
            for name, dashes in (("recurrent", (1, 0)), ("teacher_forced", (3, 2))):
                curves = np.array([record[name] for record in records])
                axes.plot(middles, curves.mean(0), color=look.light, linewidth=1.8, dashes=dashes)
                if name == "recurrent":
                    axes.fill_between(middles, curves.min(0), curves.max(0), color=look.light, alpha=0.16, linewidth=0)
                    ends.append((row.label, middles[-1], float(curves.mean(0)[-1]), look))
        _mark_length(axes, rows[0].entry.runs[0].record["drift"]["train_length"])
        _by_place(axes)
        axes.set_ylim(bottom=0)
        axes.set_title("distance from the prefiller's memory, RMS (of at most 2)", loc="left")
        label_ends(canvas, axes, ends)
        caption = (
            "Solid: the memory that the deployed decoder feeds itself. Dashed: the decoder's memory when it is fed the "
            "prefiller's, as in training. Mean over seeds; the band spans all of them."
        )
        return save(canvas, "drift", "Drift of the memory", caption, style)


def by_position(board: Board, style: dict[str, Look]) -> Picture | None:
    """Loss by place in the text, where an evaluation measured it (the format: `sweeps.reports.collect.Run.positions`)."""
    found = [(row, [run.positions for run in row.entry.runs]) for row in board.rows]
    known = [(row, [one for one in records if one]) for row, records in found if all(records)]
    if not known:
        return None
    with theme():
        canvas, axes = figure(10.4, 4.3, right=beside(row.label for row, _ in known))
        ends = []
        for row, records in reversed(known):
            if any(record["edges"] != records[0]["edges"] for record in records):
                continue  # measured differently from seed to seed: no mean to draw
            look, middles = style[row.label], _middles(records[0]["edges"])
            curves = np.array([record["mean"] for record in records])
            if len(curves) > 1:
                axes.fill_between(middles, curves.min(0), curves.max(0), color=look.light, alpha=0.16, linewidth=0)
            axes.plot(middles, curves.mean(0), color=look.light, linewidth=1.8, marker=look.marker, markersize=6, markeredgecolor=PAPER, markeredgewidth=0.6)  # fmt: skip
            ends.append((row.label, middles[-1], float(curves.mean(0)[-1]), look))
        if not ends:
            return None
        length = board.runs[0].science.get("data.seq_len")
        if length and any(record["edges"][-1] > length for _, records in known for record in records):
            _mark_length(axes, length)
        _by_place(axes)
        axes.set_title("test, nats per token", loc="left")
        label_ends(canvas, axes, ends)
        caption = (
            "Who uses a long context goes on falling. Mean over seeds, the band spans all of them; positions are binned, "
            "each point stands in the middle of its bin."
        )
        return save(canvas, "positions", "Loss by position", caption, style)


# ---- diagnostics -----------------------------------------------------------------------------------------------------


def diagnostics(board: Board, style: dict[str, Look]) -> Picture | None:
    """A small figure for each thing that was looked at: layers from left to right, a dot for each head."""
    found = findings(board.rows)
    if not found:
        return None
    with theme():
        drawn = {label for one in found for label in one.by_mixer}
        shown = {label: look for label, look in style.items() if label in drawn}
        canvas, all_axes = panels(len(found), min(2, len(found)), shown, height=3.1)
        for one, axes in zip(found, all_axes, strict=True):
            _draw_finding(axes, one, board, style)
        caption = (
            "At the end of training, on the same few validation windows for all: a dot for each head, mean over seeds, mixers "
            "side by side in every layer in the order of the table. What a mixer does not have is not drawn."
        )
        return save(canvas, "diagnostics", "By layer and head", caption, style)


def _draw_finding(axes: Axes, one: Finding, board: Board, style: dict[str, Look]) -> None:
    labels = [row.label for row in board.rows if row.label in one.by_mixer]
    axes.margins(y=0.08)
    layers = max(len(heads) for heads in one.by_mixer.values())
    step = 0.8 / max(1, len(labels))
    if one.logarithmic:
        axes.set_yscale("log")
    for i, label in enumerate(labels):
        look = style[label]
        for layer, heads in enumerate(one.by_mixer[label]):
            x = layer - 0.4 + step * (i + 0.5)
            axes.plot([x] * len(heads), heads, look.marker, color=look.light, markersize=7 * SIZES.get(look.marker, 1), alpha=0.85, markeredgecolor=PAPER, markeredgewidth=0.6)  # fmt: skip
    if one.logarithmic:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="both", which="both", length=0, pad=6)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        grid(axes)
        axes.set_ylim(0, 1.06 * max(x for heads in one.by_mixer.values() for layer in heads for x in layer) or 1)
    axes.set_xticks(range(layers), [f"layer {layer}" for layer in range(layers)])
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_title(one.title, loc="left")
