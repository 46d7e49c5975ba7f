"""The gate: what may stand in one table.

Runs may if everything but mixer, seeds and tuned keys is equal, the code that all mixers share is equal, the data read
is equal, and each mixer's own code is the same in all its runs. Otherwise an error names each differing key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runs.identity import SENTINEL, canonical, digest
from sweeps.reports.collect import Run

ABSENT = "<absent>"
MEASURE = ("data.", "tokenizer.", "evaluation.")
"""Keys that no study may vary: what is measured must be equal."""


@dataclass(frozen=True)
class Difference:
    """A fact that should be equal and is not: each value with the runs that have it."""

    key: str
    values: dict[str, list[str]]

    def __str__(self) -> str:
        parts = []
        for value, names in self.values.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            parts.append(f"{value} ({', '.join(names[:2])}{more})")
        return f"{self.key}: {' | '.join(parts)}"


class NotComparable(ValueError):
    """Runs that must not stand in one table; the message names each differing key with its values."""

    def __init__(self, differences: Sequence[Difference]):
        self.differences = list(differences)
        listed = "\n".join(f"  {difference}" for difference in self.differences)
        keys = [difference.key for difference in self.differences]
        tunable = all(key.startswith(("optimizer.", "schedule.")) for key in keys)
        hint = f"\nIf these were tuned for each mixer: tuned=[{','.join(keys)}]" if tunable else ""
        super().__init__(f"these runs may not stand in one table; they differ in\n{listed}{hint}")


@dataclass(frozen=True)
class Proof:
    """What was found equal in all runs of a table."""

    comparison_key: str
    shared_code: str
    mixer_code: dict[str, str]
    fingerprint: str
    equal: dict[str, Any]  # flat, key -> the value that all runs have
    moved: dict[str, list[Any]]  # what a matched budget turned, as model.mlp_width -> its smallest and largest value
    free: list[str]  # seeds and tuned keys (and what follows from them)
    flags: list[str] = field(default_factory=list)  # equal as recorded, but with a doubt; each one sentence


def comparison_of(run: Run, tuned: Iterable[str] = ()) -> dict[str, Any]:
    """The run's comparison dict with ``tuned`` keys freed as well."""
    freed = set(tuned)
    return {key: SENTINEL if key in freed else value for key, value in run.comparison.items()}


def check_tuned(runs: Sequence[Run], tuned: Iterable[str]) -> None:
    """Raises ValueError for a key that no run has, which would free nothing in silence, and for what is the ruler."""
    known = sorted({key for run in runs for key in run.comparison if not key.startswith(MEASURE)})
    for key in tuned:
        if key.startswith(MEASURE):
            raise ValueError(f"tuned={key}: what is measured must be equal")
        if key not in known:
            raise ValueError(f"tuned={key}: no run has this key. Keys that can be freed: {', '.join(known)}")


def differences(runs: Sequence[Run], tuned: Iterable[str] = ()) -> list[Difference]:
    """All that forbids to compare these runs; empty if nothing does."""
    tuned = list(tuned)
    check_tuned(runs, tuned)
    flat = {run.name: comparison_of(run, tuned) for run in runs}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    found = [_differing(key, {run.name: flat[run.name].get(key, ABSENT) for run in runs}) for key in keys]
    for name, part, key in (("code.shared", "code", "shared"), ("data fingerprint", "data", "fingerprint")):
        found.append(_differing(name, {run.name: run.record.get(part, {}).get(key) for run in runs}))
    for mixer in dict.fromkeys(run.mixer for run in runs):
        own = {run.name: run.record.get("code", {}).get("mixer") for run in runs if run.mixer == mixer}
        found.append(_differing(f"code.mixer of {mixer}", own))
    return [difference for difference in found if difference is not None]


def _differing(key: str, by_run: Mapping[str, Any]) -> Difference | None:
    values: dict[str, list[str]] = {}
    for name, value in by_run.items():
        values.setdefault(canonical(value), []).append(name)
    return Difference(key, values) if len(values) > 1 else None


def gate(runs: Sequence[Run], tuned: Iterable[str] = ()) -> Proof:
    """Raises NotComparable unless the runs may stand in one table; says what is equal."""
    if not runs:
        raise ValueError("no runs to compare")
    tuned = list(tuned)
    if found := differences(runs, tuned):
        raise NotComparable(found)
    first = comparison_of(runs[0], tuned)
    moved = _moved(runs, first)
    return Proof(
        comparison_key=digest(first),
        shared_code=str(runs[0].record.get("code", {}).get("shared")),
        mixer_code={run.mixer: str(run.record.get("code", {}).get("mixer")) for run in runs},
        fingerprint=str(runs[0].record.get("data", {}).get("fingerprint")),
        equal={key: value for key, value in first.items() if value != SENTINEL and key not in moved},
        moved=moved,
        free=[key for key, value in first.items() if value == SENTINEL],
        flags=_flags(runs),
    )


def _moved(runs: Sequence[Run], config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Configs of a matched table have one value of the key that was turned, and its models have others."""
    keys = dict.fromkeys(run.match["knob"] for run in runs if run.match and run.match.get("knob"))
    out = {}
    for key in keys:
        if config.get(key) == SENTINEL:  # sizes are on the command of the study: it is among the free keys
            continue
        values = [run.match["value"] if run.match and run.match.get("knob") == key else config.get(key) for run in runs]
        known = [value for value in values if value is not None]
        if len(set(known)) > 1:
            out[key] = [min(known), max(known)]
    return out


def _flags(runs: Sequence[Run]) -> list[str]:
    flags = [
        f"{run.name} was continued with changed code: its weights are a mix of two versions"
        for run in runs
        if run.record.get("code_changed")
    ]
    for label, get in (
        ("hardware", lambda r: {k: v for k, v in r.get("hardware", {}).items() if k in ("cpu", "gpu", "devices")}),
        ("package versions", lambda r: r.get("versions", {})),
        ("commits", lambda r: r.get("commit")),
    ):
        kinds = len({canonical(get(run.record)) for run in runs})
        if kinds > 1:
            flags.append(f"{label} differ between the runs ({kinds} kinds), though code hashes and science are equal")
    return flags
