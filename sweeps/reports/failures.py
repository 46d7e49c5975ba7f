"""What did not go as it should: runs that failed, stopped or are missing, runs that diverged, loss spikes, lost trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from sweeps.reports.collect import Run
from sweeps.reports.tuning import Entry

STARTED_OVER = 3
"""Attempts from which on it is worth telling that a run was begun so often."""


@dataclass(frozen=True)
class Incident:
    """One thing that went wrong."""

    who: str  # a run's name, or a mixer where there is no run
    what: str  # failed, lost, preempted, missing, diverged, spikes, ...
    detail: str
    counts: bool  # is a figure of the table affected or lacking?


def incidents(runs: Sequence[Run], rows: Sequence[Entry], unfinished: Sequence[tuple[str, str, str]]) -> list[Incident]:
    """All of them: what is lacking first, then what stands in the table with a mark, then tuning runs."""
    inside = {run.name for row in rows for run in row.runs}
    out = [Incident(name, state, why, True) for name, state, why in unfinished]
    for run in sorted(runs, key=lambda run: run.name not in inside):
        where = "" if run.name in inside else "; a tuning run, or not in the table"
        if run.metrics.get("train/diverged"):
            detail = "its training loss ended half a nat or more above its own best"
            out.append(Incident(run.name, "diverged", detail + where, run.name in inside))
        if spikes := int(run.metrics.get("train/spikes", 0)):
            detail = f"{spikes} time{'s' if spikes > 1 else ''} the loss jumped far out of its recent range"
            out.append(Incident(run.name, "spikes", detail + where, run.name in inside))
        if run.status.get("attempts", 1) >= STARTED_OVER:
            detail = f"begun or continued {run.status['attempts']} times; resumed runs are equal bit by bit"
            out.append(Incident(run.name, "resumed", detail + where, False))
    for row in rows:
        lost = [trial.point for trial in row.trials if trial.value is None]
        if lost:
            points = "; ".join(", ".join(f"{key} = {value}" for key, value in point.items()) for point in lost)
            detail = f"{len(lost)} of {len(row.trials)} trials gave no validation figure: {points}"
            out.append(Incident(row.label, "lost trials", detail, False))
    return out


def section(found: Sequence[Incident], n_runs: int) -> str:
    """The page's part; says so where nothing went wrong."""
    title = '<section id="failures"><h2>Failures and divergences</h2>'
    if not found:
        note = f"None: all {n_runs} runs finished, none diverged, no loss spiked, and no trial was lost."
        return f'{title}<p class="note">{note}</p></section>'
    rows = "".join(
        f'<tr><td class="name">{escape(one.who)}</td><td class="{"worse" if one.counts else "open"}">{escape(one.what)}</td>'
        f'<td class="wrap">{escape(one.detail)}</td></tr>'
        for one in found
    )
    return (
        f'{title}<p class="note">Of {n_runs} runs. A figure with fewer seeds than the others, or with a diverged run in '
        'it, says less than its interval does.</p><div class="scroll"><table><thead><tr><th>run</th><th>what</th>'
        f"<th>how</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def plain(found: Sequence[Incident]) -> list[dict[str, Any]]:
    """For report.json."""
    return [asdict(one) for one in found]
