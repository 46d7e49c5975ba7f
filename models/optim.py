"""AdamW with decay groups, and the learning rate over the steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from mixers.base import Mixer
from models.config import Optimizer, Schedule


def decay_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """(decayed, not decayed) parameters by name. Not decayed: vectors and scalars (norms, gates' biases, gains),
    embeddings, the output matrix that is tied to them, and what a mixer marks in ``no_decay``."""
    exempt = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            own = dict(module.named_parameters())
            unknown = module.no_decay() - own.keys()
            if unknown:
                raise KeyError(f"{name}.no_decay() names {sorted(unknown)}, which are no parameters of it")
            exempt |= {f"{name}.{parameter}" for parameter in module.no_decay()}
    decayed: dict[str, nn.Parameter] = {}
    free: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        (free if parameter.ndim < 2 or name in exempt else decayed)[name] = parameter
    return decayed, free


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """AdamW over the two groups; the fused kernel updates all parameters in one pass on CPU and CUDA."""
    decayed, free = decay_groups(model)
    groups = [
        {"params": list(decayed.values()), "weight_decay": config.weight_decay},
        {"params": list(free.values()), "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the peak learning rate in ``step`` (from 0) of ``steps``.

    Warm-up rises in a straight line and reaches 1 at step ``warmup_steps``; the last step has ``final``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    length = steps - 1 - schedule.warmup_steps
    decay = length if schedule.kind != "trapezoid" else round(length * schedule.decay_fraction)
    into = step - (steps - 1 - decay)
    progress = min(1.0, max(0.0, into / decay)) if decay > 0 else 0.0
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final + (1 - schedule.final) * shape
