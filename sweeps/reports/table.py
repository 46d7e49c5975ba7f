"""The leaderboard: rows with intervals, differences, costs, the proof, and everything a reader must be warned of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runs.identity import canonical
from sweeps.reports.bar import Bar, bar_of
from sweeps.reports.budget import EqualFlops, line_up
from sweeps.reports.collect import CollectError, Run
from sweeps.reports.compare import (
    ALPHA,
    Comparison,
    Estimate,
    compare,
    compare_fixed,
    decide,
    estimate,
    over_seeds,
)
from sweeps.reports.evaluations import Table, tables
from sweeps.reports.failures import Incident, incidents
from sweeps.reports.format import si
from sweeps.reports.gate import Proof, gate
from sweeps.reports.matching import match_warnings
from sweeps.reports.slices import Slice, slices
from sweeps.reports.tuning import Entry, StudyRecord, entries, lower_is_better, tuning_warnings, unfinished

UNITS = {
    "bits_per_byte": "bits per byte",
    "loss": "nats per token",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "excess": "squared error above the best possible",
}
PARAMETER_SLACK = 0.02
"""Share by which parameter counts may differ before a reader is told."""

MODE = "parallel"
"""How a run's figures are computed where its record does not say: one pass over whole windows."""


FLOP_SLACK = 0.1
"""The same for training FLOPs per token, of which mixers take different amounts by their nature."""

DISAGREE = 0.25
"""Accuracies of one mixer's seeds that lie further apart are of runs that learnt the task and of runs that did not."""


@dataclass(frozen=True)
class OtherMode:
    """The same runs measured in a way in which they are not deployed: shown, never ranked."""

    mode: str
    estimate: Estimate
    gap: Estimate | None  # minus the deployed number of the same run; None with one run


@dataclass(frozen=True)
class Row:
    """A mixer in the leaderboard."""

    rank: int
    entry: Entry
    mode: str
    estimate: Estimate
    others: list[OtherMode]
    comparison: Comparison | None  # None: this is the reference
    yardstick: Comparison | None  # None: there is no yardstick

    @property
    def label(self) -> str:
        return self.entry.label

    @property
    def beats_yardstick(self) -> bool | None:
        """None where they cannot be told apart. Of one run: on these documents, seed noise aside."""
        c = self.yardstick
        if c is None or c.shown is None:
            return None
        if c.seeds is None:
            return None if c.shown.p is None or c.shown.p >= ALPHA else c.favours
        return {"better": True, "worse": False}.get(c.verdict)

    def count(self, name: str) -> float:
        return self.entry.runs[0].counts[name]

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the runs: one slow run (a busy machine) does not move it."""
        rates = [run.record.get("timing", {}).get("tokens_per_s") for run in self.entry.runs]
        return median(rates) if rates and None not in rates else None

    @property
    def scored_per_s(self) -> float | None:
        """Test tokens that a two-pass model scores in a second as it is deployed, token by token; median over the runs."""
        rates = [run.record.get("timing", {}).get("scoring_recurrent_tokens_per_s") for run in self.entry.runs]
        return median(rates) if rates and None not in rates else None

    @property
    def spikes(self) -> int:
        return int(sum(run.metrics.get("train/spikes", 0) for run in self.entry.runs))

    @property
    def diverged(self) -> int:
        """Runs that ended clearly above their own best training loss."""
        return sum(bool(run.metrics.get("train/diverged")) for run in self.entry.runs)


@dataclass(frozen=True)
class Board:
    """All that a report shows."""

    study: str
    description: str
    metric: str
    unit: str
    lower_is_better: bool
    reference: str
    rows: list[Row]
    proof: Proof
    bar: Bar | None
    warnings: list[str]
    unfinished: list[tuple[str, str, str]]
    incidents: list[Incident]
    slices: list[Slice]
    equal_flops: EqualFlops | None
    evaluations: list[Table]
    all_runs: list[Run] = field(repr=False)

    @property
    def runs(self) -> list[Run]:
        """Those in the table."""
        return [run for row in self.rows for run in row.entry.runs]

    @property
    def seconds(self) -> float:
        """Training time of all finished runs, tuning included."""
        return sum(run.record.get("timing", {}).get("seconds", 0.0) for run in self.all_runs)

    def distinct(self, *path: str) -> list[Any]:
        """The different values of a part of run.json over the table's runs, as in distinct("hardware", "cpu")."""
        found: dict[str, Any] = {}
        for run in self.runs:
            value: Any = run.record
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            found.setdefault(canonical(value), value)
        return list(found.values())


def build(
    runs: Sequence[Run],
    *,
    name: str,
    study: StudyRecord | None = None,
    metric: str = "test/bits_per_byte",
    reference: str | None = None,
    tuned: Sequence[str] = (),
    cache: Path | None = None,
    kept: dict[str, Any] | None = None,
) -> Board:
    """From runs to the leaderboard. ``cache=None`` leaves the yardstick out; ``kept`` is one that was measured before.

    Raises CollectError if nothing is finished or the metric or the reference does not exist, NotComparable if the
    finished runs may not stand in one table.
    """
    rows = entries(runs, study, metric, tuned)
    if not rows:
        raise CollectError(f"{name}: none of {len(runs)} runs is finished and chosen; {_how(runs)}")
    in_table = [run for row in rows for run in row.runs]
    known = sorted(set.intersection(*(set(run.metrics) for run in in_table)))
    if metric not in known:
        raise CollectError(f"metric={metric}: not in all runs. Metrics that are: {', '.join(known)}")
    proof = gate(in_table, tuned)
    for row in rows:
        _refuse_twins(row)
    labels = [row.label for row in rows]
    chosen = _reference(labels, reference, study)
    lower = lower_is_better(metric)
    theirs = rows[labels.index(chosen)].runs
    compared = {row.label: compare(row.runs, theirs, metric, chosen) for row in rows if row.label != chosen}
    decided = decide(compared, lower_is_better=lower)
    estimates = {row.label: estimate(row.runs, metric) for row in rows}
    bar, doubts = bar_of(in_table, metric, cache, kept)
    against_bar: dict[str, Comparison] = {}
    if bar is not None:
        measured = {row.label: compare_fixed(row.runs, bar.value, bar.by_document, metric, bar.name) for row in rows}
        against_bar = decide(measured, lower_is_better=lower)
    rows.sort(key=lambda row: estimates[row.label].mean * (1 if lower else -1))
    lacking = unfinished(runs, study, rows)
    return Board(
        study=name,
        description=str(study.spec.get("description") or "") if study else "",
        metric=metric,
        unit=UNITS.get(metric.rsplit("/", 1)[-1], metric),
        lower_is_better=lower,
        reference=chosen,
        rows=[
            Row(
                rank=rank,
                entry=row,
                mode=_mode(row),
                others=_other_modes(row, metric),
                estimate=estimates[row.label],
                comparison=decided.get(row.label),
                yardstick=against_bar.get(row.label),
            )
            for rank, row in enumerate(rows, start=1)
        ],
        proof=proof,
        bar=bar,
        warnings=[
            *_seed_warnings(rows),
            *_disagreement_warnings(rows, metric),
            *_budget_warnings(rows, chosen),
            *match_warnings(rows),
            *tuning_warnings(rows),
            *_training_warnings(rows),
            *proof.flags,
            *doubts,
        ],
        unfinished=lacking,
        incidents=incidents(runs, rows, lacking),
        slices=slices(rows),
        equal_flops=line_up(rows, chosen, metric.replace("test/", "val/", 1)),
        evaluations=tables(rows, chosen),
        all_runs=list(runs),
    )


def _how(runs: Sequence[Run]) -> str:
    states: dict[str, int] = {}
    for run in runs:
        states[run.state] = states.get(run.state, 0) + 1
    listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"there are {listed or 'none'}. The same command that began them continues them"


def _mode(row: Entry) -> str:
    return row.runs[0].record.get("mode", MODE)


def _other_modes(row: Entry, metric: str) -> list[OtherMode]:
    """What runs that can be measured in several modes have beside the deployed one: ``test/<mode>/<metric>``."""
    split, _, name = metric.partition("/")
    out = []
    for key in row.runs[0].metrics:
        first, _, rest = key.partition("/")
        mode, _, last = rest.partition("/")
        if first != split or last != name or mode == _mode(row) or any(key not in run.metrics for run in row.runs):
            continue
        gaps = [run.metrics[key] - run.metrics[metric] for run in row.runs]
        values = [run.metrics[key] for run in row.runs]
        single = Estimate(values[0], None, None, 1, "none")
        out.append(
            OtherMode(
                mode.replace("_", "-"),
                over_seeds(values) if len(values) > 1 else single,
                over_seeds(gaps) if len(gaps) > 1 else None,
            )
        )
    return out


def _refuse_twins(row: Entry) -> None:
    """Two runs with the same seed would be counted as two draws."""
    seen: dict[tuple[Any, Any], Run] = {}
    for run in row.runs:
        if run.seeds in seen:
            raise CollectError(f"{row.label}: {seen[run.seeds].name} and {run.name} have the same seed; name only one")
        seen[run.seeds] = run


def _reference(labels: Sequence[str], asked: str | None, study: StudyRecord | None) -> str:
    if asked is not None:
        if asked not in labels:
            raise CollectError(f"reference={asked}: must be one of {', '.join(labels)}")
        return asked
    wished = [str(study.spec.get("reference")) if study else "", "transformer", labels[0]]
    return next(label for label in wished if label in labels)


# ---- warnings --------------------------------------------------------------------------------------------------------


def _seed_warnings(rows: Sequence[Entry]) -> list[str]:
    out = []
    counts = {row.label: len(row.runs) for row in rows}
    single = [label for label, count in counts.items() if count == 1]
    if single:
        out.append(f"one seed only ({', '.join(single)}): intervals are over test documents, seed noise is not in them")
    elif min(counts.values()) < 5:
        out.append(f"few seeds ({min(counts.values())}): intervals are wide; five or more tell small differences apart")
    if len(set(counts.values())) > 1:
        out.append(f"unequal numbers of seeds: {', '.join(f'{label} {count}' for label, count in counts.items())}")
    return out


def _disagreement_warnings(rows: Sequence[Entry], metric: str) -> list[str]:
    """A mean of solved and unsolved runs is no typical run, and Student's interval may reach beyond 1."""
    if metric.rsplit("/", 1)[-1] != "accuracy":
        return []
    out = []
    for row in rows:
        values = sorted(run.metrics[metric] for run in row.runs)
        if values[-1] - values[0] > DISAGREE:
            out.append(f"{row.label} {', '.join(f'{value:.2f}' for value in values)}")
    told = "seeds disagree, so no run is like their mean, and the interval says little more than that"
    return [f"{told}: {'; '.join(out)}"] if out else []


def _budget_warnings(rows: Sequence[Entry], reference: str) -> list[str]:
    """Parameters and arithmetic that are not equal are differences beside the mixer."""
    counts = {row.label: row.runs[0].counts["params_non_embedding"] for row in rows}
    base = counts[reference]
    # Where parameters were matched, `match_warnings` says how well.
    off = [
        f"{row.label} {100 * (counts[row.label] / base - 1):+.1f} %"
        for row in rows
        if (row.runs[0].match or {}).get("kind") != "params" and abs(counts[row.label] / base - 1) > PARAMETER_SLACK
    ]
    out = [f"parameters without embeddings differ from {reference}'s: {', '.join(off)}"] if off else []
    tokens = {row.label: row.runs[0].counts["tokens"] for row in rows}
    off = [f"{label} {si(n)}" for label, n in tokens.items() if n != tokens[reference]]
    if off:
        out.append(f"training tokens differ from {reference}'s {si(tokens[reference])}: {', '.join(off)}")
    flops = {row.label: row.runs[0].counts["train_flops"] for row in rows}
    base = flops[reference]
    off = [f"{label} {100 * (n / base - 1):+.0f} %" for label, n in flops.items() if abs(n / base - 1) > FLOP_SLACK]
    return [*out, f"training FLOPs differ from {reference}'s by more than a tenth: {', '.join(off)}"] if off else out


def _training_warnings(rows: Sequence[Entry]) -> list[str]:
    out = []
    for row in rows:
        bad = [run.name for run in row.runs if run.metrics.get("train/diverged")]
        if bad:
            share = f"{len(bad)} of {len(row.runs)} runs"
            out.append(f"{row.label}: {share} ended well above their best loss ({', '.join(bad)})")
        spikes = int(np.sum([run.metrics.get("train/spikes", 0) for run in row.runs]))
        if spikes:
            out.append(f"{row.label}: {spikes} loss spike{'s' if spikes > 1 else ''} in training")
        epochs = row.runs[0].record.get("data", {}).get("epochs")
        if epochs and round(epochs, 1) > 1 and row is rows[0]:
            out.append(f"training read its data {epochs:.1f} times: figures are of a repeated corpus")
    return out
