"""Causal softmax attention with rotary positions: the Transformer of the MesaNet comparison (baselines 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixers import register
from mixers.base import NO_CONTEXT, Context, Knob, Mixer, MixerConfig, State
from mixers.kernels import chosen
from mixers.ops.attention import attention, init_attention_state
from mixers.parts import CONV_ON, FusedLinear, ResidualLinear, ShortConv, rms_normalise, rotary


@register
@dataclass
class TransformerConfig(MixerConfig):
    """Multi-head attention: q, k, v and o projections of d_model x H K each, no biases.

    ``conv_on``: the short convolution and SiLU that the linear family has, so that it can be told from the state rule.
    """

    kind: str = "transformer"
    qk_norm: bool = False
    rope_base: float = 10_000.0
    conv_on: str = "none"
    conv_width: int = 4

    window: ClassVar[int | None] = None
    state_knob: ClassVar[Knob | str] = (
        "its keys and values are as many as the tokens, and a shorter window is mixer=swa"
    )

    def check(self, path: str) -> None:
        if self.head_dim % 2:
            raise ValueError(f"{path}.head_dim={self.head_dim}: rotary positions turn pairs, so it must be even")
        if self.rope_base <= 1:
            raise ValueError(f"{path}.rope_base={self.rope_base}: must be above 1 (10000 is usual)")
        if self.conv_on not in CONV_ON:
            raise ValueError(f"{path}.conv_on={self.conv_on}: must be one of {', '.join(CONV_ON)}")
        if self.conv_width < 1:
            raise ValueError(
                f"{path}.conv_width={self.conv_width}: must be at least 1 (4 is usual; conv_on=none is off)"
            )

    def conv_channels(self) -> int:
        """Channels that pass the short convolution."""
        return {"none": 0, "qk": 2, "qkv": 3}[self.conv_on] * self.n_heads * self.head_dim

    def n_parameters(self) -> int:
        return 4 * self.d_model * self.n_heads * self.head_dim + self.conv_width * self.conv_channels()

    def takes_value_embeds(self) -> bool:
        return True

    def accessories(self) -> dict[str, str]:
        conv = "none" if self.conv_on == "none" else f"width {self.conv_width} on {', '.join(self.conv_on)}"
        return {
            "short convolution": conv,
            "positions": f"rotary, base {self.rope_base:g}",
            "q/k norm": "rms" if self.qk_norm else "none",
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return SoftmaxAttention(self)


class SoftmaxAttention(Mixer):
    """o_t = sum_j softmax_j(q_t . k_j / sqrt(K)) v_j over the last ``window`` keys (all where it is None)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        inner = config.n_heads * config.head_dim
        self.qkv = FusedLinear(config.d_model, (inner,) * 3, bias=False)
        self.conv = ShortConv(config.conv_channels(), config.conv_width) if config.conv_on != "none" else None
        self.out = ResidualLinear(inner, config.d_model, bias=False)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        context, config = context or NO_CONTEXT, self.config
        batch, steps, _ = x_BTD.shape
        qk_BTHK, v_BTHK = self.qkv(x_BTD).view(batch, steps, -1, config.head_dim).tensor_split((2 * config.n_heads,), 2)
        if context.value_BTHV is not None:
            v_BTHK = v_BTHK + context.value_BTHV
        tail_BJD = None
        if self.conv is not None:
            past, own_heads = None if state is None else state["conv"], 2 * config.n_heads
            through = qk_BTHK if config.conv_on == "qk" else torch.cat((qk_BTHK, v_BTHK), dim=2)
            mixed_BTD, tail_BJD = self.conv(through.flatten(2), past, context.segment_ids)
            through = mixed_BTD.view_as(through)
            qk_BTHK, v_BTHK = through[:, :, :own_heads], v_BTHK if config.conv_on == "qk" else through[:, :, own_heads:]
            state = None if state is None else {key: value for key, value in state.items() if key != "conv"}
        if config.qk_norm:
            qk_BTHK = rms_normalise(qk_BTHK)
        positions = context.positions
        if positions is None:
            # Only distances matter and documents never see each other: counting on over a border is harmless.
            first = 0 if state is None else int(state["length"][0])
            positions = torch.arange(first, first + steps, device=x_BTD.device)
        q_BTHK, k_BTHK = rotary(qk_BTHK, positions, config.rope_base).chunk(2, dim=2)
        o_BTHK, state = chosen(attention, q_BTHK)(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            window=config.window,
            segment_ids=context.segment_ids,
            initial_state=state,
            donate_state=context.donate_state,
        )
        if state is not None and tail_BJD is not None:
            state = {**state, "conv": tail_BJD}
        return self.out(o_BTHK.flatten(2)), state

    def init_parameters(self, generator: torch.Generator) -> None:
        if self.conv is not None:
            self.conv.init_parameters(generator)

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        state = init_attention_state(
            batch_size, max_len, c.n_heads, c.head_dim, c.head_dim, window=c.window, device=device, dtype=dtype
        )
        if self.conv is not None:
            state["conv"] = torch.zeros(batch_size, c.conv_width - 1, c.conv_channels(), device=device, dtype=dtype)
        return state

    def cell_flops_per_token(self, seq_len: int) -> float:
        """4 K per query and key in reach; min(t, W) keys for query t. And the short convolution."""
        c = self.config
        reach = min(c.window or seq_len, seq_len)
        keys = reach - reach * (reach - 1) / (2 * seq_len)  # mean over t of min(t, reach)
        return 4 * c.n_heads * c.head_dim * keys + 2 * c.conv_width * c.conv_channels()

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Keys and values of the tokens in reach, and the convolution's tail."""
        c = self.config
        cached = 2 * min(c.window or seq_len, seq_len) * c.n_heads * c.head_dim
        return (cached + (c.conv_width - 1) * c.conv_channels()) * dtype.itemsize
