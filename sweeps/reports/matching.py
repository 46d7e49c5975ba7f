"""Budgets that were matched on purpose: what was moved, and how well it was met. `models.budget` writes the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sweeps.reports.tuning import Entry

ALLOWED = {"params": 0.005, "flops": 0.01, "state": 0.01}
"""Share by which a matched budget may miss, by kind, before a reader is warned."""

WORDS = {
    "params": "parameters without embeddings",
    "flops": "training FLOPs",
    "state": "state bytes",
}


def match_warnings(rows: Sequence[Entry]) -> list[str]:
    """Budgets that were missed, and rows that were matched to different things."""
    out = []
    for row in rows:
        match = row.runs[0].match
        if match is None:
            continue
        kind, residual = match["kind"], match.get("residual")
        what = f"{WORDS.get(kind, kind)} of {match.get('reference')}"
        if residual is None:
            out.append(f"{row.label}: the {what} could not be met")
        elif abs(residual) > ALLOWED.get(kind, 0.01):
            allowed = f"{100 * ALLOWED.get(kind, 0.01):g} %"
            out.append(f"{row.label}: misses the {what} by {100 * residual:+.2f} %, more than the {allowed} allowed")
    kinds = {row.label: _asked(row) for row in rows}
    if len(set(kinds.values())) > 1:
        out.append(f"not all budgets were matched alike: {', '.join(f'{k} {v}' for k, v in kinds.items())}")
    return out


def _asked(row: Entry) -> str:
    match = row.runs[0].match
    return "none" if match is None else f"{match['kind']} of {match.get('reference')}"


def words(match: dict[str, Any] | None) -> str:
    """``params within +0.30 %: model.mlp_width = 380``; empty where nothing was matched."""
    if match is None:
        return ""
    residual = match.get("residual")
    met = "not met" if residual is None else f"within {100 * residual:+.2f} %"
    knob = f": {match['knob']} = {match.get('value')}" if match.get("knob") else ""
    return f"{match['kind']} {met}{knob}"


def summary(rows: Sequence[Entry]) -> str | None:
    """One sentence for the page's proof; None where no budget was matched."""
    found = [match for row in rows if (match := row.runs[0].match)]
    if not found:
        return None
    kinds = " and ".join(dict.fromkeys(f"{WORDS.get(m['kind'], m['kind'])} of {m.get('reference')}" for m in found))
    known = [abs(m["residual"]) for m in found if m.get("residual") is not None]
    worst = f", within {100 * max(known):.2f} % at worst" if known else ""
    return f"Budgets were matched to the {kinds}{worst}."
