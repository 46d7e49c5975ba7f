"""The Lightning module: one optimizer step of the language model, the same for every mixer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from data.dataset import Batch, Dataset
from data.randomness import key
from models.guard import NotFinite, locate
from models.lm import LanguageModel
from models.optim import learning_rate, make_optimizer, set_ramps

if TYPE_CHECKING:
    from runs.schema import Config


class MicroBatches:
    """The micro batches of one process from a step on. Each is a pure function of (seed, step, micro, rank)."""

    def __init__(self, dataset: Dataset, config: Config, first_step: int, rank: int, world: int):
        self.dataset, self.config, self.first_step, self.rank, self.world = dataset, config, first_step, rank, world

    def __iter__(self) -> Iterator[Batch]:
        rows, step = self.config.trainer.micro_batch, self.first_step
        assert rows is not None
        while True:
            for micro in range(self.config.accumulate):
                start = (micro * self.world + self.rank) * rows
                yield self.dataset.train_batch(step, slice(start, start + rows))
            step += 1


class TrainingModule(L.LightningModule):
    """Loss, randomness, optimizer and data of a run.

    ``self.log`` is not used: it costs a part of a millisecond at each step and repeats old values. The step's callback
    (`runs/steps.py`) reads ``step_loss`` and ``grad_norm`` instead.
    """

    def __init__(self, model: LanguageModel, config: Config, dataset: Dataset):
        super().__init__()
        self.model, self.config, self.dataset = model, config, dataset
        self.step_loss: Tensor = torch.zeros(())  # what is minimised, of this process's rows so far, in this step
        self.step_terms: dict[str, Tensor] = {}
        self.grad_norm: Tensor = torch.zeros(())

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        micro = batch_index % self.config.accumulate
        self._batch = batch
        self.reseed(micro)
        loss, terms = self.model.loss(batch, self.global_step)
        if micro == 0:
            self.step_loss, self.step_terms = loss.detach(), terms
        else:
            self.step_loss = self.step_loss + loss.detach()
            self.step_terms = {name: self.step_terms[name] + value for name, value in terms.items()}
        # The loss is this part's share of the global batch's mean. Lightning divides by the micro batches, and data
        # parallelism averages over processes: both are undone here, so that the parts simply add up.
        return loss * (self.config.accumulate * self.trainer.world_size)

    def reseed(self, micro: int) -> None:
        """Make all randomness of a micro batch (dropout) a function of (seed, step, micro, rank): resuming needs no
        generator state, and validation cannot disturb training."""
        seed = key("dropout", self.config.init_seed, self.global_step, micro, self.global_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip by the global norm. What is not finite stops the run here, before it reaches the weights.

        Reading the norm makes the CPU wait for the device once a step; in return the last checkpoint is always good.
        """
        limit = self.config.optimizer.clip or float("inf")
        sharded = getattr(self.trainer.strategy.model, "clip_grad_norm_", None)  # FSDP knows the norm over its shards
        if sharded is not None:
            self.grad_norm = sharded(limit)
        else:
            parameters = [p for p in self.parameters() if p.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not bool(torch.isfinite(self.grad_norm) & torch.isfinite(self.step_loss)):
            raise NotFinite(
                f"step {self.global_step + 1}: loss {float(self.step_loss):g}, gradient norm {float(self.grad_norm):g}; "
                f"{locate(self, self._batch)}"
            )
        if sharded is None and self.config.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, self.grad_norm)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.config.steps is not None
        set_ramps(optimizer, self.config.optimizer, self.global_step, self.config.steps)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.config.optimizer, self.config.precision)
        assert self.config.steps is not None
        steps, schedule = self.config.steps, self.config.schedule
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(schedule, step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> MicroBatches:
        """Called after a checkpoint is restored, so ``global_step`` is where the stream must go on."""
        return MicroBatches(
            self.dataset, self.config, self.global_step, self.trainer.global_rank, self.trainer.world_size
        )
