"""Initial weights. Every parameter is drawn from a generator of its own, seeded by (seed, name): what two models share
(embedding, MLPs, projections of equal name) starts from the same numbers, whatever their mixers are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from data.randomness import key
from mixers.base import Mixer
from mixers.parts import ResidualLinear
from models.backbone import Backbone, Stack, ValueGate
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


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(key("init", seed, name))


@torch.no_grad()
def initialise_part(part: nn.Module, config: Model, seed: int, prefix: str = "") -> None:
    """Draw a part of a model: linear maps, norms, residual scalars; last what a mixer draws itself (its
    ``init_parameters``), which nothing overwrites. ``prefix`` stands before the names that seed the draws."""
    for name, module in part.named_modules(prefix=prefix):
        if isinstance(module, ValueGate):
            module.weight.zero_()  # each gate is 1
        elif isinstance(module, nn.Linear):
            std = _linear_std(config, module.in_features)
            if isinstance(module, ResidualLinear):
                std *= _residual_factor(config)
            _draw(module.weight, config, std, _generator(seed, name))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Stack) and config.residual_scalars:
            module.keep_L.fill_(1.0)
            module.input_L.fill_(initial_input_scalar(config))
    for name, module in part.named_modules(prefix=prefix):
        if isinstance(module, Mixer):
            module.init_parameters(_generator(seed, f"{name}.own"))


def initial_input_scalar(config: Model) -> float:
    """What the weight of the embedding before each block starts from."""
    return 0.1 if config.init == "nanochat" else 0.0


@torch.no_grad()
def initialise(backbone: Backbone, head: nn.Linear | None, seed: int) -> None:
    """Draw all weights."""
    config = backbone.config
    initialise_part(backbone, config, seed)
    for layer, table in (backbone.value_embeds or {}).items():  # like the values that they are added to
        assert isinstance(table, nn.Embedding)
        std = _linear_std(config, config.d_model)
        _draw(table.weight, config, std, _generator(seed, f"value_embeds.{layer}"))
    if isinstance(backbone.embed, nn.Linear):  # real numbers of unit variance, to a stream of unit variance
        backbone.embed.weight.normal_(0, 1, generator=_generator(seed, "embed")).mul_(backbone.embed.in_features**-0.5)
        assert head is not None
        head.weight.normal_(0, 1, generator=_generator(seed, "head")).mul_(_linear_std(config, config.d_model))
        return
    # The embedding: unit variance at the input, after its scale where it has one.
    std = {
        "fan_in": config.d_model**-0.5 if config.embed_scale or config.tied else 1.0,
        "normal": config.init_std,
        "kaiming": 1.0,
        "nanochat": 1.0,
    }[config.init]
    backbone.embed.weight.normal_(0, 1, generator=_generator(seed, "embed")).mul_(std)
    if head is not None:
        std = 0.001 if config.init == "nanochat" else _linear_std(config, config.d_model)
        head.weight.normal_(0, 1, generator=_generator(seed, "head")).mul_(std)
