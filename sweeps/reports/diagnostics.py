"""What ``logger.diagnostics=true`` saw inside the mixers at the end of training, by layer and head.

Rows of metrics.jsonl hold it as ``diagnostics/<what>/layer<i>/head<h>`` (`models.diagnostics`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sweeps.reports.table import Row

KEY = re.compile(r"diagnostics/(?P<what>[^/]+)/layer(?P<layer>\d+)/head(?P<head>\d+)")
TITLES = {
    "half_life": "half-life of what is stored, tokens",
    "effective_rank": "effective rank of the state",
    "cg_steps": "solver steps per token",
    "state_norm": "norm of the state",
    "gate_local": "gate of a token's own key and value",
    "gate_memory": "gate of the memory",
}
"""What is drawn, in this order; by quarters of the context is in metrics.jsonl."""

LOGARITHMIC = ("half_life", "state_norm")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    title: str
    logarithmic: bool
    by_mixer: dict[str, list[list[float]]]  # label -> for each layer a number for each head, mean over seeds


def findings(rows: Sequence[Row]) -> list[Finding]:
    """All that every run of some mixer has, from its last row with diagnostics."""
    values = {row.label: _by_what([_last(run.rows) for run in row.entry.runs]) for row in rows}
    return [
        Finding(what, title, what in LOGARITHMIC, having)
        for what, title in TITLES.items()
        if (having := {label: found[what] for label, found in values.items() if what in found})
    ]


def _last(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    for row in reversed(rows):
        found = {key: value for key, value in row.items() if KEY.fullmatch(key)}
        if found:
            return found
    return {}


def _by_what(runs: Sequence[Mapping[str, float]]) -> dict[str, list[list[float]]]:
    """Mean over seeds; what one of the runs lacks is left out."""
    out: dict[str, dict[int, dict[int, float]]] = {}
    for key in runs[0] if runs else ():
        match = KEY.fullmatch(key)
        if match and all(key in run for run in runs):
            layers = out.setdefault(match["what"], {})
            layers.setdefault(int(match["layer"]), {})[int(match["head"])] = float(np.mean([run[key] for run in runs]))
    # A hybrid has layers without such a thing: they stay empty, so that layers keep their places.
    return {
        what: [[layers[i][h] for h in sorted(layers.get(i, {}))] for i in range(max(layers) + 1)]
        for what, layers in out.items()
    }


def plain(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """For report.json."""
    return [{"what": one.what, "title": one.title, "mixers": one.by_mixer} for one in found]
