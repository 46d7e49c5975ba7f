"""xLSTM with matrix memory, the mLSTM (arXiv 2405.04517; xLSTM 7B, arXiv 2503.13427; baselines 3.8).

C <- f C + i k v^T;   n <- f n + i k;   h = C^T q / max(|n . q|, 1);   i = exp(W x + b),   f = sigmoid(W x + b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers import register
from mixers.base import Mixer, State
from mixers.kernels import chosen
from mixers.linear_frame import LinearFrame, LinearFrameConfig
from mixers.ops.mlstm import chunk_mlstm, recurrent_mlstm

CHUNK = 64


@register
@dataclass
class XlstmConfig(LinearFrameConfig):
    """Both gates are linear in x with a bias. No norm of q and k: the read-out is divided by the normaliser n . q."""

    kind: str = "xlstm"
    qk_norm: str = "none"
    gate_cap: float | None = None
    input_weights: bool = True
    input_bias: float = 0.0
    forget_bias_low: float = 3.0
    forget_bias_high: float = 6.0

    gates: ClassVar[int] = 2

    def check(self, path: str) -> None:
        super().check(path)
        if self.gate_cap is not None and self.gate_cap <= 0:
            raise ValueError(f"{path}.gate_cap={self.gate_cap}: must be above 0 (15 is usual), or null for no cap")

    def accessories(self) -> dict[str, str]:
        biases = f"bias at start {self.input_bias:g} (input), {self.forget_bias_low:g} to {self.forget_bias_high:g}"
        cap = "" if self.gate_cap is None else f", capped at {self.gate_cap:g}"
        return {**super().accessories(), "gates": f"exp input, sigmoid forget, {biases} (forget){cap}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Xlstm(self)


class Xlstm(LinearFrame):
    """The linear frame around the mLSTM."""

    config: XlstmConfig

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {
            "matrix": (c.n_heads, c.key_dim, c.value_dim),
            "normaliser": (c.n_heads, c.key_dim),
            "stabiliser": (c.n_heads,),
        }

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
        cap = self.config.gate_cap
        if cap is not None:
            gates_BTGH = cap * torch.tanh(gates_BTGH / cap)
        input_BTH, forget_BTH = gates_BTGH.unbind(2)
        initial = None if state is None else (state["matrix"], state["normaliser"], state["stabiliser"])
        self.observe("log_decay", F.logsigmoid(forget_BTH))
        inputs = (q_BTHK, k_BTHK, v_BTHV, input_BTH, forget_BTH)
        if q_BTHK.shape[1] == 1:
            h_BTHV, after = recurrent_mlstm(*inputs, initial_state=initial, segment_ids=segment_ids)
        else:
            mlstm = chosen(chunk_mlstm, q_BTHK)
            h_BTHV, after = mlstm(*inputs, initial_state=initial, segment_ids=segment_ids, chunk_size=CHUNK)
        return h_BTHV, dict(zip(("matrix", "normaliser", "stabiliser"), after, strict=True))

    def cell_flops_per_token(self, seq_len: int) -> float:
        """4 K V + 2 C (K + V) per head as linear attention, and 4 K for the normaliser."""
        c, chunk = self.config, min(CHUNK, seq_len)
        key_dim, value_dim = c.key_dim, c.value_dim
        cell = 4 * key_dim * value_dim + 2 * chunk * (key_dim + value_dim) + 4 * key_dim
        return float(c.n_heads * cell + self.conv_flops_per_token())

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """Forget biases spread evenly over the heads: some forget within tens of tokens, some within hundreds."""
        super().init_parameters(generator)
        c = self.config
        self.set_gate_biases(c.input_bias, 0.0)
        bias = self.gate.bias
        spread = torch.linspace(c.forget_bias_low, c.forget_bias_high, c.n_heads, device=bias.device)
        bias[c.n_heads :].copy_(spread)
        if not c.input_weights:
            self.gate.weight[: c.n_heads].zero_()
