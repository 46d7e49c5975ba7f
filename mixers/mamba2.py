"""Mamba2 in the matched form of the MesaNet comparison (arXiv 2506.05233, Table 1): S <- gamma S + k v^T;  o = S^T q / sqrt(K).

One sigmoid forget gate per head and no input gate. The authors' own layer is `mamba2_native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers import register
from mixers.base import Mixer, State
from mixers.linear import linear_attention, linear_attention_flops
from mixers.linear_frame import LinearFrame, LinearFrameConfig


@register
@dataclass
class Mamba2Config(LinearFrameConfig):
    """Forget gate sigmoid(W x + b)."""

    kind: str = "mamba2"
    decay_bias: float = 0.0

    gates: ClassVar[int] = 1

    def accessories(self) -> dict[str, str]:
        return {**super().accessories(), "gates": f"sigmoid decay, bias at start {self.decay_bias:g}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Mamba2(self)


class Mamba2(LinearFrame):
    """The linear frame around a decaying sum."""

    config: Mamba2Config

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        assert gates is not None
        g_BTH = F.logsigmoid(gates[:, :, 0])
        self.observe("log_decay", g_BTH)
        o_BTHV, matrix = linear_attention(q_BTHK, k_BTHK, v_BTHV, g_BTH, state, segment_ids, self.config.key_dim**-0.5)
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        c = self.config
        return linear_attention_flops(c.n_heads, c.key_dim, c.value_dim, seq_len) + self.conv_flops_per_token()

    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        self.set_gate_biases(self.config.decay_bias)
