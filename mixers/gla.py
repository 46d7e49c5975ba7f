"""Gated linear attention: S <- diag(e^g) S + beta k v^T;  o = S^T q / sqrt(K) (baselines 3.4).

``decay=scalar`` is the matched form of the MesaNet comparison (arXiv 2506.05233, Table 1): one forget and one input gate
per head. ``decay=vector`` is GLA as its authors define it (arXiv 2312.06635): one decay for each key channel, from a
low-rank map, and no input gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import Mixer, State
from mixers.linear import linear_attention, linear_attention_flops
from mixers.linear_frame import LinearFrame, LinearFrameConfig
from mixers.parts import wide_linear

DECAYS = ("scalar", "vector")


@register
@dataclass
class GatedLinearAttentionConfig(LinearFrameConfig):
    """Vector decay: log sigmoid(W2 W1 x + b) / temperature, W1 of rank ``gate_rank``."""

    kind: str = "gla"
    decay: str = "scalar"
    decay_bias: float = 0.0
    beta_bias: float = 0.0
    gate_rank: int = 16
    gate_temperature: float = 16.0

    @property
    def gates(self) -> int:  # type: ignore[override]
        """Scalar gates per head; the vector decay has maps of its own."""
        return 2 if self.decay == "scalar" else 0

    def check(self, path: str) -> None:
        super().check(path)
        if self.decay not in DECAYS:
            raise ValueError(f"{path}.decay={self.decay}: must be one of {', '.join(DECAYS)}")
        if self.gate_rank < 1:
            raise ValueError(f"{path}.gate_rank={self.gate_rank}: must be at least 1 (16 is usual)")
        if self.gate_temperature <= 0:
            raise ValueError(f"{path}.gate_temperature={self.gate_temperature}: must be above 0 (16 is usual)")

    def gate_parameters(self) -> int:
        if self.decay == "scalar":
            return super().gate_parameters()
        return self.d_model * self.gate_rank + (self.gate_rank + 1) * self.n_heads * self.key_dim

    def accessories(self) -> dict[str, str]:
        scalar = f"sigmoid decay and beta, bias at start {self.decay_bias:g} (decay), {self.beta_bias:g} (beta)"
        vector = f"decay per key channel of rank {self.gate_rank}, temperature {self.gate_temperature:g}"
        return {**super().accessories(), "gates": scalar if self.decay == "scalar" else vector}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return GatedLinearAttention(self)


class GatedLinearAttention(LinearFrame):
    """The linear frame around gated linear attention."""

    config: GatedLinearAttentionConfig

    def __init__(self, config: GatedLinearAttentionConfig):
        super().__init__(config)
        if config.decay == "vector":
            self.gate_down = nn.Linear(config.d_model, config.gate_rank, bias=False)
            self.gate_up = nn.Linear(config.gate_rank, config.n_heads * config.key_dim)

    def gates(self, x_BTD: Tensor) -> Tensor | None:
        """Scalar: (B,T,2,H); vector: (B,T,H,K)."""
        if self.config.decay == "scalar":
            return super().gates(x_BTD)
        low_rank = wide_linear(self.gate_down, x_BTD)
        return wide_linear(self.gate_up, low_rank).unflatten(-1, (self.config.n_heads, -1))

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
        c = self.config
        if c.decay == "vector":
            g = F.logsigmoid(gates) / c.gate_temperature
        else:
            decay_BTH, beta_BTH = gates.unbind(2)
            g = F.logsigmoid(decay_BTH)
            k_BTHK = (k_BTHK * beta_BTH.sigmoid()[..., None]).to(k_BTHK.dtype)
        self.observe("log_decay", g)
        o_BTHV, matrix = linear_attention(q_BTHK, k_BTHK, v_BTHV, g, state, segment_ids, c.key_dim**-0.5)
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        c = self.config
        return linear_attention_flops(c.n_heads, c.key_dim, c.value_dim, seq_len) + self.conv_flops_per_token()

    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        if self.config.decay == "scalar":
            self.set_gate_biases(self.config.decay_bias, self.config.beta_bias)
