"""Weights & Biases as a projection of metrics.jsonl. Its errors are logged and never fail a run."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

from runs.folder import RunFolder
from runs.identity import Identity
from runs.schema import Config

log = logging.getLogger(__name__)


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
        for key, value in (("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off"), ("WANDB_DISABLE_GIT", "true")):
            os.environ.setdefault(key, value)
        offline = config.logger.wandb == "offline"
        if offline:
            shutil.rmtree(folder.path / "wandb", ignore_errors=True)
        self._safely(lambda: self._start(config, identity, folder, rows if offline else []))

    def _start(self, config: Config, identity: Identity, folder: RunFolder, rows: list[dict[str, Any]]) -> None:
        import wandb

        self._run = wandb.init(
            id=f"{identity.study}-{identity.run_id}",
            resume="allow",
            reinit="finish_previous",
            mode=config.logger.wandb,  # type: ignore[arg-type]
            dir=str(folder.path),
            project=config.logger.project,
            entity=config.logger.entity,
            group=identity.study,
            job_type="train",
            name=identity.name,
            tags=[identity.mixer, f"model:{config.model.d_model}x{config.model.n_layers}"],
            config={**identity.science, "mixer_name": identity.mixer, "comparison_key": identity.comparison_key},
            settings=wandb.Settings(init_timeout=30),
        )
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="tokens")
        for row in rows:
            self.log(row)

    def _safely(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - W&B raises what it likes; the record is metrics.jsonl
            log.warning("W&B: %s: %s (the run goes on; metrics.jsonl is the record)", type(error).__name__, error)

    def log(self, row: dict[str, Any]) -> None:
        if self._run is not None:
            values = {k: v for k, v in row.items() if k != "step"}
            self._safely(lambda: self._run.log(values, step=row["step"]))

    def summary(self, values: dict[str, Any]) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.summary.update(values))

    def close(self, exit_code: int) -> None:
        if self._run is not None:
            self._safely(lambda: self._run.finish(exit_code=exit_code))


def open_sink(config: Config, identity: Identity, folder: RunFolder, rows: list[dict[str, Any]]) -> NoSink:
    """The sink that logger.wandb asks for."""
    if config.logger.wandb == "disabled":
        return NoSink()
    return WandbSink(config, identity, folder, rows)
