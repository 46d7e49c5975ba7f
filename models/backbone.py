"""The backbone that all mixers share: pre-norm blocks of a mixer and an MLP, Llama-2 style by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixers.base import Context, Mixer, MixerConfig, State
from mixers.parts import FusedLinear, ResidualLinear, RMSNorm, wide_linear
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
        self.up = FusedLinear(config.d_model, (config.mlp_width,) * branches, bias=config.mlp_bias)
        self.down = ResidualLinear(config.mlp_width, config.d_model, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.kind in GATED:
            gate, value = self.up(x_BTD).chunk(2, dim=-1)
            return self.down(GATED[self.kind](gate) * value)
        return self.down(PLAIN[self.kind](self.up(x_BTD)))


class ValueGate(nn.Linear):
    """What a head takes of its value embedding: 2 sigmoid(W x), W zero at the start and x the first channels of the
    layer's input (nanochat)."""

    CHANNELS = 32

    def __init__(self, config: Model):
        assert config.head_dim is not None
        super().__init__(min(self.CHANNELS, config.d_model), config.n_heads, bias=False)
        self.head_dim = config.head_dim

    def forward(self, x_BTD: Tensor, rows_BTD: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, H, V) in the activations' dtype, from the layer's input and the rows of the table."""
        narrow = torch.is_autocast_enabled(x_BTD.device.type)
        dtype = torch.get_autocast_dtype(x_BTD.device.type) if narrow else x_BTD.dtype
        gate_BTH = 2 * torch.sigmoid(wide_linear(self, x_BTD[..., : self.in_features]))
        return gate_BTH[..., None].to(dtype) * rows_BTD.unflatten(-1, (-1, self.head_dim)).to(dtype)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or the other way round."""

    def __init__(self, config: Model, mixer: Mixer, value_embed: bool = False):
        super().__init__()
        self.mlp_first = config.order == "mlp_first"
        self.mixer_norm, self.mixer = make_norm(config), mixer
        self.value_gate = ValueGate(config) if value_embed else None
        self.mlp_norm = make_norm(config) if config.mlp != "none" else None
        self.mlp = MLP(config) if config.mlp != "none" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, state: State | None, context: Context, values: nn.Module | None = None
    ) -> tuple[Tensor, State | None]:
        """``values``: the table of the layer's value embedding, where it has one."""
        if self.mlp_first:
            x_BTD = self._add_mlp(x_BTD)
        input_BTD = self.mixer_norm(x_BTD)
        if self.value_gate is not None:
            assert values is not None and context.tokens is not None
            value_BTHV = self.value_gate(input_BTD, values(context.tokens))
            context = dataclasses.replace(context, value_BTHV=value_BTHV)
        if self.mixer.reads_stream:
            context = dataclasses.replace(context, stream_BTD=x_BTD)
        y_BTD, state = self.mixer(input_BTD, state, context)
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
            Block(config, mixer.for_layer(i).build(i, config.n_layers), i in config.value_layers())
            for i in range(n_layers)
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
        value_embeds: nn.ModuleDict | None = None,
        scalars: tuple[Tensor, Tensor] | None = None,
        memory_gain_L: Tensor | None = None,
        source: int | None = None,
        stop: int | None = None,
    ) -> Trace:
        """Through the blocks, up to block ``stop`` where it is given.

        Args:
            embedded_BTD: what enters the first block.
            states: one of each block, or None in training.
            context: for all mixers; where there are value embeddings, with the tokens.
            value_embeds: their tables, by the layer's number.
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
            values = value_embeds[str(i)] if value_embeds is not None and i in self.config.value_layers() else None
            if self.recompute and self.training and torch.is_grad_enabled():
                x_BTD, state = checkpoint(block, x_BTD, state, context, values, use_reentrant=False)
            else:
                x_BTD, state = block(x_BTD, state, context, values)
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
        self.value_embeds: nn.ModuleDict | None = None
        if config.value_embeds != "none":
            assert config.head_dim is not None
            width = config.n_heads * config.head_dim
            self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(vocab_size, width) for i in config.value_layers()})
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
        if self.value_embeds is not None:
            context = dataclasses.replace(context, tokens=tokens_BT)
        trace = self.run(self.embedded(tokens_BT), states, context, value_embeds=self.value_embeds)
        return self.final_norm(trace.last_BTD), trace.states
