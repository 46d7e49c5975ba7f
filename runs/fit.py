"""Training: Lightning's loop with our stream, our step end and our checkpoints."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from data.dataset import Dataset
from models.lm import LanguageModel
from models.module import TrainingModule
from runs.checkpoints import AtomicCheckpointIO
from runs.folder import RunFolder
from runs.identity import Identity
from runs.progress import Progress
from runs.schema import Config
from runs.steps import StepEnd, handlers_put_back
from runs.wandb_sink import NoSink


def _strategy(config: Config) -> Any:
    trainer = config.trainer
    if trainer.strategy == "ddp":
        from lightning.pytorch.strategies import DDPStrategy

        backend = "gloo" if trainer.accelerator == "cpu" else "nccl"
        return DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True)
    if trainer.strategy == "fsdp":
        from lightning.pytorch.strategies import FSDPStrategy

        from models.backbone import Block

        # Whole state dicts: a checkpoint can then be read by one process, as evaluation does.
        return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full", use_orig_params=True)
    return "auto"


def fit(
    config: Config,
    model: LanguageModel,
    dataset: Dataset,
    *,
    me: Identity,
    checkpoint: Path | None,
    folder: RunFolder | None,
    sink: NoSink,
) -> StepEnd:
    """Train to ``config.steps`` from a checkpoint or from the start.

    ``folder`` is None in processes other than the first. Raises Stopped after a signal, NotFinite when a loss or a
    gradient is not finite.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    if config.trainer.compile:
        for block in model.all_blocks:
            block.compile()  # in place: the names of the weights stay as they are
    step_end = StepEnd(config, me.run_id, folder, sink, me.folder)
    callbacks: list[Any] = [step_end]
    if config.trainer.progress and folder is not None:
        callbacks.append(Progress(config, me.name))
    slurm = SLURMEnvironment.detect()
    assert config.steps is not None
    trainer = L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.nodes,
        strategy=_strategy(config),
        precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        max_steps=config.steps,
        accumulate_grad_batches=config.accumulate,
        callbacks=callbacks,
        plugins=[
            AtomicCheckpointIO(),
            SLURMEnvironment(auto_requeue=False) if slurm else LightningEnvironment(),
        ],
        default_root_dir=str(me.folder),
        logger=False,
        enable_checkpointing=False,  # ours; Lightning's would save where it must not
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    module = TrainingModule(model, config, dataset)
    with handlers_put_back():
        trainer.fit(module, ckpt_path=str(checkpoint) if checkpoint else None, weights_only=False)
    return step_end
