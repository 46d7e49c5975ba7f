"""Evaluations as Weights & Biases runs: a projection of the result files, as training runs are one of metrics.jsonl.

One evaluation (a run folder, its suites with their settings, its checkpoints) is one W&B run of job type ``eval``. Its id is
a hash of just these, so that the same command again goes on with the same W&B run. Errors of W&B never fail an evaluation.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.names import number, split
from runs.folder import RunFolder
from runs.identity import digest
from runs.schema import Logger
from runs.wandb_sink import quiet, tags

log = logging.getLogger(__name__)

Table = tuple[list[str], list[list[Any]]]
"""Columns and rows."""

CURVES = ("mean", "so_far", "low", "high", "n")
"""Of a table with ``edges``: one number for each range between them."""

LONGEST_TAG = 64
"""Characters; W&B refuses a run with a longer one."""


@dataclass(frozen=True)
class Evaluation:
    """What one W&B run shows: a run's record ({} for a model that was trained elsewhere) and results of its suites."""

    record: dict[str, Any]
    results: list[dict[str, Any]]  # by step

    @property
    def study(self) -> str:
        return self.record.get("study", "external")

    @property
    def id(self) -> str:
        """Equal run, suites, settings and steps, equal id."""
        facts = [[one["suite"], one["settings"], one["step"]] for one in self.results]
        who = self.record.get("run_id", self.results[0]["run"])
        return f"{self.study}-eval-{digest([who, sorted(facts, key=json.dumps)])}"

    @property
    def steps(self) -> list[int]:
        return sorted({one["step"] for one in self.results})

    @property
    def last(self) -> list[dict[str, Any]]:
        """Results of the last checkpoint: what stands in the summary."""
        return [one for one in self.results if one["step"] == self.steps[-1]]

    def config(self) -> dict[str, Any]:
        """The run's science, as its training run has it, and the suites' settings."""
        own = {"run": self.results[0]["run"], "suite": {one["suite"]: one["settings"] for one in self.results}}
        if not self.record:
            return own
        keys = {name: self.record[name] for name in ("run_id", "comparison_key")}
        return {**self.record["science"], "mixer_name": self.record["mixer"], **keys, **own}

    def rows(self) -> list[dict[str, Any]]:
        """One for each checkpoint: ``step``, ``tokens`` and all figures as ``<suite>/<metric>``."""
        counts, steps = self.record.get("counts", {}), self.record.get("science", {}).get("steps")
        out = []
        for step in self.steps:
            row: dict[str, Any] = {"step": step, "tokens": round(counts["tokens"] / steps * step) if steps else 0}
            for one in self.results:
                if one["step"] == step:
                    known = {key: value for key, value in one["metrics"].items() if value is not None}
                    row |= {f"{one['suite']}/{key}": value for key, value in known.items() if math.isfinite(value)}
            out.append(row)
        return out


def publish(folder: Path, files: Sequence[Path], logger: Logger) -> None:
    """Results of one run folder as one W&B run, under ``eval/wandb`` of it. What is there offline from an earlier time is
    replaced; online, the run is resumed by its id. Whatever goes wrong is logged and raises nothing."""
    if logger.wandb == "disabled":
        return
    try:
        quiet()
        found = sorted((json.loads(path.read_text()) for path in files), key=lambda one: one["step"])
        _send(Evaluation(RunFolder(folder).record(), found), folder / "eval", logger)
    except Exception as error:  # noqa: BLE001 - W&B raises what it likes; the record is the result files
        log.warning("W&B: %s: %s (the results are in %s)", type(error).__name__, error, folder / "eval")


def _send(evaluation: Evaluation, directory: Path, logger: Logger) -> None:
    import wandb

    if logger.wandb == "offline":
        for old in (directory / "wandb").glob(f"offline-run-*-{evaluation.id}"):
            shutil.rmtree(old)
    named = evaluation.results[0]["run"]
    run = wandb.init(
        id=evaluation.id,
        resume="allow",
        reinit="finish_previous",
        mode=logger.wandb,  # type: ignore[arg-type]
        dir=str(directory),
        project=logger.project,
        entity=logger.entity,
        group=evaluation.study,
        job_type="eval",
        name=f"{named} {', '.join(sorted({one['suite'] for one in evaluation.results}))}",
        tags=tags(evaluation.record) if evaluation.record else [named[:LONGEST_TAG]],
        config=evaluation.config(),
        settings=wandb.Settings(init_timeout=30),
    )
    try:
        run.define_metric("tokens", hidden=True)
        run.define_metric("*", step_metric="tokens")
        for row in evaluation.rows():
            if row["step"] >= run.step:  # online and resumed: earlier ones are there
                run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
        for one in evaluation.last:
            for name, (columns, rows) in tables(one).items():
                run.summary[f"tables/{one['suite']}/{name}"] = wandb.Table(columns=list(columns), data=rows)
    finally:
        run.finish()
    log.info("W&B: %s (%s)", evaluation.id, logger.wandb)


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Name -> columns and rows, of what is more than single figures: curves by position, metrics by slice, a suite's own
    rows, and why a figure does not exist (``n_a``)."""
    out: dict[str, Table] = {}
    for name, value in result["tables"].items():
        if isinstance(value, dict) and "edges" in value:
            out[name] = _by_place(value)
        elif isinstance(value, dict) and value and all(map(_is_flat, value.values())):
            columns = list(next(iter(value.values())))
            out[name] = ["name", *columns], [[key, *(row.get(c) for c in columns)] for key, row in value.items()]
        elif isinstance(value, list) and value and all(map(_is_flat, value)):
            columns = list(value[0])
            out[name] = columns, [[row.get(column) for column in columns] for row in value]
    out |= _by_slice(result["metrics"])
    if result["reasons"]:
        out["n_a"] = ["metric", "reason"], [list(pair) for pair in result["reasons"].items()]
    return out


def _is_flat(row: Any) -> bool:
    return isinstance(row, dict) and not any(isinstance(value, dict | list) for value in row.values())


def _by_place(table: dict[str, Any]) -> Table:
    """A curve over the ranges of positions between ``edges``."""
    curves = {key: table[key] for key in CURVES if key in table}
    return ["from", "to", *curves], [
        list(row) for row in zip(table["edges"][:-1], table["edges"][1:], *curves.values(), strict=True)
    ]


def _by_slice(metrics: dict[str, float | None]) -> dict[str, Table]:
    """``loss/length=512`` and ``last/length=512`` as one table ``length`` with a row for each label."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, float | None]]] = {}
    for metric, value in metrics.items():
        name, labels = split(metric)
        if labels:
            found.setdefault(tuple(labels), {}).setdefault(tuple(labels.values()), {})[name] = value
    out: dict[str, Table] = {}
    for keys, by_label in found.items():
        names = list(dict.fromkeys(name for values in by_label.values() for name in values))
        rows = [[*map(number, labels), *(values.get(name) for name in names)] for labels, values in by_label.items()]
        out["_".join(keys)] = [*keys, *names], rows
    return out
