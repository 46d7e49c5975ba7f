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
    values: dict[str, list[list[float] | None]]  # the same, run by run
    chance: float | None  # over the whole split, where it is known


def slices(rows: Sequence[Entry]) -> list[Slice]:
    """All slices that every run of the table has, in the order of their names."""
    for metric in METRICS:
        labels = _labels(rows, metric)
        if labels:
            chance = _chance(rows[0]) if metric == "accuracy" else None
            return [_slice(rows, name, metric, values, chance) for name, values in labels.items()]
    return []


def _slice(rows: Sequence[Entry], name: str, metric: str, labels: list[int], chance: float | None) -> Slice:
    values = {row.label: [_values(row, f"test/{metric}/{name}={label}") for label in labels] for row in rows}
    estimates = {mixer: [None if one is None else _estimate(one) for one in parts] for mixer, parts in values.items()}
    return Slice(name, metric, labels, estimates, values, chance)


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


def _values(row: Entry, key: str) -> list[float] | None:
    """Of every run; None where one has no figure."""
    known = [value for run in row.runs if (value := run.metrics.get(key)) is not None]
    return known if len(known) == len(row.runs) else None


def _estimate(values: Sequence[float]) -> Estimate:
    return over_seeds(values) if len(values) > 1 else Estimate(values[0], None, None, 1, "none")


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
                    "mean": [None if e is None else e.mean for e in estimates],
                    "ci95": [None if e is None else e.ci95 for e in estimates],
                    "values": one.values[label],
                }
                for label, estimates in one.by_mixer.items()
            },
        }
        for one in found
    ]
