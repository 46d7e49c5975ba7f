"""The command line: `python -m evals.speed [ops|models|decode|loop] [key=value ...]`."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runs.cli import patient_threads
from runs.validate import ConfigError, command_line

patient_threads()  # as train.py has them; it must be set before torch is imported

SUITES = ("ops", "models", "decode", "loop")


@dataclass
class Command:
    """The command line: key=value."""

    only: str = ""  # part of a measurement's name
    repeats: int = 7
    threads: int | None = None
    out: str = "results/speed"


def ratios(rows: list[Any], title: str) -> Table:
    """A table of `measure.Row`."""
    table = Table(title=title, show_lines=True)
    table.add_column("ours, against its peer")
    for column in ("ratio", "asked", "ms: ours, peer"):
        table.add_column(column, justify="right")
    for row in rows:
        met = "green" if row.ratio >= row.goal else "red"
        table.add_row(
            f"{row.name}, against {row.peer}\n[dim]{row.setting}[/]",
            f"[{met}]{row.ratio:.2f}[/]\n[dim]{row.low:.2f} to {row.high:.2f}[/]",
            f"{row.goal:.2f}",
            f"{row.ours_ms:.3g}\n{row.peer_ms:.3g}",
        )
    return table


def exponents(curves: list[Any]) -> Table:
    """A table of `measure.Curve`."""
    table = Table(title="ms of forward + backward at each length T")
    table.add_column("operation", no_wrap=True)
    for steps in curves[0].lengths:
        table.add_column(str(steps), justify="right")
    table.add_column("exponent", justify="right")
    table.add_column("at most", justify="right")
    for curve in curves:
        met = "green" if curve.exponent <= curve.goal else "red"
        cells = [f"{ms:.3g}" for ms in curve.ms]
        table.add_row(curve.name, *cells, f"[{met}]{curve.exponent:.2f}[/]", f"{curve.goal:.1f}")
    return table


def decoding(rows: list[Any]) -> Table:
    """A table of `decode.DecodeRow`."""
    table = Table(title="decoding one token, batch 1: ms after so many tokens")
    table.add_column("mixer")
    for position in rows[0].positions:
        table.add_column(f"{position}", justify="right")
    table.add_column("last / first", justify="right")
    table.add_column("state, KiB", justify="right")
    for row in rows:
        kept = ", ".join(f"{b / 1024:.0f}" for b in dict.fromkeys(row.state_bytes))
        table.add_row(row.name, *(f"{ms:.3g}" for ms in row.ms), f"{row.growth:.2f}", kept)
    return table


def plot(curves: list[Any], path: Path) -> None:
    """Time against length, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, curve in enumerate(curves):
        style = "-" if i < 10 else "--"
        axes.plot(curve.lengths, curve.ms, style, marker="o", ms=3, label=f"{curve.name}: {curve.exponent:.2f}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(curves[0].lengths, [str(t) for t in curves[0].lengths])
    axes.set(xlabel="tokens", ylabel="ms, forward + backward", title="cost against length (label: exponent)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run(suite: str, command: Command, console: Console, out: Path) -> dict[str, Any]:
    """Measure and show one suite; what goes into its JSON."""
    from evals.speed import decode, loop, models, ops

    title = "peer's time / our time: above 1, ours is faster"
    found: dict[str, Any] = {}
    with console.status(f"measuring {suite}"):
        if suite == "decode":
            rows: list[Any] = list(decode.rows(command.repeats, command.only))
        else:
            module = {"ops": ops, "models": models, "loop": loop}[suite]
            rows = list(module.rows(command.repeats, command.only))
        curves = list(ops.curves(command.repeats, command.only)) if suite == "ops" else []
    if rows:
        console.print(decoding(rows) if suite == "decode" else ratios(rows, title))
        found["rows"] = [asdict(row) for row in rows]
    if curves:
        console.print(exponents(curves))
        found["curves"] = [asdict(curve) for curve in curves]
        plot(curves, out / "length.png")
    return found


def main(arguments: list[str]) -> int:
    """Measure, show, write the JSON."""
    logging.basicConfig(level=logging.WARNING)
    console = Console()
    suites = [word for word in arguments if word in SUITES] or list(SUITES)
    try:
        command = command_line(Command, [word for word in arguments if word not in SUITES])
    except ConfigError as error:
        console.print(f"{error}. Suites: {', '.join(SUITES)}", style="red")
        return 1
    import torch

    from runs.host import git_commit, processor

    threads = command.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    root, out = Path(__file__).resolve().parents[2], Path(command.out)
    out.mkdir(parents=True, exist_ok=True)
    host = {"cpu": processor(), "threads": threads, "torch": str(torch.__version__), "commit": git_commit(root)}
    for suite in suites:
        found = run(suite, command, console, out)
        path = out / f"{suite}.json"
        path.write_text(json.dumps({"host": host, "repeats": command.repeats, **found}, indent=1))
        console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
