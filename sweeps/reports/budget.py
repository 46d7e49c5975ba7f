"""Runs lined up at equal training FLOPs: equal tokens are not equal arithmetic, and two-pass models take twice as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from sweeps.reports.collect import Run
from sweeps.reports.compare import Estimate, over_seeds
from sweeps.reports.format import interval, si
from sweeps.reports.style import Look
from sweeps.reports.tuning import Entry

SLACK = 0.02
"""Share by which training FLOPs may differ before lining up tells anything new."""


@dataclass(frozen=True)
class AtBudget:
    """A mixer at the common budget."""

    label: str
    estimate: Estimate | None  # None: it was first validated beyond the budget
    difference: Estimate | None  # to the reference, paired by seed
    tokens: float  # that it has read by then
    share: float  # of its schedule


@dataclass(frozen=True)
class EqualFlops:
    """Validation where every mixer has used as many training FLOPs as the cheapest one in all."""

    budget: float
    metric: str
    rows: list[AtBudget]


def line_up(entries: Sequence[Entry], reference: str, key: str) -> EqualFlops | None:
    """None where all have used equally many FLOPs, or were not validated while they trained."""
    totals = {entry.label: entry.runs[0].counts["train_flops"] for entry in entries}
    budget = min(totals.values())
    if max(totals.values()) <= (1 + SLACK) * budget:
        return None
    values = {entry.label: [_at(run, budget, key) for run in entry.runs] for entry in entries}
    if not any(None not in found for found in values.values()):
        return None
    theirs = dict(zip((run.seeds for run in _named(entries, reference).runs), values[reference], strict=True))
    rows = []
    for entry in entries:
        found = [value for value in values[entry.label] if value is not None]
        whole = len(found) == len(entry.runs)
        pairs = [
            value - other
            for run, value in zip(entry.runs, values[entry.label], strict=True)
            if value is not None and (other := theirs.get(run.seeds)) is not None
        ]
        rows.append(
            AtBudget(
                entry.label,
                _mean(found) if whole else None,
                over_seeds(pairs) if whole and entry.label != reference and len(pairs) > 1 else None,
                budget / entry.runs[0].counts["train_flops_per_token"],
                budget / totals[entry.label],
            )
        )
    return EqualFlops(budget, key, rows)


def _named(entries: Sequence[Entry], label: str) -> Entry:
    return next(entry for entry in entries if entry.label == label)


def _mean(values: Sequence[float]) -> Estimate:
    return over_seeds(values) if len(values) > 1 else Estimate(values[0], None, None, 1, "none")


def _at(run: Run, budget: float, key: str) -> float | None:
    """A run's validation at a number of FLOPs, in a straight line between neighbours over the logarithm."""
    rows = [row for row in run.rows if key in row]
    flops = np.array([row["tokens"] for row in rows], dtype=float) * run.counts["train_flops_per_token"]
    if not len(rows) or flops[0] > budget * (1 + 1e-9):
        return None
    return float(np.interp(np.log(budget), np.log(flops), [row[key] for row in rows]))


def section(
    found: EqualFlops | None, reference: str, unit: str, digits: int, style: Mapping[str, Look], lower: bool
) -> str:
    """The page's part."""
    if found is None:
        return ""
    order = sorted(
        found.rows,
        key=lambda row: (row.estimate is None, (row.estimate.mean if row.estimate else 0) * (1 if lower else -1)),
    )
    body = "".join(_row(row, reference, digits, style) for row in order)
    head = "".join(
        f'<th class="{css}">{text}</th>'
        for css, text in (
            ("", "mixer"),
            ("", f"validation, {escape(unit)}<br>mean [interval]"),
            ("", f"minus {escape(reference)}<br>[interval]"),
            ("n", "tokens<br>by then"),
            ("n", "share of its<br>training"),
        )
    )
    note = (
        f"Every mixer where it has used {si(found.budget)} training FLOPs, all that the cheapest one used. The others are "
        "caught in the middle of their schedules, at a higher learning rate: that favours the one that had ended. To settle "
        "it, train them with as many steps as their budget allows, as in <code>swa: {steps: [800]}</code> in the "
        "study's grid."
    )
    return (
        f'<section><h2>At equal training FLOPs</h2><p class="note">{note}</p><div class="scroll"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _row(row: AtBudget, reference: str, digits: int, style: Mapping[str, Look]) -> str:
    value = "not validated so early" if row.estimate is None else _number(row.estimate, digits)
    difference = "" if row.difference is None else _number(row.difference, digits, sign=True)
    if row.label == reference:
        difference = '<span class="open">reference</span>'
    cells = (
        ("name", f'<span class="dot"></span>{escape(row.label)}'),
        ("", value),
        ("", difference),
        ("n", si(row.tokens)),
        ("n", f"{100 * row.share:.0f} %"),
    )
    inner = "".join(f'<td class="{css}">{text}</td>' for css, text in cells)
    return f'<tr style="--c:var({style[row.label].css})">{inner}</tr>'


def _number(e: Estimate, digits: int, sign: bool = False) -> str:
    mean, _, rest = interval(e, digits, sign=sign).partition(" ")
    return f"<b>{mean}</b>" + (f"<small>{rest}</small>" if rest else "")


def plain(found: EqualFlops | None) -> dict | None:
    """For report.json."""
    if found is None:
        return None
    return {
        "train_flops": found.budget,
        "metric": found.metric,
        "rows": [
            {
                "mixer": row.label,
                "mean": None if row.estimate is None else row.estimate.mean,
                "ci95": None if row.estimate is None else row.estimate.ci95,
                "n": 0 if row.estimate is None else row.estimate.n,
                "difference": None if row.difference is None else row.difference.mean,
                "difference_ci95": None if row.difference is None else row.difference.ci95,
                "tokens": row.tokens,
                "share_of_schedule": row.share,
            }
            for row in found.rows
        ],
    }
