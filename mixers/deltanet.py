"""DeltaNet (arXiv 2406.06484): S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K) (baselines 3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixers import register
from mixers.base import Mixer, State
from mixers.gated_deltanet import delta_rule, delta_rule_flops
from mixers.linear_frame import LinearFrame, LinearFrameConfig


@register
@dataclass
class DeltaNetConfig(LinearFrameConfig):
    """Writing strength sigmoid(W x + b), without forgetting."""

    kind: str = "deltanet"
    beta_bias: float | None = 0.0
    negative_eigenvalues: bool = False

    gates: ClassVar[int] = 1

    @property
    def gate_bias(self) -> bool:
        return self.beta_bias is not None

    def check(self, path: str) -> None:
        super().check(path)
        if self.qk_norm != "l2":
            raise ValueError(f"{path}.qk_norm={self.qk_norm}: the delta rule explodes unless keys have unit length: l2")

    def gate_parameters(self) -> int:
        return self.n_heads * (self.d_model + self.gate_bias)

    def accessories(self) -> dict[str, str]:
        bias = "no bias" if self.beta_bias is None else f"bias at start {self.beta_bias:g}"
        return {**super().accessories(), "gates": f"sigmoid beta, {bias}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return DeltaNet(self)


class DeltaNet(LinearFrame):
    """The linear frame around the delta rule."""

    config: DeltaNetConfig

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
        beta_BTH = gates[:, :, 0].sigmoid() * (2 if self.config.negative_eigenvalues else 1)
        o_BTHV, matrix = delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, None, state, segment_ids)
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        return delta_rule_flops(self.config, seq_len) + self.conv_flops_per_token()

    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        if self.config.beta_bias is not None:
            self.set_gate_biases(self.config.beta_bias)
