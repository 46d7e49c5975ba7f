"""Weights & Biases as a projection of metrics.jsonl. Its errors are logged and never fail a run.

All that W&B is told comes from run.json and metrics.jsonl, so that `sweeps.sync` can make the same run again later.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs.folder import RunFolder
from runs.identity import Identity
from runs.schema import Config

log = logging.getLogger(__name__)

GOALS = {
    **dict.fromkeys(("loss", "bits_per_byte", "perplexity", "excess"), "min"),
    **dict.fromkeys(("accuracy", "accuracy_all"), "max"),
}
"""What is good, by the last part of a metric's name. W&B 0.31 knows no other goal than which extreme a summary keeps."""

COUNTS = ("params", "params_non_embedding", "state_bytes", "flops_per_token", "train_flops", "tokens")
"""Of run.json: what the dashboard's scatter plots are drawn over."""


class NoSink:
    """logger=none."""

    def log(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def summary(self, values: dict[str, Any]) -> None:
        """Nothing."""

    def close(self, exit_code: int) -> None:
        """Nothing."""


class WandbSink(NoSink):
    """One W&B run for one run folder, whatever was killed and resumed in between.

    Offline, the folder of an earlier attempt is replaced and the rows so far are replayed into a new one under the same
    id: every step is there once. Online, W&B resumes the run by its id.
    """

    def __init__(self, config: Config, identity: Identity, folder: RunFolder, rows: list[dict[str, Any]]):
        self._run: Any = None
        self._folder = folder
        self._axes = Axes(folder.record)
        quiet()
        offline = config.logger.wandb == "offline"
        if offline:
            shutil.rmtree(folder.path / "wandb", ignore_errors=True)
        self._safely(lambda: self._start(config, folder, rows if offline else []))

    def _start(self, config: Config, folder: RunFolder, rows: list[dict[str, Any]]) -> None:
        logger = config.logger
        self._run = begin(folder.record(), folder.path, mode=logger.wandb, project=logger.project, entity=logger.entity)
        for row in rows:
            self.log(row)

    def _safely(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - W&B raises what it likes; the record is metrics.jsonl
            log.warning("W&B: %s: %s (the run goes on; metrics.jsonl is the record)", type(error).__name__, error)

    def log(self, row: dict[str, Any]) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.log(self._axes.add(row), step=row["step"]))

    def summary(self, values: dict[str, Any]) -> None:
        if self._run is not None:
            self._safely(lambda: summarize(self._run, {**self._folder.record(), "metrics": values}))

    def close(self, exit_code: int) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.finish(exit_code=exit_code))


def open_sink(config: Config, identity: Identity, folder: RunFolder, rows: list[dict[str, Any]]) -> NoSink:
    """The sink that logger.wandb asks for."""
    if config.logger.wandb == "disabled":
        return NoSink()
    return WandbSink(config, identity, folder, rows)


# ---- from a run's record to W&B --------------------------------------------------------------------------------------


def quiet() -> None:
    """W&B neither prints nor looks into git. Set before it is imported."""
    for key, value in (("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off"), ("WANDB_DISABLE_GIT", "true")):
        os.environ.setdefault(key, value)


def wandb_id(record: dict[str, Any]) -> str:
    """One W&B run for one run."""
    return f"{record['study']}-{record['run_id']}"


def tags(record: dict[str, Any]) -> list[str]:
    """The mixer, the model's size, and the recipe where there is one."""
    model = record["science"]["model"]
    recipes = [word.partition("=")[2] for word in record.get("overrides", []) if word.startswith("experiment=")]
    return [record["mixer"], f"model:{model['d_model']}x{model['n_layers']}", *(f"recipe:{one}" for one in recipes)]


def begin(record: dict[str, Any], directory: Path, *, mode: str, project: str, entity: str | None) -> Any:
    """A W&B run of a run's record (run.json), with tokens as the axis of all its curves. Raises what W&B raises."""
    import wandb

    run = wandb.init(
        id=wandb_id(record),
        resume="allow",
        reinit="finish_previous",
        mode=mode,  # type: ignore[arg-type]
        dir=str(directory),
        project=project,
        entity=entity,
        group=record["study"],
        job_type="train",
        name=f"{record['mixer']}-{record['run_id']}",
        tags=tags(record),
        config={
            **record["science"],
            "mixer_name": record["mixer"],
            "comparison_key": record["comparison_key"],
        },
        settings=wandb.Settings(init_timeout=30),
    )
    for axis in ("tokens", "seconds", "train_flops"):
        run.define_metric(axis, hidden=True)
    run.define_metric("*", step_metric="tokens")
    for name, best in GOALS.items():
        run.define_metric(f"val/{name}", step_metric="tokens", summary=f"{best},last")
    return run


class Axes:
    """What W&B needs in every row to draw over it: seconds, which a validation's row does not have, and FLOPs."""

    def __init__(self, record: Callable[[], dict[str, Any]]):
        """``record`` gives run.json, which has the counts from the first row on."""
        self._record = record
        self._per_token: float | None = None
        self._seconds = 0.0

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of metrics.jsonl as W&B gets it; its step is told apart."""
        if self._per_token is None:
            self._per_token = self._record().get("counts", {}).get("train_flops_per_token")
        self._seconds = row.get("seconds", self._seconds)
        values = {key: value for key, value in row.items() if key != "step"}
        flops = {} if self._per_token is None else {"train_flops": row["tokens"] * self._per_token}
        return {**values, "seconds": self._seconds, **flops}


def summarize(run: Any, record: dict[str, Any]) -> None:
    """What a finished run came to: metrics, counts, and tables of slices and positions where it has them.

    Validation stands in the summary already, as its best and its last value; the plain number would replace both.
    """
    metrics = record.get("metrics", {})
    own = {key: value for key, value in metrics.items() if key not in {f"val/{name}" for name in GOALS}}
    counts = record.get("counts", {})
    speed = record.get("timing", {}).get("tokens_per_s")
    run.summary.update(
        {
            **own,
            **{f"counts/{name}": counts[name] for name in COUNTS if name in counts},
            **({} if speed is None else {"train/tokens_per_s": speed}),
        }
    )
    made = tables(record)
    if made:
        import wandb

        for name, (columns, rows) in made.items():
            run.summary[f"tables/{name}"] = wandb.Table(columns=columns, data=rows)


def tables(record: dict[str, Any]) -> dict[str, tuple[list[str | int], list[list[Any]]]]:
    """name -> columns and rows, of what has more numbers than a summary can show: ``slices`` of a task's test split, and
    loss by ``positions``."""
    out: dict[str, tuple[list[str | int], list[list[Any]]]] = {}
    rows = []
    for key, value in record.get("metrics", {}).items():
        head, _, last = key.rpartition("/")
        name, equals, label = last.partition("=")
        if head.startswith("test/") and equals and label.lstrip("-").isdigit():
            rows.append([head, name, int(label), value])
    if rows:
        out["slices"] = (["metric", "slice", "label", "value"], sorted(rows, key=lambda row: tuple(row[:3])))
    places = record.get("positions")
    if places:
        edges = places["edges"]
        spans = zip(edges[:-1], edges[1:], places["mean"], strict=True)
        out["positions"] = (["from", "to", "nats_per_token"], [list(span) for span in spans])
    return out
