"""A progress bar with loss, tokens per second and the time left. Where there is no terminal: a line now and then."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from models.module import TrainingModule
from runs.schema import Config


class Progress(Callback):
    """Counts optimizer steps in tokens. Refreshed a few times a second, so it costs a step next to nothing."""

    def __init__(self, config: Config, name: str):
        self.config, self.name = config, name
        self.bar: tqdm | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.config.steps is not None
        terminal = sys.stderr.isatty()
        per_step = self.config.tokens_per_step
        self.bar = tqdm(
            total=self.config.steps * per_step,
            initial=trainer.global_step * per_step,
            desc=self.name,
            unit="tok",
            unit_scale=True,
            mininterval=0.5 if terminal else 20,
            ascii=not terminal,
            dynamic_ncols=terminal,
            bar_format="{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} tok, {rate_fmt}, {remaining} left{postfix}",
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.bar is not None and (batch_idx + 1) % self.config.accumulate == 0:
            step = trainer.global_step
            if step % 20 == 0:
                assert isinstance(pl_module, TrainingModule)
                self.bar.set_postfix_str(f"loss {float(pl_module.step_loss):.3f}", refresh=False)
            self.bar.update(self.config.tokens_per_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
