"""Initial weights. Every parameter is drawn from a generator of its own, seeded by (seed, name): what two models share
(embedding, MLPs, projections of equal name) starts from the same numbers, whatever their mixers are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from data.randomness import key
from mixers.base import Mixer
from mixers.parts import ResidualLinear
from models.backbone import Backbone
from models.config import Model


def _linear_std(config: Model, fan_in: int) -> float:
    return {
        "fan_in": fan_in**-0.5,
        "normal": config.init_std,
        "kaiming": math.sqrt(2 / fan_in),
        "nanochat": config.d_model**-0.5,
    }[config.init]


def _residual_factor(config: Model) -> float:
    """Factor on matrices that write to the residual stream."""
    return {
        "fan_in": math.sqrt(2 / config.n_layers),  # MesaNet: variance times 2/N
        "normal": 1 / math.sqrt(2 * config.n_layers),  # GPT-2
        "kaiming": 1.0,
        "nanochat": 0.0,
    }[config.init]


def _draw(parameter: Tensor, config: Model, std: float, generator: torch.Generator) -> None:
    if config.init == "nanochat":
        bound = math.sqrt(3) * std
        parameter.uniform_(-bound, bound, generator=generator)
    else:
        parameter.normal_(0, 1, generator=generator).mul_(std)


@torch.no_grad()
def initialise(backbone: Backbone, head: nn.Linear | None, seed: int) -> None:
    """Draw all weights; a mixer's own ``init_parameters`` comes last and is never overwritten."""
    config = backbone.config

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(key("init", seed, name))

    for name, module in backbone.named_modules():
        if isinstance(module, nn.Linear):
            std = _linear_std(config, module.in_features)
            if isinstance(module, ResidualLinear):
                std *= _residual_factor(config)
            _draw(module.weight, config, std, generator(name))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
    # The embedding: unit variance at the input, after its scale where it has one.
    std = {
        "fan_in": config.d_model**-0.5 if config.embed_scale or config.tied else 1.0,
        "normal": config.init_std,
        "kaiming": 1.0,
        "nanochat": 1.0,
    }[config.init]
    backbone.embed.weight.normal_(0, 1, generator=generator("embed")).mul_(std)
    if head is not None:
        std = 0.001 if config.init == "nanochat" else _linear_std(config, config.d_model)
        head.weight.normal_(0, 1, generator=generator("head")).mul_(std)
    if config.residual_scalars:
        backbone.keep_L.fill_(1.0)
        backbone.input_L.fill_(0.1 if config.init == "nanochat" else 0.0)
    for name, module in backbone.named_modules():
        if isinstance(module, Mixer):
            module.init_parameters(generator(f"{name}.own"))
