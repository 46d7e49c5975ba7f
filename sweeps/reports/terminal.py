"""The leaderboard in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweeps.reports.format import decimals, duration, half, over, si
from sweeps.reports.table import Board, Row

COSTS = ("tok/s", "state", "params")
"""Columns for which a narrow terminal has no room, the last first; params are without embeddings."""

STYLES = {"better": "green", "worse": "red"}


def show(board: Board, folder: Path, console: Console | None = None) -> None:
    """Table, yardstick, warnings, and where the page is."""
    console = console or Console()
    title = f"{board.study}: {board.metric}, {board.unit}, 95 % intervals over {over(board)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("mixer", no_wrap=True)
    table.add_column("mean ±95 %", no_wrap=True)
    table.add_column("n", justify="right")
    table.add_column(f"minus {board.reference}", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    costs = COSTS if console.width >= 100 else COSTS[:1]
    for name in costs:
        table.add_column(name, justify="right", no_wrap=True)
    digits = decimals(board)
    for row in board.rows:
        table.add_row(*_cells(row, digits)[: 5 + len(costs)])
        for other in row.others:
            muted = (f"  {other.mode}", half(other.estimate, digits), "", "", "not deployed")
            table.add_row(*(Text(word, "dim") for word in muted))
    console.print(table)
    if board.bar is not None:
        beaten = [row.label for row in board.rows if row.beats_yardstick]
        who = ", ".join(beaten) or "no mixer"
        console.print(
            Text(f"yardstick: {board.bar.name} {board.bar.value:.{digits}f}; beaten by {who}"), soft_wrap=True
        )
    from sweeps.reports.wording import open_questions  # which takes its numbers' form from here

    for text in open_questions(board):
        console.print(Text(f"? {text}", "cyan"), soft_wrap=True)
    for warning in board.warnings:
        console.print(Text(f"! {warning}", "yellow"), soft_wrap=True)
    for name, state, why in board.unfinished:
        console.print(Text(f"! {name}: {state} ({why})", "yellow"), soft_wrap=True)
    proof = board.proof
    equal = f"comparison key {proof.comparison_key}, shared code {proof.shared_code}, data {proof.fingerprint}"
    made = f"{len(board.all_runs)} runs, {duration(board.seconds)} of training"
    console.print(Text(f"nothing but the mixer differed: {equal}; {made}", "dim"), soft_wrap=True)
    console.print(Text(str(folder / "report.html")), soft_wrap=True)


def _cells(row: Row, digits: int) -> list[Text]:
    c = row.comparison
    difference = half(c.shown, digits, sign=True) if c and c.shown else ""
    verdict = "reference" if c is None else c.verdict.partition(":")[0]
    rate = row.tokens_per_s
    return [
        Text(row.label, "bold"),
        Text(half(row.estimate, digits)),
        Text(str(row.estimate.n)),
        Text(difference),
        Text(verdict, STYLES.get(verdict, "dim")),
        Text("" if rate is None else si(rate)),
        Text(si(row.count("state_bytes"), "B", 1024)),
        Text(si(row.count("params_non_embedding"))),
    ]
