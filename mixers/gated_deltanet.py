"""Gated DeltaNet (arXiv 2412.06464): the delta rule on a decaying state (baselines 3.7).

S <- e^g S;   S <- S + beta k (v - S^T k)^T;   o = S^T q / sqrt(K)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import Mixer, State
from mixers.kernels import chosen
from mixers.linear_frame import LinearFrame, LinearFrameConfig
from mixers.ops.delta import chunk_delta_rule, recurrent_delta_rule

DECAYS = ("sigmoid", "mamba")
CHUNK = 64


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: State | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The form of the rule that suits the length, scaled by 1 / sqrt(K)."""
    inputs = (q, k, v, beta, g)
    initial = None if state is None else state["matrix"]
    scale = q.shape[-1] ** -0.5
    if q.shape[1] == 1:
        return recurrent_delta_rule(*inputs, scale=scale, initial_state=initial, segment_ids=segment_ids)
    return chosen(chunk_delta_rule, q)(
        *inputs,
        scale=scale,
        initial_state=initial,
        segment_ids=segment_ids,
        chunk_size=CHUNK if q.shape[-1] > 32 else CHUNK // 2,  # narrow heads: a tenth to a quarter faster
    )


def delta_rule_flops(config: LinearFrameConfig, seq_len: int) -> float:
    """6 K V + C (5 K + 3 V) per head: K K^T, Q K^T, the triangular solve, and four products with the state."""
    chunk, key_dim, value_dim = min(CHUNK, seq_len), config.key_dim, config.value_dim
    return config.n_heads * (6 * key_dim * value_dim + chunk * (5 * key_dim + 3 * value_dim))


@register
@dataclass
class GatedDeltaNetConfig(LinearFrameConfig):
    """Decay: ``sigmoid`` is the matched log sigmoid(W x + b); ``mamba`` is -exp(A_log) softplus(W x + dt_bias)."""

    kind: str = "gated_deltanet"
    decay: str = "sigmoid"
    decay_bias: float = 0.0
    beta_bias: float = 0.0
    negative_eigenvalues: bool = False

    gates: ClassVar[int] = 2

    @property
    def mamba_decay(self) -> bool:
        """Mamba's parametrisation of the decay, which has dt_bias in place of the linear map's bias."""
        return self.decay == "mamba"

    @property
    def gate_bias(self) -> bool:
        return not self.mamba_decay

    def check(self, path: str) -> None:
        super().check(path)
        if self.decay not in DECAYS:
            raise ValueError(f"{path}.decay={self.decay}: must be one of {', '.join(DECAYS)}")
        if self.qk_norm != "l2":
            raise ValueError(f"{path}.qk_norm={self.qk_norm}: the delta rule explodes unless keys have unit length: l2")

    def gate_parameters(self) -> int:
        """Matched: weights and biases of both gates. Mamba decay: no biases, but A_log and dt_bias."""
        return 2 * self.n_heads * (self.d_model + 1)

    def accessories(self) -> dict[str, str]:
        bias = f"bias at start {self.decay_bias:g} (decay), {self.beta_bias:g} (beta)"
        gates = f"sigmoid decay and beta, {bias}" if self.decay == "sigmoid" else "mamba decay, sigmoid beta"
        return {**super().accessories(), "gates": gates}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return GatedDeltaNet(self)


class GatedDeltaNet(LinearFrame):
    """The linear frame around the gated delta rule."""

    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config)
        if config.mamba_decay:
            self.a_log_H = nn.Parameter(torch.empty(config.n_heads))
            self.dt_bias_H = nn.Parameter(torch.empty(config.n_heads))

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates_BTGH: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        assert gates_BTGH is not None
        decay_BTH, beta_BTH = gates_BTGH.unbind(2)
        if self.config.mamba_decay:
            wide = gates_BTGH.dtype
            g_BTH = -self.a_log_H.to(wide).exp() * F.softplus(decay_BTH + self.dt_bias_H.to(wide))
        else:
            g_BTH = F.logsigmoid(decay_BTH)
        self.observe("log_decay", g_BTH)
        beta_BTH = beta_BTH.sigmoid() * (2 if self.config.negative_eigenvalues else 1)
        o_BTHV, matrix = delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, g_BTH, state, segment_ids)
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        """6 K V + C (5 K + 3 V) per head: K K^T, Q K^T, the triangular solve, and four products with the state."""
        return delta_rule_flops(self.config, seq_len) + self.conv_flops_per_token()

    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        with torch.no_grad():
            if self.config.mamba_decay:
                # A ~ U(0, 16); the step softplus(dt_bias) log-uniform in [0.001, 0.1] (baselines 3.5, 3.7).
                self.a_log_H.copy_(torch.empty_like(self.a_log_H).uniform_(1e-4, 16, generator=generator).log())
                low, high = math.log(1e-3), math.log(0.1)
                step = torch.empty_like(self.dt_bias_H).uniform_(low, high, generator=generator).exp().clamp(min=1e-4)
                self.dt_bias_H.copy_(step + (-torch.expm1(-step)).log())
            else:
                self.set_gate_biases(self.config.decay_bias, self.config.beta_bias)

    def no_decay(self) -> set[str]:
        return super().no_decay() | ({"a_log_H", "dt_bias_H"} if self.config.mamba_decay else set())
