"""Parts of a task's test split: ``test/<metric>/<slice>=<label>`` of run.json, by slice, mixer and label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.reports.compare import Estimate, over_seeds
from sweeps.reports.tuning import Entry

METRICS = {"accuracy": "accuracy", "excess": "squared error above the best possible"}
"""Those that are drawn, the first that there is; a loss by slice says what these say."""


@dataclass(frozen=True)
class Slice:
    """One way to cut the test split."""

    name: str  # such as gap
    metric: str
    labels: list[int]
    by_mixer: dict[str, list[Estimate | None]]  # one for each label; None where a run has no figure
    chance: float | None  # over the whole split, where it is known


def slices(rows: Sequence[Entry]) -> list[Slice]:
    """All slices that every run of the table has, in the order of their names."""
    for metric in METRICS:
        labels = _labels(rows, metric)
        if labels:
            chance = _chance(rows[0]) if metric == "accuracy" else None
            return [
                Slice(
                    name,
                    metric,
                    values,
                    {row.label: [_estimate(row, f"test/{metric}/{name}={v}") for v in values] for row in rows},
                    chance,
                )
                for name, values in labels.items()
            ]
    return []


def _labels(rows: Sequence[Entry], metric: str) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for row in rows:
        for run in row.runs:
            for key in run.metrics:
                head, _, last = key.rpartition("/")
                name, equals, label = last.partition("=")
                if head == f"test/{metric}" and equals and label.lstrip("-").isdigit():
                    found.setdefault(name, set()).add(int(label))
    return {name: sorted(found[name]) for name in sorted(found)}


def _estimate(row: Entry, key: str) -> Estimate | None:
    values = [run.metrics.get(key) for run in row.runs]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return over_seeds(known) if len(known) > 1 else Estimate(known[0], None, None, 1, "none")


def _chance(row: Entry) -> float | None:
    """What the task says. None for a corpus, and for a record of a task whose fields have changed since."""
    from data.config import DATA

    data = row.runs[0].record["science"].get("data", {})
    try:
        chance = DATA[data["kind"]](**data).chance()
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return float(chance)


def plain(found: Sequence[Slice]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "slice": one.name,
            "metric": f"test/{one.metric}",
            "labels": one.labels,
            "chance": one.chance,
            "mixers": {
                label: {
                    "mean": [None if e is None else e.mean for e in values],
                    "ci95": [None if e is None else e.ci95 for e in values],
                }
                for label, values in one.by_mixer.items()
            },
        }
        for one in found
    ]
