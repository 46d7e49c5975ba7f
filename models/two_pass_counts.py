"""Parameters and FLOPs of two-pass models: of what is deployed, and of what training has beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mixers.maglev import InjectedAttention

if TYPE_CHECKING:
    from models.two_pass import TwoPassModel


def two_pass_counts(model: TwoPassModel, plain: dict[str, Any], seq_len: int, dtype: torch.dtype) -> dict[str, Any]:
    """``plain`` as if the decoder were any model, corrected and completed.

    ``params``, ``flops_per_token`` and ``state_bytes`` are those of the deployed decoder; with ``prefill=q_assisted`` the
    prefiller reads its prompts, so its parameters are deployed too. ``params_injection`` is what the decoder has more than
    plain attention, ``params_training_only`` what only training has. Training FLOPs per token are told by pass:
    ``train_flops_prefiller`` and ``train_flops_decoder``.
    """
    mixer, layers = model.mixer, _layers(model)
    training_only = [] if mixer.prefill == "q_assisted" else _of_prefiller(model)
    in_layers, injection = _in_layers(model), injection_parameters(model)
    dropped, injected = _size(training_only), _size(injection)
    output = 2 * model.output_matrix.numel()
    mlps = plain["flops_per_token"] - output - sum(layer.flops_per_token(seq_len) for layer in layers)
    projection = [] if model.projection is None else list(model.projection.parameters())
    decoder = plain["flops_per_token"] + 2 * _size(projection)
    prefiller = 0.0
    if mixer.training == "two_pass":
        # Blocks behind the source of the memory are not run for it, unless something else needs them.
        whole = bool(mixer.q_ce_weight) or mixer.subsets > 1 or mixer.source_layer is None
        reach = len(layers) if whole else mixer.source_layer or 0
        prefiller = sum(layer.prefiller_flops_per_token(seq_len) for layer in layers[:reach])
        prefiller += mlps * reach / len(layers) + (output if mixer.q_ce_weight else 0)
    # An extra pass needs no output; the decoder's own memory is made without a gradient, a third of a pass.
    extra = (decoder - output) * (mixer.extra_passes + bool(mixer.own_memory_prob) / 3)
    return plain | {
        "params": plain["params"] - dropped,
        "params_non_embedding": plain["params_non_embedding"] - dropped,
        "params_mixer": plain["params_mixer"] + injected - _size(in_layers),
        "params_injection": injected,
        "params_training_only": dropped,
        "params_scaling": plain["params_scaling"] - _size([p for p in [*injection, *training_only] if p.ndim > 1]),
        "flops_per_token": decoder,
        "train_flops_prefiller": 3 * prefiller,
        "train_flops_decoder": 3 * (decoder + extra),
        "train_flops_per_token": 3 * (prefiller + decoder + extra),
        "state_bytes": plain["state_bytes"] + model.config.d_model * dtype.itemsize,
    }


def injection_parameters(model: TwoPassModel) -> list[nn.Parameter]:
    """What the deployed decoder has more than plain attention."""
    own = [p for p in (model.m0_D, model.memory_gain_L, model.keep_memory_D) if p is not None]
    shared = [] if model.projection is None else list(model.projection.parameters())
    return [*own, *shared, *_in_layers(model)]


def _of_prefiller(model: TwoPassModel) -> list[nn.Parameter]:
    own = [p for p in (model.prefiller_keep_L, model.prefiller_input_L) if p is not None]
    return own if model.prefiller is None else [*model.prefiller.parameters(), *own]


def _in_layers(model: TwoPassModel) -> list[nn.Parameter]:
    parts = [part for layer in _layers(model) for part in (layer.gate, layer.projection) if part is not None]
    return [p for part in parts for p in part.parameters()]


def _layers(model: TwoPassModel) -> list[InjectedAttention]:
    return [cast(InjectedAttention, block.mixer) for block in model.backbone.layers]


def _size(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
