"""Which kernels a run uses: asks the model what it does, has that checked on the device, and says what to record."""

from __future__ import annotations

import os
from typing import Any

import torch

from data.dataset import Dataset
from mixers import kernels
from models.lm import LanguageModel
from runs.schema import Config
from runs.validate import ConfigError

TOKENS = 32  # of the pass that shows what the model does; lengths decide nothing there


def choose_kernels(config: Config, model: LanguageModel, dataset: Dataset, **options: Any) -> dict[str, Any]:
    """Put kernels to use as ``trainer.kernels`` says; on CPUs and with ``torch`` there are none.

    ``options`` are those of ``preflight``. Returns what run.json keeps of it. Raises ConfigError, one sentence, where a
    strict run cannot have a kernel.
    """
    kernels.use({})  # an earlier run of this process may have chosen otherwise
    device: torch.device | None = options.pop("device", _device(config))
    if config.trainer.kernels == "torch" or device is None:
        return {"mode": "torch"}
    from mixers.kernels.preflight import KernelRefused, preflight

    if config.precision == "fp32":
        # Triton's default is TF32, which is not what a float32 run asks for; read when a kernel is compiled.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    autocast = torch.bfloat16 if config.precision == "bf16" else None
    calls = _what_it_does(model, dataset, autocast)
    try:
        report = preflight(calls, config.trainer.kernels, device, autocast=autocast, **options)
    except KernelRefused as refused:
        raise ConfigError(str(refused)) from None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return report


def _device(config: Config) -> torch.device | None:
    """This process's GPU; None on CPUs."""
    if config.trainer.accelerator != "gpu":
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))))


def _what_it_does(model: LanguageModel, dataset: Dataset, autocast: torch.dtype | None) -> list[kernels.Call]:
    """The operations of a short forward pass on the CPU, in the run's precision; no generator moves. In training and in
    evaluation: Mesa may solve otherwise there."""
    batch = dataset.train_batch(0, slice(0, 1))
    segments = batch.segment_ids_BT
    batch = batch._replace(
        inputs_BT=batch.inputs_BT[:, :TOKENS],
        targets_BT=batch.targets_BT[:, :TOKENS],
        segment_ids_BT=None if segments is None else segments[:, :TOKENS],
    )
    training = model.training
    precision = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None)
    with kernels.recording() as calls, torch.no_grad(), torch.random.fork_rng(devices=[]), precision:
        model.train().loss(batch)
        model.eval().loss(batch)
    model.train(training)
    return calls
