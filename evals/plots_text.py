"""Figures of how a model reads and how fast: positions, lengths, needles, numbers of examples, speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.drawing import DEPLOYED, MUTED, log_x, log_y, panels, plain
from evals.groups import GROUPS
from evals.positions import paired
from evals.shown import NATS, Draw, Shown, curve, middles, mixer_of

# ---- positions and lengths -------------------------------------------------------------------------------------------


def positions(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Loss at each position, mean of all so far, and the paired difference: to the reference of the suite, or of several
    runs on the same text to the first."""
    known = [one for one in shown if any(mode in one.tables for mode in one.content["modes"])]
    if not known:
        return {}
    gaps = _differences(known)
    figure, (row,) = panels(1, 3 if gaps else 2, width=4.4, height=3.6)
    for one in known:
        for number, mode in enumerate(one.content["modes"]):
            table, name = one.tables[mode], None if number == 0 else mode
            curve(row[0], one, middles(table["edges"]), table["mean"], name)
            curve(row[1], one, table["edges"][1:], table["so_far"], name, marker="")
    edges = known[0].tables[known[0].content["modes"][0]]["edges"]
    for axes, title in zip(row, ("at each position", "mean of all so far"), strict=False):
        log_x(axes, [2**k for k in range(edges[-1].bit_length())])
        plain(axes, title, "tokens read", NATS)
    for one, table, reference in gaps:
        x = middles(table["edges"])
        curve(row[2], one, x, table["mean"])
        low, high = ([float("nan") if v is None else v for v in table[name]] for name in ("low", "high"))
        row[2].fill_between(x, low, high, color=one.look.colour, alpha=0.14, linewidth=0)
        row[2].axhline(0, color=MUTED, linewidth=1)
        log_x(row[2], [2**k for k in range(edges[-1].bit_length())])
        plain(row[2], f"minus {reference}, 95 % over sequences", "tokens read", NATS)
    return {"": figure}


def _differences(known: Sequence[Shown]) -> list[tuple[Shown, dict[str, Any], str]]:
    """(run, its table of differences, name of the reference)."""
    stored = [(one, one.tables["difference"]) for one in known if "difference" in one.tables]
    if len({table["reference"] for _, table in stored}) == 1:
        return [(one, table, mixer_of(table["reference"])) for one, table in stored]
    first, out = known[0], []
    for one in known[1:]:
        own, other = (run.tables[run.content["modes"][0]] for run in (one, first))
        if one.data is None or one.data != first.data or len(own["sequences"]) != len(other["sequences"]):
            continue
        columns = zip(zip(*own["sequences"], strict=True), zip(*other["sequences"], strict=True), strict=True)
        pairs = [paired(a, b) for a, b in columns]
        out.append((one, {"edges": own["edges"], **{k: [pair[k] for pair in pairs] for k in ("mean", "low", "high")}}, first.label))  # fmt: skip
    return out


def extrapolation(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Over multiples of the training length: the loss of whole sequences, and what the longer context changes for the
    tokens of their last training length."""
    if all(value is None for one in shown for value in one.metrics.values()):
        return {}
    figure, (row,) = panels(1, 2, width=5.0, height=3.6)
    factors = sorted(set(shown[0].content["settings"]["factors"]))
    for one in shown:
        for number, mode in enumerate(one.content["modes"]):
            prefix, name = ("", None) if number == 0 else (f"{mode}/", mode)
            for axes, kind in zip(row, ("loss", "gain"), strict=True):
                start = f"{prefix}{kind}/length="
                found = {int(k.removeprefix(start)): v for k, v in one.metrics.items() if k.startswith(start)}
                if any(value is not None for value in found.values()):
                    curve(axes, one, factors, [found[length] for length in sorted(found)], name)
            gains = one.tables.get("gain", {})
            known = [(f, gains.get(f"{mode}/length={n}")) for f, n in zip(factors, sorted(found), strict=True)]
            wide = [(f, gain) for f, gain in known if gain is not None and gain["low"] is not None]
            low, high = ([gain[side] for _, gain in wide] for side in ("low", "high"))
            row[1].fill_between([f for f, _ in wide], low, high, color=one.look.colour, alpha=0.14, linewidth=0)
    row[1].axhline(0, color=MUTED, linewidth=1)
    for axes in row:
        log_x(axes, factors)
    plain(row[0], "whole sequences", "length, in training lengths", NATS)
    plain(row[1], "what lies further back changes", "length, in training lengths", f"{NATS}, minus the same at 1x")
    return {"": figure}


# ---- needles ---------------------------------------------------------------------------------------------------------


def niah(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Accuracy by depth and length, a panel for each run."""
    settings = shown[0].content["settings"]
    lengths, depths = settings["lengths"], settings["depths"]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    wide = max(3.2, 1.2 + 0.55 * len(lengths))
    figure, grid = panels(rows, columns, width=wide, height=max(2.6, 1.2 + 0.32 * len(depths)))
    for axes, one in zip((axes for row in grid for axes in row), [*shown, *[None] * (rows * columns)], strict=False):
        if one is None:
            axes.set_axis_off()
            continue
        cells = [[one.metrics.get(f"accuracy/length={n}/depth={d:g}") for n in lengths] for d in depths]
        axes.imshow(
            [[float("nan") if value is None else value for value in row] for row in cells],
            cmap="viridis", vmin=0, vmax=1, aspect="auto",
        )  # fmt: skip
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                colour = MUTED if value is None else "black" if value > 0.6 else "white"
                axes.text(j, i, "n/a" if value is None else f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8.5)  # fmt: skip
        plain(axes, one.label, "tokens of the prompt", "text before the needle")
        axes.grid(visible=False)
        axes.set_xticks(range(len(lengths)), [f"{n}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths])
    chance = shown[0].tables["chance"]
    figure.suptitle(
        f"share of needles found, {settings['samples']} in each cell; chance is {chance:.2g}",
        x=0.01, ha="left", fontsize=10, color=MUTED,
    )  # fmt: skip
    return {"": figure}


# ---- speed -----------------------------------------------------------------------------------------------------------

SPEEDS = {
    "prefill_tokens_per_s": ("prefill", "tokens per second"),
    "decode_tokens_per_s": ("decoding", "tokens per second"),
    "first_token_s": ("time to the first token", "seconds"),
    "state_bytes": ("state", "bytes"),
    "peak_bytes": ("peak memory of the device", "bytes"),
}


def speed(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Prefill, decoding, first token, state and (CUDA) peak memory over the context, a row of panels for each batch."""
    rows = [(one, row) for one in shown for row in one.tables["rows"]]
    if not rows:
        return {}
    batches = sorted({row["batch"] for _, row in rows})
    names = [name for name in SPEEDS if any(row[name] is not None for _, row in rows)]
    figure, grid = panels(len(batches), len(names), width=3.6, height=3.0)
    for batch, line in zip(batches, grid, strict=True):
        for name, axes in zip(names, line, strict=True):
            for one in shown:
                _speed_curves(axes, one, batch, name)
            log_x(axes, [row["context"] for _, row in rows])
            log_y(axes)
            title, unit = SPEEDS[name]
            plain(axes, f"{title}, batch {batch}", "tokens of context", unit)
    return {"": figure}


def _speed_curves(axes: Axes, one: Shown, batch: int, name: str) -> None:
    chosen = [row for row in one.tables["rows"] if row["batch"] == batch]
    steps = sorted({row["cg_steps"] for row in chosen}, key=lambda n: -(n or 0))
    for number, n in enumerate(steps):
        found = sorted((row["context"], row[name]) for row in chosen if row["cg_steps"] == n)
        label = one.label if n is None else f"{one.label}, {n} steps"
        curve(axes, one, [x for x, _ in found], [y for _, y in found], label=label, dashes=(DEPLOYED, (4, 2), (1, 1.5))[number % 3])  # fmt: skip


# ---- numbers of examples ---------------------------------------------------------------------------------------------


def downstream(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Scores over the number of examples in the prompt, a panel for each task, with the standard deviation over draws of
    the examples; {} where no task was asked with several numbers."""
    entries = {entry.task: entry for group in GROUPS.values() for entry in group if len(entry.shots) > 1}
    tasks = [task for task in entries if any(len(_shots(one, task)) > 1 for one in shown)]
    if not tasks:
        return {}
    columns = min(3, len(tasks))
    figure, grid = panels(-(-len(tasks) // columns), columns, width=4.2, height=3.2)
    cells = [axes for row in grid for axes in row]
    for axes in cells[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(cells, tasks, strict=False):
        metric = entries[task].metric
        for one in shown:
            numbers = _shots(one, task)
            start = [f"{task}/shots={n}/{metric}" for n in numbers]
            means = [one.metrics[name] for name in start]
            curve(axes, one, range(len(numbers)), means)
            for x, name, mean in zip(range(len(numbers)), start, means, strict=True):
                if mean is not None and (spread := one.metrics.get(f"{name}_std")) is not None:
                    axes.plot([x, x], [mean - spread, mean + spread], color=one.look.colour, linewidth=1.2, alpha=0.6)
            axes.set_xticks(range(len(numbers)), [f"{n}" for n in numbers])
        plain(axes, task, "examples in the prompt", str(metric).replace("_", " "))
    return {"fewshot": figure}


def _shots(one: Shown, task: str) -> list[int]:
    start = f"{task}/shots="
    return sorted(int(key.removeprefix(start)) for key in one.tables if key.startswith(start))


DRAW_TEXT: dict[str, Draw] = {
    "positions": positions,
    "extrapolation": extrapolation,
    "niah": niah,
    "speed": speed,
    "downstream": downstream,
}
