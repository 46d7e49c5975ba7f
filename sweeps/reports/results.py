"""Results of evaluation suites as a report keeps them: ``eval/<suite>-<hash>.json`` of a run folder, thinned and public.

A compact record holds, for each, ``suite``, ``settings``, ``step``, ``modes``, ``metrics``, ``reasons`` (metric -> why there
is no figure), ``tables`` with what the report's figures need, and of speed the ``hardware``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from evals.names import mode_of
from runs.identity import canonical

Result = dict[str, Any]

MOST_SEQUENCES = 128
"""Of a paired comparison: longer lists are kept as means of neighbours, which changes no mean and hardly an interval."""

FOLDERS = re.compile(r"(?<![\w.~-])~?(?:/[\w.+@-]+)+/")
"""The folders of absolute paths: they name machines and people."""


class DamagedResult(ValueError):
    """One sentence: which file, and what is wrong with it."""


def read_results(folder: Path) -> list[Result]:
    """All results of a run folder, thinned, in the order of suite, step and settings."""
    found: dict[str, Result] = {}
    for path in sorted((folder / "eval").glob("*.json")):
        try:
            one = thinned(json.loads(path.read_text()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DamagedResult(
                f"{path}: no whole result of a suite ({type(error).__name__}: {error}); delete it, and eval.py makes it anew"
            ) from None
        found.setdefault(f"{one['suite']} {one['step']:012d} {canonical(one['settings'])}", one)
    last = max((one["step"] for one in found.values()), default=0)
    for one in found.values():
        if one["step"] < last:
            one["tables"] = {}  # figures are of the last checkpoint
    return [found[key] for key in sorted(found)]


def thinned(content: dict[str, Any]) -> Result:
    """A result file's content without what a report has no use for. A run that was compared with another while it was
    evaluated has the same figures as one that was not: reports pair runs themselves."""
    settings = {key: value for key, value in content["settings"].items() if key != "reference"}
    deployed = content["modes"][0]
    metrics, reasons = {}, {key: _public(reason) for key, reason in content["reasons"].items()}
    for key, value in content["metrics"].items():
        if key == "difference" and "reference" in content["settings"]:
            continue
        if mode_of(key, [deployed])[0] is not None:
            continue  # a second name of the figure without a mode
        metrics[key] = _rounded(value)
        if value is not None and metrics[key] is None:
            reasons[key] = "not a finite number"
    return {
        "suite": content["suite"],
        "settings": _public(settings),
        "step": content["step"],
        "modes": content["modes"],
        "metrics": metrics,
        "reasons": reasons,
        "tables": _tables(content["suite"], content["tables"], deployed),
        **({"code": content["code"]} if "code" in content else {}),  # the earliest results have none
        **({"hardware": content["hardware"]} if content["suite"] == "speed" else {}),
    }


def _tables(suite: str, tables: dict[str, Any], deployed: str) -> dict[str, Any]:
    if suite == "positions" and deployed in tables:
        kept = tables[deployed]
        return {"edges": kept["edges"], "sequences": _blocks(kept["sequences"])}
    if suite == "speed":
        return {"rows": [{key: _rounded(value) for key, value in row.items()} for row in tables["rows"]]}
    return {"chance": tables["chance"]} if "chance" in tables else {}


def _blocks(rows: list[list[float | None]]) -> list[list[float | None]]:
    """(N, ranges), at most `MOST_SEQUENCES` rows: means over neighbours, without those that have no figure there."""
    values = np.array(rows, dtype=np.float64)
    out = []
    for block in np.array_split(values, min(len(values), MOST_SEQUENCES)):
        known = ~np.isnan(block)
        count = known.sum(axis=0)
        total = np.where(known, block, 0.0).sum(axis=0)
        out.append([_rounded(t / n) if n else None for t, n in zip(total, count, strict=True)])
    return out


def _rounded(value: float | None) -> float | None:
    """Seven digits: far below what seeds change. None for what is no finite number."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _public(value: Any) -> Any:
    """Without the folders of one machine, at any depth."""
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: _public(child) for key, child in value.items()}
    return [_public(child) for child in value] if isinstance(value, list) else value
