"""AdamW with decay groups, or Muon with AdamW groups beside it; learning rate and ramps over the steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mixers.base import Mixer
from mixers.parts import FusedLinear
from models.config import Optimizer, Schedule
from models.muon import MuonAdamW

if TYPE_CHECKING:
    from models.lm import LanguageModel

Group = dict[str, nn.Parameter]
"""Parameters by name."""


def exempt_names(model: nn.Module) -> set[str]:
    """Of all that weight decay must not touch beside vectors: embeddings, and what a mixer marks in ``no_decay``."""
    exempt = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            own = dict(module.named_parameters())
            unknown = module.no_decay() - own.keys()
            if unknown:
                raise KeyError(f"{name}.no_decay() names {sorted(unknown)}, which are no parameters of it")
            exempt |= {f"{name}.{parameter}" for parameter in module.no_decay()}
    return exempt


def decay_groups(model: nn.Module) -> tuple[Group, Group]:
    """(decayed, not decayed) parameters. Not decayed: vectors and scalars (norms, gates' biases, gains), embeddings, the
    output matrix that is tied to them, and what a mixer marks in ``no_decay``."""
    exempt = exempt_names(model)
    decayed: Group = {}
    free: Group = {}
    for name, parameter in model.named_parameters():
        (free if parameter.ndim < 2 or name in exempt else decayed)[name] = parameter
    return decayed, free


def muon_groups(model: LanguageModel) -> dict[str, Group]:
    """nanochat's groups, without empty ones. Only ``hidden`` is Muon's: the matrices of linear maps from features to
    features, which are all of ``nn.Linear`` but those to the logits and from real inputs, and but what a mixer marks in
    ``no_decay`` (gates). Convolutions, vectors, tensors of three axes and such are ``other``."""
    exempt, linear = exempt_names(model), {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    tables = model.backbone.value_embeds
    values = set() if tables is None else {id(p) for p in tables.parameters()}
    groups: dict[str, Group] = {name: {} for name in ("hidden", "embedding", "value", "head", "keep", "input", "other")}
    for name, parameter in model.named_parameters():
        if parameter is model.backbone.embed.weight:
            group = "embedding"
        elif id(parameter) in values:
            group = "value"
        elif model.head is not None and parameter is model.head.weight:
            group = "head"
        elif name.endswith(("keep_L", "input_L")):  # the scalars of the residual stream, of either pass
            group = "keep" if name.endswith("keep_L") else "input"
        else:
            group = "hidden" if name in linear and name not in exempt else "other"
        groups[group][name] = parameter
    return {name: group for name, group in groups.items() if group}


def parameter_groups(model: LanguageModel, config: Optimizer) -> dict[str, Group]:
    """The optimizer's groups: every parameter once."""
    if config.kind == "muon":
        return muon_groups(model)
    return dict(zip(("decayed", "not decayed"), decay_groups(model), strict=True))


def group_counts(model: LanguageModel, config: Optimizer) -> dict[str, int]:
    """How many numbers each group of the optimizer holds; works on the meta device."""
    return {name: sum(p.numel() for p in g.values()) for name, g in parameter_groups(model, config).items()}


def make_optimizer(model: LanguageModel, config: Optimizer, precision: str = "fp32") -> torch.optim.Optimizer:
    """AdamW over the two groups, or Muon and AdamW over nanochat's. AdamW's fused kernel updates all parameters in one
    pass on CPU and CUDA; Muon's polynomials are computed in the run's ``precision``."""
    if config.kind == "muon":
        return MuonAdamW(_muon_settings(model, config), torch.bfloat16 if precision == "bf16" else None)
    decayed, free = decay_groups(model)
    groups = [
        {"params": list(decayed.values()), "weight_decay": config.weight_decay},
        {"params": list(free.values()), "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def _muon_settings(model: LanguageModel, config: Optimizer) -> list[dict[str, Any]]:
    """Each group with its own learning rate, from which the schedule starts."""
    assert config.momentum_start is not None and config.input_betas is not None
    width = 1.0 if config.tuned_width is None else (model.config.d_model / config.tuned_width) ** -0.5
    depth = 1.0 if config.tuned_depth is None else (config.tuned_depth / model.config.n_layers) ** 2
    rates: dict[str, Any] = {
        "embedding": (config.embedding_lr, width),
        "value": (config.value_lr, width),
        "head": (config.head_lr, width),
        "keep": (config.keep_lr, 1.0),
        "input": (config.input_lr, 1.0),
        "other": (config.other_lr, 1.0),
    }
    fused = {f"{name}.weight": m.parts for name, m in model.named_modules() if isinstance(m, FusedLinear)}
    out: list[dict[str, Any]] = []
    for name, group in muon_groups(model).items():
        one: dict[str, Any] = {"name": name, "params": list(group.values())}
        if name == "hidden":
            one |= {
                "kind": "muon",
                "lr": config.lr,
                "momentum": config.momentum_start,
                "weight_decay": config.weight_decay * depth,
                "first_weight_decay": config.weight_decay * depth,
                "variance_beta": config.variance_beta,
                "cautious": config.cautious,
                "steps": config.polar_steps,
                "parts": [fused.get(name, (len(p),)) for name, p in group.items()],
            }
        else:
            rate, factor = rates[name]
            one |= {
                "kind": "adamw",
                "lr": rate * factor,
                "betas": tuple(config.input_betas if name == "input" else config.betas),
                "eps": config.eps,
                "weight_decay": 0.0,
                "fused": True,  # tells torch where a loaded state's step belongs
            }
        out.append(one)
    return out


def set_ramps(optimizer: torch.optim.Optimizer, config: Optimizer, step: int, steps: int) -> None:
    """Muon's momentum and weight decay in ``step`` (from 0) of ``steps``: functions of it alone, so that a resumed run
    has the same. Momentum rises to its end in ``momentum_steps``; weight decay goes to its share of ``weight_decay_final``
    at ``steps``. Both are straight lines; nothing happens with AdamW alone."""
    if config.kind != "muon":
        return
    assert config.momentum is not None and config.momentum_start is not None and config.momentum_steps is not None
    assert config.weight_decay_final is not None
    into = min(1.0, step / config.momentum_steps) if config.momentum_steps else 1.0
    for group in optimizer.param_groups:
        if group["kind"] == "muon":
            group["momentum"] = (1 - into) * config.momentum_start + into * config.momentum
            share = 1 + (config.weight_decay_final - 1) * step / steps
            group["weight_decay"] = group["first_weight_decay"] * share


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
