"""RetNet (arXiv 2307.08621): linear attention with rotary positions and one fixed decay per head (baselines 3.12).

S <- gamma_h S + k v^T,  gamma_h = 1 - 2^(-5-h);   o = S^T q / sqrt(K), normed per head and gated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixers import register
from mixers.base import Mixer, State
from mixers.linear import linear_attention, linear_attention_flops
from mixers.linear_frame import LinearFrame, LinearFrameConfig


@register
@dataclass
class RetNetConfig(LinearFrameConfig):
    """The defaults are the authors' layer, not the matched one: no convolution, values twice as wide, output gate."""

    kind: str = "retnet"
    expand_v: float = 2.0
    conv_on: str = "none"
    qk_norm: str = "none"
    output_gate: str = "silu"
    positions: str = "rotary"
    fastest_power: float = 5.0

    def check(self, path: str) -> None:
        super().check(path)
        if self.fastest_power <= 0:
            raise ValueError(f"{path}.fastest_power={self.fastest_power}: must be above 0 (5: head 0 keeps 31/32)")

    def accessories(self) -> dict[str, str]:
        return {**super().accessories(), "gates": f"none; fixed decay 1 - 2^-({self.fastest_power:g}+h)"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return RetNet(self)


class RetNet(LinearFrame):
    """The linear frame around a sum that decays at a fixed rate."""

    config: RetNetConfig

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        c = self.config
        decay = [math.log1p(-(2 ** -(c.fastest_power + h))) for h in range(c.n_heads)]
        wide = torch.promote_types(q_BTHK.dtype, torch.float32)
        g_BTH = torch.tensor(decay, dtype=wide, device=q_BTHK.device).expand(q_BTHK.shape[:3])
        self.observe("log_decay", g_BTH)
        o_BTHV, matrix = linear_attention(q_BTHK, k_BTHK, v_BTHV, g_BTH, state, segment_ids, c.key_dim**-0.5)
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        c = self.config
        return linear_attention_flops(c.n_heads, c.key_dim, c.value_dim, seq_len) + self.conv_flops_per_token()
