"""The backbone that all mixers share: pre-norm blocks of a mixer and an MLP, Llama-2 style by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixers.base import Context, Mixer, MixerConfig, State
from mixers.parts import ResidualLinear, RMSNorm
from models.config import Model

GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


class PlainRMSNorm(nn.Module):
    """RMS norm without a gain."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), eps=self.eps)


def make_norm(config: Model) -> nn.Module:
    """The norm that the model config names."""
    if config.norm == "layer":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps)
    if config.norm == "rms_plain":
        return PlainRMSNorm(config.d_model, config.norm_eps)
    return RMSNorm(config.d_model, eps=config.norm_eps)


class MLP(nn.Module):
    """Two linear maps around a non-linearity; gated kinds multiply two branches of the same width."""

    def __init__(self, config: Model):
        super().__init__()
        assert config.mlp_width is not None
        self.kind = config.mlp
        branches = 2 if config.mlp in GATED else 1
        self.up = nn.Linear(config.d_model, branches * config.mlp_width, bias=config.mlp_bias)
        self.down = ResidualLinear(config.mlp_width, config.d_model, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.kind in GATED:
            gate, value = self.up(x_BTD).chunk(2, dim=-1)
            return self.down(GATED[self.kind](gate) * value)
        return self.down(PLAIN[self.kind](self.up(x_BTD)))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or the other way round."""

    def __init__(self, config: Model, mixer: Mixer):
        super().__init__()
        self.mlp_first = config.order == "mlp_first"
        self.mixer_norm, self.mixer = make_norm(config), mixer
        self.mlp_norm = make_norm(config) if config.mlp != "none" else None
        self.mlp = MLP(config) if config.mlp != "none" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, state: State | None, context: Context) -> tuple[Tensor, State | None]:
        if self.mlp_first:
            x_BTD = self._add_mlp(x_BTD)
        y_BTD, state = self.mixer(self.mixer_norm(x_BTD), state, context)
        x_BTD = x_BTD + self.dropout(y_BTD)
        return (x_BTD if self.mlp_first else self._add_mlp(x_BTD)), state

    def _add_mlp(self, x_BTD: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x_BTD
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Trace(NamedTuple):
    """What comes out of a stack of blocks."""

    last_BTD: Tensor  # the residual stream after the last block, before any norm
    source_BTD: Tensor | None  # the same after the block that was asked for
    states: list[State] | None  # of each block, where states went in


class Stack(nn.Module):
    """Blocks and, where the model has them, the scalars that weigh the residual stream between them."""

    def __init__(self, config: Model, mixer: MixerConfig, n_layers: int, activation_checkpointing: bool = False):
        super().__init__()
        self._build(config, mixer, n_layers, activation_checkpointing)

    def _build(self, config: Model, mixer: MixerConfig, n_layers: int, activation_checkpointing: bool) -> None:
        self.config, self.recompute = config, activation_checkpointing
        self.blocks = nn.ModuleList(
            Block(config, mixer.for_layer(i).build(i, config.n_layers)) for i in range(n_layers)
        )
        if config.residual_scalars:
            self.keep_L = nn.Parameter(torch.empty(n_layers))  # weight of the residual stream before block l
            self.input_L = nn.Parameter(torch.empty(n_layers))  # weight of the embedding before block l

    @property
    def layers(self) -> list[Block]:
        """The blocks, in order."""
        return cast(list[Block], list(self.blocks))

    def run(
        self,
        embedded_BTD: Tensor,
        states: list[State] | None,
        context: Context,
        *,
        scalars: tuple[Tensor, Tensor] | None = None,
        memory_gain_L: Tensor | None = None,
        source: int | None = None,
        stop: int | None = None,
    ) -> Trace:
        """Through the blocks, up to block ``stop`` where it is given.

        Args:
            embedded_BTD: what enters the first block.
            states: one of each block, or None in training.
            context: for all mixers.
            scalars: (keep_L, input_L) in place of the stack's own.
            memory_gain_L: weights with which ``context.memory`` is added to the stream before each block.
            source: also return the stream after this many blocks.
        """
        if scalars is None and self.config.residual_scalars:
            scalars = self.keep_L, self.input_L
        x_BTD, source_BTD = embedded_BTD, None
        after: list[State] = []
        for i, block in enumerate(self.layers[:stop]):
            if scalars is not None:
                x_BTD = scalars[0][i] * x_BTD + scalars[1][i] * embedded_BTD
            if memory_gain_L is not None and context.memory is not None:
                x_BTD = x_BTD + memory_gain_L[i] * context.memory.state_BTD
            state = None if states is None else states[i]
            if self.recompute and self.training and torch.is_grad_enabled():
                x_BTD, state = checkpoint(block, x_BTD, state, context, use_reentrant=False)
            else:
                x_BTD, state = block(x_BTD, state, context)
            if state is not None:
                after.append(state)
            if i + 1 == source:
                source_BTD = x_BTD
        return Trace(x_BTD, source_BTD, after if states is not None else None)


class Backbone(Stack):
    """Embedding, blocks and final norm: tokens (B, T) to features (B, T, D).

    With ``input_width`` F the inputs are F real numbers at each position (B, T, F), and a linear map takes them in.
    """

    def __init__(
        self,
        config: Model,
        mixer: MixerConfig,
        vocab_size: int,
        activation_checkpointing: bool = False,
        input_width: int | None = None,
    ):
        nn.Module.__init__(self)  # not Stack's: parts are listed in the order in which they run
        self.embed: nn.Embedding | nn.Linear
        if input_width is None:
            self.embed = nn.Embedding(vocab_size, config.d_model)
        else:
            self.embed = nn.Linear(input_width, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self._build(config, mixer, config.n_layers, activation_checkpointing)
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, D): what enters the first block."""
        config = self.config
        x_BTD = self.embed(tokens_BT)
        if config.embed_scale and isinstance(self.embed, nn.Embedding):
            x_BTD = x_BTD * config.d_model**0.5
        if config.embed_norm:
            x_BTD = F.rms_norm(x_BTD, (config.d_model,), eps=config.norm_eps)
        return self.dropout(x_BTD)

    def forward(
        self, tokens_BT: Tensor, states: list[State] | None, context: Context
    ) -> tuple[Tensor, list[State] | None]:
        """``states``: one of each block, or None in training; returned updated."""
        trace = self.run(self.embedded(tokens_BT), states, context)
        return self.final_norm(trace.last_BTD), trace.states
