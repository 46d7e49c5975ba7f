"""What suites have measured, over all mixers of a report: means over seeds, differences to the reference, n/a with reasons.

Only results of equal settings at an equal step (of speed also on equal hardware) stand in one table. Intervals are Student's
t over seeds; differences are paired by seed and corrected for the number of mixers (Holm), by the code of the
leaderboard. Their verdicts are over seeds alone: the texts of a suite are the same for all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from evals.names import mode_of, split
from runs.identity import canonical
from sweeps.reports.collect import Run
from sweeps.reports.compare import Comparison, Estimate, compare, decide, estimate
from sweeps.reports.results import Result
from sweeps.reports.tuning import Entry

FROZEN = "all pairs differ by exactly the same: there is no spread to judge it by"
LOWER = ("loss", "last", "gain", "perplexity", "bits_per_byte", "nats", "word_perplexity", "byte_perplexity")
HIGHER = ("accuracy", "exact", "retained", "per_token", "lm_eval", "acc", "acc_norm", "acc_per_token", "exact_match", "f1", "em",
          "contains", "bleu", "chrf", "prefill_tokens_per_s", "decode_tokens_per_s")  # fmt: skip
"""What is good, by any part of a metric's name. Of others no better and worse is known."""


ORDER = ("perplexity", "positions", "extrapolation", "downstream", "niah", "information", "mesa", "fredholm", "speed")
"""Of suites in a report; others follow by name."""


@dataclass(frozen=True)
class Cell:
    """One metric of one mixer: over its seeds, and minus the reference."""

    runs: list[Run]  # those that have a figure
    values: list[float]
    estimate: Estimate
    comparison: Comparison | None = None  # None: the reference itself, another mode, or no reference with a figure
    difference: float | None = None  # mean over pairs

    def views(self, metric: str) -> list[Run]:
        return [_view(run, metric, value) for run, value in zip(self.runs, self.values, strict=True)]


@dataclass(frozen=True)
class Line:
    """A mixer in a table, in one mode. Only the deployed mode is compared."""

    label: str
    mode: str
    deployed: bool
    runs: list[Run]
    results: list[Result]  # one for each run
    cells: dict[str, Cell]  # by metric; those that no run has are not there
    reasons: dict[str, str]  # metric -> why it is not there, or why some run has none

    @property
    def nothing(self) -> str | None:
        """Why the whole suite says nothing of this mixer; None where it does."""
        return None if self.cells or not self.reasons else next(iter(self.reasons.values()))


@dataclass(frozen=True)
class Table:
    """One suite at equal settings and an equal step."""

    suite: str
    settings: dict[str, Any]
    step: int
    hardware: dict[str, Any] | None  # of speed
    metrics: list[str]
    lines: list[Line]
    reference: str
    lacking: list[str]  # mixers of the report that were not evaluated so

    @property
    def name(self) -> str:
        return f"{self.suite}, step {self.step}"

    @property
    def mixed_code(self) -> list[str]:
        """Parts of the code, ``shared`` or ``evals``, that were not the same for all results."""
        found = [one.get("code", {}) for line in self.lines for one in line.results]
        return [part for part in ("shared", "evals") if len({code.get(part) for code in found}) > 1]

    def deployed(self) -> list[Line]:
        return [line for line in self.lines if line.deployed]


def direction(metric: str) -> str | None:
    """``lower`` or ``higher`` is better; None where neither is."""
    parts = split(metric)[0].split("/")
    if any(part in LOWER for part in parts):
        return "lower"
    return "higher" if any(part in HIGHER for part in parts) else None


def tables(rows: Sequence[Entry], reference: str) -> list[Table]:
    """All tables: by suite; in a suite first the one with most mixers, then the latest step."""
    groups: dict[str, tuple[Result, dict[str, list[tuple[Run, Result]]]]] = {}
    for row in rows:
        for run in row.runs:
            for one in run.evals:
                key = canonical([one["suite"], one["settings"], one["step"], one.get("hardware")])
                _, members = groups.setdefault(key, (one, {}))
                members.setdefault(row.label, []).append((run, one))
    made = [_table(one, members, [row.label for row in rows], reference) for one, members in groups.values()]
    with_figures = [table for table in made if table.metrics]
    return sorted(with_figures, key=_place)


def _place(table: Table) -> tuple[Any, ...]:
    suite = (ORDER.index(table.suite) if table.suite in ORDER else len(ORDER), table.suite)
    covered = sum(not line.nothing for line in table.deployed())
    return *suite, -covered, -table.step, canonical([table.settings, table.hardware])


def _table(first: Result, members: dict[str, list[tuple[Run, Result]]], labels: Sequence[str], reference: str) -> Table:
    lines = [line for label in labels if label in members for line in _lines(label, members[label])]
    metrics = list(dict.fromkeys(metric for line in lines for metric in line.cells))
    deployed = {line.label: line for line in lines if line.deployed}
    compared = {metric: _compared(deployed, metric, reference) for metric in metrics}
    lines = [
        replace(line, cells={m: _with(cell, compared[m].get(line.label)) for m, cell in line.cells.items()})
        if line.deployed
        else line
        for line in lines
    ]
    lacking = [label for label in labels if label not in members]
    return Table(
        first["suite"], first["settings"], first["step"], first.get("hardware"), metrics, lines, reference, lacking
    )


def _lines(label: str, members: Sequence[tuple[Run, Result]]) -> list[Line]:
    """The deployed mode, and beside it those that a two-pass model has."""
    runs, results = [run for run, _ in members], [one for _, one in members]
    deployed, *others = results[0]["modes"]
    found: dict[str, dict[str, list[tuple[Run, float]]]] = {mode: {} for mode in (deployed, *others)}
    reasons: dict[str, dict[str, str]] = {mode: {} for mode in (deployed, *others)}
    for run, one in members:
        for key, value in one["metrics"].items():
            mode, metric = mode_of(key, others)
            if value is not None:
                found[mode or deployed].setdefault(metric, []).append((run, value))
            else:
                reasons[mode or deployed].setdefault(metric, one["reasons"].get(key, "no figure"))
    return [
        Line(
            label,
            mode,
            mode == deployed,
            runs,
            results,
            {metric: _cell(pairs, metric) for metric, pairs in by_metric.items()},
            reasons[mode],
        )
        for mode, by_metric in found.items()
        if by_metric or mode == deployed
    ]


def _cell(pairs: Sequence[tuple[Run, float]], metric: str) -> Cell:
    runs, values = [run for run, _ in pairs], [value for _, value in pairs]
    return Cell(runs, values, estimate([_view(run, metric, value) for run, value in pairs], metric))


def _view(run: Run, metric: str, value: float) -> Run:
    """The run as if this were all that was measured of it: what the leaderboard's statistics take."""
    return replace(run, record={**run.record, "metrics": {metric: value}}, documents={})


def _compared(lines: dict[str, Line], metric: str, reference: str) -> dict[str, tuple[Comparison, float | None]]:
    """label -> comparison with the reference, all of one metric corrected together, and the mean difference of pairs."""
    views = {label: line.cells[metric].views(metric) for label, line in lines.items() if metric in line.cells}
    if reference not in views:
        return {}
    theirs = {run.seeds: run for run in views[reference]}
    found, gaps = {}, {}
    for label, mine in views.items():
        if label == reference:
            continue
        found[label] = compare(mine, views[reference], metric, reference)
        pairs = [run.metrics[metric] - theirs[run.seeds].metrics[metric] for run in mine if run.seeds in theirs]
        gaps[label] = fmean(pairs) if pairs else None
    good = direction(metric)
    # Figures of few steps, such as 1 of 8 right, may differ by the same in all pairs: without spread there is no test.
    frozen = {label for label, c in found.items() if c.seeds and c.seeds.sd == 0 and c.seeds.mean != 0}
    found |= {label: replace(found[label], p=1.0) for label in frozen}
    decided = decide(found, lower_is_better=good != "higher")
    decided |= {label: replace(decided[label], note=FROZEN, seeds_needed=None) for label in frozen}
    if good is None:
        decided = {
            label: replace(c, verdict="differs", favours=None) if c.verdict in ("better", "worse") else c
            for label, c in decided.items()
        }
    return {label: (c, gaps[label]) for label, c in decided.items()}


def _with(cell: Cell, found: tuple[Comparison, float | None] | None) -> Cell:
    return cell if found is None else replace(cell, comparison=found[0], difference=found[1])


# ---- plain values ----------------------------------------------------------------------------------------------------


def plain(found: Sequence[Table]) -> list[dict[str, Any]]:
    """For report.json: each table with one row for each mixer, mode and metric."""
    return [
        {
            "suite": table.suite,
            "settings": table.settings,
            "step": table.step,
            **({"hardware": table.hardware} if table.hardware else {}),
            "not_evaluated": table.lacking,
            "rows": [
                row
                for line in table.lines
                for row in (
                    *(_row(line, metric, cell) for metric, cell in line.cells.items()),
                    *(_none(line, metric, why) for metric, why in line.reasons.items() if metric not in line.cells),
                )
            ],
        }
        for table in found
    ]


def _row(line: Line, metric: str, cell: Cell) -> dict[str, Any]:
    c = cell.comparison
    shown = c.seeds if c else None
    return {
        "mixer": line.label,
        "mode": line.mode,
        "metric": metric,
        "better": direction(metric),
        "n": cell.estimate.n,
        "mean": cell.estimate.mean,
        "ci95": cell.estimate.ci95,
        "values": cell.values,
        "runs": [run.name for run in cell.runs],
        "reference": c.reference if c else None,
        "difference": cell.difference,
        "difference_ci95": shown.ci95 if shown else None,
        "pairs": c.pairs if c else None,
        "p": c.p if c else None,
        "p_holm": c.p_holm if c else None,
        "verdict": c.verdict if c else None,
        "reason": line.reasons.get(metric),
    }


def _none(line: Line, metric: str, why: str) -> dict[str, Any]:
    return {"mixer": line.label, "mode": line.mode, "metric": metric, "n": 0, "mean": None, "reason": why}


COLUMNS = (
    "suite", "step", "settings", "mixer", "mode", "metric", "better", "n", "mean", "ci95_low", "ci95_high", "reference", "difference",
    "difference_low", "difference_high", "pairs", "p", "p_holm", "verdict", "reason",
)  # fmt: skip


def csv_rows(content: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what `plain` gives: one row for each figure, with `COLUMNS`."""
    out = []
    for table in content:
        for row in table["rows"]:
            low, high = row.get("ci95") or (None, None)
            below, above = row.get("difference_ci95") or (None, None)
            ends = {"ci95_low": low, "ci95_high": high, "difference_low": below, "difference_high": above}
            head = {"suite": table["suite"], "step": table["step"], "settings": canonical(table["settings"])}
            out.append({**head, **row, **ends})
    return out
