"""A leaderboard as JSON, and the compact records from which it can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runs.folder import write_atomic
from sweeps.reports import budget, diagnostics, evaluations, failures, scaling, slices, wording
from sweeps.reports.collect import compact, compact_folder, is_private
from sweeps.reports.compare import Comparison, Estimate
from sweeps.reports.table import Board, Row


def report_json(board: Board, command: str) -> dict[str, Any]:
    """The whole report as plain values."""
    return {
        "study": board.study,
        "description": board.description,
        "finding": wording.sentences(board),
        "metric": board.metric,
        "unit": board.unit,
        "lower_is_better": board.lower_is_better,
        "reference": board.reference,
        "comparison_key": board.proof.comparison_key,
        "rows": [one for row in board.rows for one in (_row(row, board), *_other_rows(row, board))],
        "slices": slices.plain(board.slices),
        "positions": {row.label: [run.positions for run in row.entry.runs] for row in board.rows if _placed(row)},
        **({"drift": apart} if (apart := _drift(board)) else {}),
        "diagnostics": diagnostics.plain(diagnostics.findings(board.rows)),
        "equal_flops": budget.plain(board.equal_flops),
        **({"evaluations": evaluations.plain(board.evaluations)} if board.evaluations else {}),
        **({"scaling": scaling.plain(found)} if (found := scaling.find(board)) else {}),
        "yardstick": None
        if board.bar is None
        else {
            "name": board.bar.name,
            "bits_per_byte": board.bar.bits_per_byte,
            board.metric: board.bar.value,
            "train_bytes": board.bar.train_bytes,
        },
        "proof": {
            "comparison_key": board.proof.comparison_key,
            "shared_code": board.proof.shared_code,
            "mixer_code": board.proof.mixer_code,
            "data_fingerprint": board.proof.fingerprint,
            "equal": board.proof.equal,
            "moved": board.proof.moved,
            "free": board.proof.free,
        },
        "warnings": board.warnings,
        "unfinished": [dict(zip(("run", "state", "why"), item, strict=True)) for item in board.unfinished],
        "failures": failures.plain(board.incidents),
        "command": command,
        "made_by": board.distinct("command"),
        "commits": board.distinct("commit"),
        "hardware": board.distinct("hardware"),
        "versions": board.distinct("versions"),
        "seconds": round(board.seconds, 1),
    }


def _drift(board: Board) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By mode and mixer, for each run: how far the memories of a two-pass model's passes are apart, by position."""
    rows = [row for row in board.rows if all("drift" in run.record for run in row.entry.runs)]
    out: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for mode, key in (("recurrent", "recurrent"), ("teacher-forced", "teacher_forced")):
        for row in rows:
            found = [run.record["drift"] for run in row.entry.runs]
            out.setdefault(mode, {})[row.label] = [
                {"edges": one["edges"], "mean": one[key], "train_length": one["train_length"]} for one in found
            ]
    return out


def _placed(row: Row) -> bool:
    return all(run.positions is not None for run in row.entry.runs)


def _row(row: Row, board: Board) -> dict[str, Any]:
    runs = row.entry.runs
    return {
        "rank": row.rank,
        "mixer": row.label,
        "mode": row.mode,
        "metric": board.metric,
        "unit": board.unit,
        "n": row.estimate.n,
        "mean": row.estimate.mean,
        "ci95": row.estimate.ci95,
        "interval_over": row.estimate.over,
        "values": [run.metrics[board.metric] for run in runs],
        "seeds": [list(run.seeds) for run in runs],
        "runs": [run.name for run in runs],
        "difference": _difference(row.comparison),
        "beats_yardstick": row.beats_yardstick,
        "yardstick_difference": _difference(row.yardstick),
        "params": row.count("params"),
        "params_non_embedding": row.count("params_non_embedding"),
        "flops_per_token": row.count("flops_per_token"),
        "tokens": row.count("tokens"),
        "train_flops": row.count("train_flops"),
        "state_bytes": row.count("state_bytes"),
        "tokens_per_s": row.tokens_per_s,
        "point": row.entry.point,
        "trials": [{"point": t.point, "value": t.value, "chosen": t.chosen} for t in row.entry.trials],
        "at_edge": row.entry.at_edge,
        "match": runs[0].match,
        "spikes": row.spikes,
        "diverged": row.diverged,
        "accessories": runs[0].record.get("accessories", {}),
    }


def _other_rows(row: Row, board: Board) -> list[dict[str, Any]]:
    """The same runs in another mode: without a rank."""
    return [
        {
            "rank": None,
            "mixer": row.label,
            "mode": other.mode,
            "metric": board.metric,
            "unit": board.unit,
            "n": other.estimate.n,
            "mean": other.estimate.mean,
            "ci95": other.estimate.ci95,
            "interval_over": other.estimate.over,
            "minus_deployed": None if other.gap is None else {"mean": other.gap.mean, "ci95": other.gap.ci95},
        }
        for other in row.others
    ]


def _difference(c: Comparison | None) -> dict[str, Any] | None:
    """None for the reference itself."""
    if c is None:
        return None
    return {
        "reference": c.reference,
        "pairs": c.pairs,
        "over_seeds": _estimate(c.seeds),
        "over_documents": _estimate(c.documents),
        "p": c.p,
        "p_holm": c.p_holm,
        "verdict": c.verdict,
        "note": c.note,
        "seeds_needed": c.seeds_needed,
        "detectable": c.detectable,
    }


def _estimate(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else {"mean": e.mean, "ci95": e.ci95, "n": e.n, "p": e.p, "sd": e.sd}


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def write_compact(board: Board, results: Path, study_json: dict[str, Any] | None) -> Path:
    """The compact records of all runs of a study, and the study's own record beside them; records of runs that are no
    longer there are removed. Returns the folder."""
    folder = compact_folder(results, board.study)
    in_table = {run.name for run in board.runs}
    for run in board.all_runs:
        write_json(folder / f"{run.name}.json", compact(run, bulk=run.name in in_table), indent=None)
    names = {f"{run.name}.json" for run in board.all_runs}
    for stale in folder.glob("*.json"):
        if stale.name not in names:
            stale.unlink()
    if study_json:
        overrides = [word for word in study_json.get("overrides", []) if not is_private(word)]
        write_json(folder.parent / "study.json", {**study_json, "overrides": overrides})
    return folder
