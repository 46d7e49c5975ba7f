"""Which runs stand in the table, and how they were tuned: from the study's record, or else from the runs alone.

The sweeper writes ``study.json``: what was asked for, each mixer's trials and the point that validation chose. Without
it (single runs, plain multiruns) the same is worked out here: runs that differ in a tuned key are trials of one mixer,
and the mean validation metric chooses among them; runs that differ in a mixer's own settings are rows of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs.folder import read_json
from runs.identity import SEEDS, SENTINEL, canonical
from sweeps.reports.collect import CollectError, Run, compact_folder, study_folder

Point = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One point of a mixer's grid with its mean validation metric (None where a run failed or is missing)."""

    point: Point
    value: float | None
    chosen: bool


@dataclass(frozen=True)
class Entry:
    """One row: a mixer at the point that was chosen for it."""

    label: str
    mixer: str
    runs: list[Run]
    point: Point
    trials: list[Trial] = field(default_factory=list)
    at_edge: dict[str, str] = field(default_factory=dict)  # tuned key -> "smallest" or "largest"


@dataclass(frozen=True)
class StudyRecord:
    """``study.json``, as `sweeps.phases.Record` writes it."""

    content: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """The checked study: mixers with their grids, seeds, tune, reference."""
        return self.content["spec"]

    @property
    def seeds(self) -> list[int]:
        return self.spec["seeds"]

    def mixer(self, name: str) -> dict[str, Any]:
        """What became of a mixer: its ``point``, ``at_edge``, ``trials`` and ``runs``."""
        return self.content["mixers"].get(name) or {"point": None, "at_edge": {}, "trials": [], "runs": []}

    def members(self) -> set[str]:
        """Names of all runs of the study's last command; others in its folder were made with other overrides."""
        facts = [self.mixer(name) for name in self.spec["mixers"]]
        return {row["run"] for mixer in facts for row in [*mixer["trials"], *mixer["runs"]]}


def read_study(results: Path, study: str) -> StudyRecord | None:
    """The study's record, from among its runs or from beside the report; None where there is none."""
    for path in (study_folder(results, study) / "study.json", compact_folder(results, study).parent / "study.json"):
        try:
            content = read_json(path)
            if content:
                record = StudyRecord(content)
                record.members()
                return record
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CollectError(f"{path}: damaged ({type(error).__name__}: {error})") from None
    return None


# ---- rows ------------------------------------------------------------------------------------------------------------


def entries(runs: Sequence[Run], study: StudyRecord | None, metric: str, tuned: Iterable[str]) -> list[Entry]:
    """The rows that can be filled: finished runs at each mixer's chosen point."""
    if study is not None:
        found = [_from_study(mixer, runs, study) for mixer in study.spec["mixers"]]
        return [entry for entry in found if entry.runs]
    return _from_runs([run for run in runs if run.done], metric, tuned)


def _from_study(mixer: str, runs: Sequence[Run], study: StudyRecord) -> Entry:
    facts = study.mixer(mixer)
    chosen = canonical(facts["point"])
    trials = [Trial(point, value, canonical(point) == chosen) for point, value in _mean_trials(facts["trials"])]
    seeds = {row["run"]: row["seed"] for row in facts["runs"]}
    mine = sorted((run for run in runs if run.name in seeds and run.done), key=lambda run: seeds[run.name])
    return Entry(mixer, mixer, mine, facts["point"] or {}, trials, facts["at_edge"] or {})


def _mean_trials(trials: Sequence[dict[str, Any]]) -> list[tuple[Point, float | None]]:
    """One for each point: mean over its seeds, None if one of them has no value."""
    by_point: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        by_point.setdefault(canonical(trial["point"]), []).append(trial)
    return [(same[0]["point"], _mean([trial["value"] for trial in same])) for same in by_point.values()]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _from_runs(runs: Sequence[Run], metric: str, tuned: Iterable[str]) -> list[Entry]:
    free = {key for run in runs for key, value in run.comparison.items() if value == SENTINEL} | set(tuned)
    keys = sorted(free - set(SEEDS))
    validation = metric.replace("test/", "val/", 1)
    variants: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        own = {key: value for key, value in run.science.items() if key.startswith("mixer.")}
        variants.setdefault((run.mixer, canonical(own)), []).append(run)
    labels = _labels(list(variants.values()))
    out = []
    for label, same in zip(labels, variants.values(), strict=True):
        by_point: dict[str, list[Run]] = {}
        for run in same:
            by_point.setdefault(canonical(run.point(keys)), []).append(run)
        values = {key: _mean([run.metrics.get(validation) for run in there]) for key, there in by_point.items()}
        badness = {key: _badness(value, metric) for key, value in values.items()}
        best = min(badness, key=badness.__getitem__)
        varied = [key for key in keys if len({canonical(run.science.get(key)) for run in same}) > 1]
        trials = [Trial(dict(there[0].point(varied)), values[key], key == best) for key, there in by_point.items()]
        chosen = sorted(by_point[best], key=lambda run: str(run.seeds))
        edge = at_edge(dict(chosen[0].point(varied)), trials)
        point = dict(chosen[0].point(keys))
        out.append(Entry(label, same[0].mixer, chosen, point, trials if varied else [], edge))
    return out


def lower_is_better(metric: str) -> bool:
    """Losses, perplexities and bits; not accuracies."""
    return "accuracy" not in metric


def _badness(value: float | None, metric: str) -> float:
    if value is None:
        return math.inf
    return value if lower_is_better(metric) else -value


def _labels(variants: Sequence[Sequence[Run]]) -> list[str]:
    """The mixer's name, with the settings that tell its variants apart where there are several."""
    out = []
    for same in variants:
        run = same[0]
        others = [other[0] for other in variants if other[0].mixer == run.mixer and other is not same]
        own = [key for key in run.science if key.startswith("mixer.")]
        keys = [key for key in own if any(other.science.get(key) != run.science[key] for other in others)]
        settings = ", ".join(f"{key.removeprefix('mixer.')}={run.science[key]}" for key in keys)
        out.append(f"{run.mixer} ({settings})" if settings else run.mixer)
    return out


def at_edge(point: Point, trials: Sequence[Trial]) -> dict[str, str]:
    """Numeric keys whose chosen value is the smallest or largest of several tried: a better one may lie outside."""
    edges = {}
    for key, value in point.items():
        tried = {trial.point[key] for trial in trials if isinstance(trial.point.get(key), int | float)}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            edges[key] = "smallest" if value == min(tried) else "largest"
    return edges


# ---- what a reader must know -----------------------------------------------------------------------------------------


def tuning_warnings(rows: Sequence[Entry]) -> list[str]:
    """Unequal numbers of trials, and choices at the edge of a grid."""
    ends: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for key, which in row.at_edge.items():
            ends.setdefault((which, key), []).append(f"{row.label} ({row.point.get(key)})")
    out = [
        f"the {which} {key} tried was chosen for {', '.join(names)}: a better one may lie outside the grid"
        for (which, key), names in ends.items()
    ]
    counts = {row.label: max(1, len(row.trials)) for row in rows}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{label} {count}" for label, count in counts.items())
        out.append(f"unequal tuning: the mixers had different numbers of trials ({listed})")
    return out


def unfinished(runs: Sequence[Run], study: StudyRecord | None, rows: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """(run or mixer, state, why) of all that was begun or asked for and is not in the table for that reason."""
    out = [(run.name, run.state, run.status.get("error") or _progress(run)) for run in runs if not run.done]
    names = {name for name, _, _ in out}
    if study is not None:
        there = {run.name for row in rows for run in row.runs}
        for mixer in study.spec["mixers"]:
            facts = study.mixer(mixer)
            begun = {row["seed"] for row in facts["runs"] if row["run"] in there or row["run"] in names}
            lacking = [seed for seed in study.seeds if seed not in begun]
            if lacking:
                why = f"seed {', '.join(map(str, lacking))}" if facts["point"] is not None else "no point was chosen"
                out.append((mixer, "missing", why))
    return out


def _progress(run: Run) -> str:
    step, steps = run.status.get("step"), run.status.get("steps")
    return f"step {step} of {steps}" if steps else "not started"
