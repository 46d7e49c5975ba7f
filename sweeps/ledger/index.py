"""results/README.md: every published study with its question, its finding in the report's own words, and what made it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.ledger.evidence import Reports
from sweeps.ledger.verdicts import Control, control
from sweeps.reports.style import FIXED
from sweeps.reports.table import DISAGREE

INDEX = "README.md"

INTRODUCTION = """\
# Results

Made by `python -m sweeps.claims` from the `report.json` of each study. [CLAIMS.md](CLAIMS.md) holds what three papers claim against these
figures. Models of less than two million parameters on two CPU cores: nothing here is said of larger ones. Verdicts are those of the reports: 95 %
intervals over seeds, differences paired by seed, Holm's correction within the study. Each folder has the page, the tables and the records of
all runs, from which `python -m sweeps.report study=<name>` makes the same files again, byte for byte. A commit with `+changes` had study
files in its working tree that were committed later; what trains (`models/ data/ runs/`, the mixers) is held to be equal by its hash,
which each page shows."""

TASKS = "Tasks", "test/accuracy", "test/excess"
TEXT = "Text", "test/bits_per_byte"


LEGEND = """95 % intervals over seeds, left out below 0.005; where seeds differ by more than 0.25 no run is like their mean, and the
smallest and the largest stand in brackets. Chance is what the task's statistics give without its answer."""

FEW = 3
"""Named mixers that a task's row in the table of accuracies must have at least."""


def index(results: Path, sweeps: Path) -> str:
    """The whole file, of the studies that name a positive control: others count for nothing. Raises ClaimError for a damaged
    report."""
    reports = Reports(results)
    controls = _controls(results, sweeps, reports)
    parts = [INTRODUCTION]
    for title, *metrics in (TEXT, TASKS):
        found = [
            (one, content) for one in controls if (content := reports.get(one.study) or {}).get("metric") in metrics
        ]
        if found:
            lines = "\n".join(_row(*one) for one in found)
            parts.append(f"## {title}\n\n| study | finding | made by |\n| --- | --- | --- |\n{lines}")
    if table := accuracies(results, sweeps):
        parts.append(f"## Accuracy on the tasks\n\nOf the named mixers, on test. {LEGEND}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _controls(results: Path, sweeps: Path, reports: Reports) -> list[Control]:
    """Of all published studies that name one."""
    names = sorted(file.parent.name for file in results.glob("*/report.json"))
    return [one for name in names if (one := control(name, reports, sweeps)).figure is not None]


def accuracies(results: Path, sweeps: Path, link: str = "") -> str:
    """A table of the tasks whose control succeeded against the ten named mixers, or nothing. ``link``: where ``results`` lies
    for the page that shows it. Empty cells were not run; `LEGEND` says what the others hold."""
    reports, rows = Reports(results), []
    for one in _controls(results, sweeps, reports):
        content = reports.get(one.study) or {}
        found = {row["mixer"]: row for row in content["rows"] if row["rank"] is not None}
        if content["metric"] != "test/accuracy" or not one.ok or len(found.keys() & set(FIXED)) < FEW:
            continue
        asked = re.split(r" *[,;(]", content["description"])[0]
        chance = next((f"{cut['chance']:.2f}" for cut in content["slices"] if cut.get("chance") is not None), "")
        cells = [chance, *(_accuracy(found[name]) if name in found else "" for name in FIXED)]
        rows.append(f"| [{_escaped(asked)}]({link}{one.study}/report.html) | {' | '.join(cells)} |")
    head = f"| | chance | {' | '.join(f'`{name}`' for name in FIXED)} |\n|{' --- |' * (2 + len(FIXED))}"
    return "\n".join([head, *rows]) if rows else ""


def _accuracy(row: Mapping[str, Any]) -> str:
    low, high = min(row["values"]), max(row["values"])
    if high - low > DISAGREE:
        return f"{row['mean']:.2f} ({low:.2f} to {high:.2f})"
    low, high = row["ci95"] or (row["mean"], row["mean"])
    half = (high - low) / 2
    return f"{row['mean']:.2f}" + (f" ± {half:.2f}" if half >= 0.005 else "")


def _row(one: Control, content: Mapping[str, Any]) -> str:
    asked = f"**[{one.study}]({one.study}/report.html)**<br>{content['description']}"
    finding = " ".join([*([] if one.ok else [f"Counts for nothing: {one.failure}."]), *content["finding"]])
    return f"| {_escaped(asked)} | {_escaped(finding)} | {_made(content)} |"


def _made(content: Mapping[str, Any]) -> str:
    """Command, runs, time, commits, machines."""
    ranked = [row for row in content["rows"] if row["rank"] is not None]
    hardware = content["hardware"]
    threads = sorted({one["threads"] for one in hardware})
    limited = f" trainer.threads={threads[0]}" if len(threads) == 1 and hardware[0]["gpu"] is None else ""
    told = [
        f"`python train.py study={content['study']}{limited}`",
        f"{sum(row['n'] for row in ranked)} runs in the table, {content['seconds'] / 60:.0f} min of training, tuning included",
        f"commit {_listed([_short(str(commit)) for commit in content['commits']])}",
        _listed(
            [
                f"{one['gpu'] or one['cpu']}, {one['threads']} thread{'s' if one['threads'] != 1 else ''}"
                for one in hardware
            ]
        ),
    ]
    return "<br>".join(told)


def _short(commit: str) -> str:
    """The mark of uncommitted changes stays."""
    name, plus, changes = commit.partition("+")
    return f"{name[:7]}{plus}{changes}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _escaped(text: str) -> str:
    """As a table's cell."""
    return text.replace("|", "\\|")
