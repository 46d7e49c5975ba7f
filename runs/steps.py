"""What happens where an optimizer step ends, in this order: log, validate, save, stop on a signal.

A checkpoint is only ever taken here. In the middle of a step it would lose gradients; before the validation of its step
that validation would be skipped on resume; before the row of its step the row would be lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy

from data.dataset import Batch, Score
from models.diagnostics import diagnose
from models.drift import drift
from models.evaluate import autocast, batch_size, by_mode, reduce_score, score, to_device
from models.guard import Spikes
from models.module import TrainingModule
from models.optim import learning_rate
from models.two_pass import TwoPassModel
from runs.checkpoints import LAST, keep
from runs.folder import RunFolder
from runs.schema import Config
from runs.wandb_sink import NoSink

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
DIAGNOSED = 8  # windows that diagnostics look at
CLOCKS = ("seconds", "tokens_per_s")
"""Fields of a row that a resumed run does not repeat bit by bit: they measure time."""


class Stopped(Exception):
    """A signal asked the run to stop; everything is saved. The message is the signal's name."""


def _whole_weights(trainer: L.Trainer) -> contextlib.AbstractContextManager[Any]:
    """Under FSDP a model that is not called through its wrapper must have its shards put together first."""
    if isinstance(trainer.strategy, FSDPStrategy):
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert trainer.strategy.model is not None
        return FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def handlers_put_back() -> Iterator[None]:
    """Ends with the signal handlers of its start. Not a callback's work: Lightning puts back what it found before it tears
    the callbacks down, and one that put Lightning's back would have SIGTERM ignored, and the trainer kept, ever after."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


class StepEnd(Callback):
    """The only callback that writes. ``folder`` and ``sink`` are None in processes other than the first."""

    def __init__(self, config: Config, run_id: str, folder: RunFolder | None, sink: NoSink, path: Path):
        self.config, self.run_id, self.folder, self.sink, self.path = config, run_id, folder, sink, path
        self.checkpoint = str(path / "checkpoints" / LAST)
        self.spikes = Spikes()
        self.seconds = 0.0  # spent in training steps, over all attempts; validation and saving are not in it
        self.sums: dict[str, torch.Tensor] = {}  # of the loss's terms, over the steps since the last row
        self.summed = 0
        self.flag: str | None = None
        self._clock = 0.0
        self._saved = -1
        self._window = (0, 0.0)  # step and seconds at the last row

    # ---- signals: a handler only sets a flag ----

    def _on_signal(self, number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self.flag == "SIGINT":
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self.flag = name
        log.warning("%s: saving at the end of this step, then stopping", name)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the handlers after Lightning and a launcher have set theirs."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        self._saved = trainer.global_step
        self._window = (trainer.global_step, self.seconds)
        self._clock = time.perf_counter()

    # ---- the end of a step ----

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule) and self.config.steps is not None
        if (batch_idx + 1) % self.config.accumulate:
            return
        step, last = trainer.global_step, trainer.global_step == self.config.steps
        terms = self._over_processes(trainer, {"objective": pl_module.step_loss, **pl_module.step_terms})
        self.spikes.add(terms["cross_entropy"])
        self.sums = {name: value + self.sums.get(name, 0.0) for name, value in terms.items()}
        self.summed += 1
        self._tick()
        if last or step % self.config.trainer.log_every == 0:
            self._log_training(trainer, pl_module, step)
        self._tick()
        every = self.config.evaluation.every
        if last or (every and step % every == 0):
            self._validate(trainer, pl_module, step)
        if trainer.world_size > 1:
            self.flag = self._agree(pl_module.device)
        intervals = [n for n in (self.config.trainer.checkpoint_every, self.config.trainer.keep_every) if n]
        if last or self.flag or any(step % n == 0 for n in intervals):
            self._save(trainer, step)
        if self.flag and not last:
            raise Stopped(self.flag)
        self._clock = time.perf_counter()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    @staticmethod
    def _over_processes(trainer: L.Trainer, terms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The global batch's means: the processes' shares add up."""
        if trainer.world_size == 1:
            return terms
        values = torch.stack([value.float() for value in terms.values()])
        torch.distributed.all_reduce(values)
        return dict(zip(terms, values, strict=True))

    def _agree(self, device: torch.device) -> str | None:
        """All processes stop at the same step, or the others would wait for ever in the next reduction."""
        codes = [None, *(s.name for s in SIGNALS)]
        code = torch.tensor(codes.index(self.flag), device=device)
        torch.distributed.all_reduce(code, torch.distributed.ReduceOp.MAX)
        return codes[int(code)]

    def _row(self, step: int, values: dict[str, Any]) -> None:
        if self.folder is not None:
            row = {"step": step, "tokens": step * self.config.tokens_per_step, **values}
            self.folder.log(row)
            self.sink.log(row)

    def _log_training(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        since_step, since_seconds = self._window
        rate = (step - since_step) * self.config.tokens_per_step / max(self.seconds - since_seconds, 1e-9)
        self._window = (step, self.seconds)
        means = {name: float(value) / self.summed for name, value in self.sums.items()}
        values = {
            # The cross-entropy, for every mixer alike; what is minimised may hold other terms beside it.
            "train/loss": means.pop("cross_entropy"),
            "train/grad_norm": float(module.grad_norm),
            "train/learning_rate": self.config.optimizer.lr * self._share(step),
            "train/spikes": int(self.spikes.count),
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(rate, 1),
        }
        if len(means) > 1:
            values |= {f"train/{name}": value for name, value in means.items()}
        self.sums, self.summed = {}, 0
        self._row(step, values)

    def _share(self, step: int) -> float:
        """Of the peak learning rate, as applied in this step (the scheduler has moved on already)."""
        assert self.config.steps is not None
        return learning_rate(self.config.schedule, step - 1, self.config.steps)

    def _validate(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        row: dict[str, float] = {}
        for mode in module.model.modes:
            with _whole_weights(trainer):
                total = self._score(trainer, module, mode)
            row |= by_mode("val", total.metrics(), mode, module.model.modes)
        if len(module.model.modes) > 1:
            with _whole_weights(trainer), autocast(module.device, self.config.precision):
                row |= self._drift(module)
        if self.config.logger.diagnostics:
            row |= self._diagnostics(trainer, module)
        self._row(step, row)

    def _score(self, trainer: L.Trainer, module: TrainingModule, mode: str) -> Score:
        rows = batch_size(self.config.trainer, mode)
        batches = module.dataset.eval_batches("val", rows, self.config.evaluation.val_tokens)
        if trainer.world_size > 1:
            batches = itertools.islice(batches, trainer.global_rank, None, trainer.world_size)
        precision = self.config.precision
        total = score(
            module.model, module.dataset, "val", batch_size=rows, precision=precision, batches=batches, mode=mode
        )
        return reduce_score(total, module.device) if trainer.world_size > 1 else total

    def _drift(self, module: TrainingModule) -> dict[str, float]:
        """Distance of the two passes' memories and of the recurrence's, by position, in a few validation windows."""
        assert isinstance(module.model, TwoPassModel)
        batch = to_device(next(iter(module.dataset.eval_batches("val", DIAGNOSED, None))), module.device)
        found = drift(module.model, batch.inputs_BT, batch.segment_ids_BT)
        return {
            f"val/{name}/{where}": value for name, values in found.named().items() for where, value in values.items()
        }

    def _diagnostics(self, trainer: L.Trainer, module: TrainingModule) -> dict[str, float]:
        """Of a few validation windows, the same ones each time."""
        batch = to_device(next(iter(module.dataset.eval_batches("val", DIAGNOSED, None))), module.device)
        with _whole_weights(trainer), autocast(module.device, self.config.precision):
            return diagnose(module.model, batch)

    def _save(self, trainer: L.Trainer, step: int) -> None:
        if step == self._saved:
            return
        self._saved = step
        if self.folder is not None:
            self.folder.sync_metrics()
        trainer.save_checkpoint(self.checkpoint)
        if self.folder is not None and self.config.trainer.keep_every and step % self.config.trainer.keep_every == 0:
            keep(self.folder.path, step)
        if self.folder is not None:
            self.folder.set_status(step=step)

    # ---- what a checkpoint carries beside Lightning's part ----

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["run_id"] = self.run_id

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "sums": {name: value.cpu() for name, value in self.sums.items()},
            "summed": self.summed,
            "spikes": self.spikes.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.sums, self.summed = state_dict["seconds"], state_dict["sums"], state_dict["summed"]
        self.spikes.load_state_dict(state_dict["spikes"])
