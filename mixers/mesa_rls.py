"""The original, sequential Mesa layer (arXiv 2309.05858): recursive least squares, token by token.

    R <- (R - s R k k^T R) / gamma,   s = beta / (gamma + beta k^T R k),   G <- gamma G + beta k v^T,   o = G^T R q

R is the inverse of H + Lambda, started at Lambda^{-1} and updated by the Sherman-Morrison formula. Here the regulariser
is forgotten along with the data: with a forget gate R grows by 1 / gamma a token in every direction that no key visits,
without bound. That is why the layer has none by default, and what `mesa` mends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import Mixer, State
from mixers.linear_frame import LinearFrame, LinearFrameConfig


@register
@dataclass
class MesaRlsConfig(LinearFrameConfig):
    """Forget gate off, as it must be; Lambda as in `mesa`."""

    kind: str = "mesa_rls"
    decay_gate: bool = False
    decay_bias: float = 6.0
    beta_bias: float = 0.0
    lambda_min: float = 0.25
    lambda_init: float = 1.0

    @property
    def gates(self) -> int:  # type: ignore[override]
        """Input gate and, if it is on, forget gate."""
        return 1 + int(self.decay_gate)

    def check(self, path: str) -> None:
        super().check(path)
        if self.lambda_min < 0 or self.lambda_init <= self.lambda_min:
            raise ValueError(
                f"{path}.lambda_init={self.lambda_init}: must be above {path}.lambda_min={self.lambda_min}, and that not "
                "negative"
            )

    def gate_parameters(self) -> int:
        return super().gate_parameters() + self.n_heads * self.key_dim

    def accessories(self) -> dict[str, str]:
        decay = f"sigmoid decay, bias at start {self.decay_bias:g}; " if self.decay_gate else ""
        return {**super().accessories(), "gates": f"{decay}sigmoid beta, bias at start {self.beta_bias:g}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return MesaRls(self)


class MesaRls(LinearFrame):
    """The linear frame around recursive least squares. Costs one step after another: for comparisons, not for scale."""

    config: MesaRlsConfig

    def __init__(self, config: MesaRlsConfig):
        super().__init__(config)
        self.theta_HK = nn.Parameter(torch.empty(config.n_heads, config.key_dim))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {**super().state_shapes(), "deviation": (c.n_heads, c.key_dim, c.key_dim)}

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        """The state keeps R - Lambda^{-1}, so that zero is the state before the first token."""
        assert gates is not None
        c, wide = self.config, gates.dtype
        start_HKK = torch.diag_embed(1 / (c.lambda_min + F.softplus(self.theta_HK.to(wide))))
        matrix = q_BTHK.new_zeros(()) if state is None else state["matrix"]
        inverse = start_HKK if state is None else start_HKK + state["deviation"]
        beta_BTH = gates[:, :, -1].sigmoid()
        gamma_BTH = gates[:, :, 0].sigmoid() if c.decay_gate else None
        q, k, v = (x.to(wide) for x in (q_BTHK, k_BTHK, v_BTHV))
        outputs = []
        with torch.autocast(q.device.type, enabled=False):
            for t in range(q.shape[1]):
                if segment_ids is not None and t > 0:
                    same = (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
                    matrix, inverse = torch.where(same, matrix, 0.0), torch.where(same, inverse, start_HKK)
                beta = beta_BTH[:, t, :, None, None]
                key = k[:, t, :, :, None]
                rk = inverse @ key
                gamma = 1.0 if gamma_BTH is None else gamma_BTH[:, t, :, None, None]
                gain = beta / (gamma + beta * (key.mT @ rk))
                inverse = (inverse - gain * rk * rk.mT) / gamma
                matrix = gamma * matrix + beta * key * v[:, t, :, None]
                outputs.append((inverse @ q[:, t, :, :, None]).mT @ matrix)
        o_BTHV = torch.cat(outputs, dim=2).transpose(1, 2).to(q_BTHK.dtype)
        return o_BTHV, {"matrix": matrix, "deviation": inverse - start_HKK}

    def cell_flops_per_token(self, seq_len: int) -> float:
        """R k, R q and G^T (R q) as products; the two outer products are elementwise: 4 K^2 + 2 K V, and 3 K^2 + 3 K V."""
        c = self.config
        return c.n_heads * (7 * c.key_dim**2 + 5 * c.key_dim * c.value_dim) + self.conv_flops_per_token()

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        c = self.config
        self.set_gate_biases(*[c.decay_bias] * c.decay_gate, c.beta_bias)
        self.theta_HK.fill_(math.log(math.expm1(c.lambda_init - c.lambda_min)))

    def no_decay(self) -> set[str]:
        return super().no_decay() | {"theta_HK"}
