"""Mamba2 as its authors build it (arXiv 2405.21060, section 7): the state-space duality layer (baselines 3.5).

    z, x, B, C, dt = W x;   x, B, C <- SiLU(conv4);   a_t = exp(-exp(A_log) softplus(dt_t + dt_bias))
    S <- a S + step B x^T;   y = S^T C + D x;   out = W_o RMSNorm(y * SiLU(z))

B and C are shared by the heads of a group, like one key and query for many values. Their model has no MLP between the
layers: `model.mlp=none` reproduces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import NO_CONTEXT, Context, Mixer, MixerConfig, State
from mixers.kernels import chosen
from mixers.linear import linear_attention_flops
from mixers.ops.ssd import recurrent_ssd, ssd
from mixers.parts import FusedLinear, ResidualLinear, ShortConv, wide_linear


@register
@dataclass
class Mamba2NativeConfig(MixerConfig):
    """``ssm_head_dim`` is the width of a head's values (P), ``d_state`` that of its keys (N)."""

    kind: str = "mamba2_native"
    expand: float = 2.0
    d_state: int = 128
    ssm_head_dim: int = 64
    n_groups: int = 1
    conv_width: int = 4

    test_overrides: ClassVar[dict] = {"d_state": 8, "ssm_head_dim": 8, "n_groups": 2}

    @property
    def inner(self) -> int:
        """Width of all values."""
        return int(self.expand * self.d_model)

    @property
    def ssm_heads(self) -> int:
        """Heads of the state."""
        return self.inner // self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        """x, B and C."""
        return self.inner + 2 * self.n_groups * self.d_state

    def check(self, path: str) -> None:
        for name in ("d_state", "ssm_head_dim", "n_groups", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be at least 1")
        if self.inner < 1 or self.inner != self.expand * self.d_model or self.inner % self.ssm_head_dim:
            raise ValueError(
                f"{path}.ssm_head_dim={self.ssm_head_dim}: must divide expand x d_model = "
                f"{self.expand} x {self.d_model} = {self.expand * self.d_model:g}"
            )
        if self.ssm_heads % self.n_groups:
            raise ValueError(f"{path}.n_groups={self.n_groups}: must divide the {self.ssm_heads} heads")

    def n_parameters(self) -> int:
        maps = self.d_model * (self.inner + self.conv_channels + self.ssm_heads) + self.inner * self.d_model
        return maps + (self.conv_width + 1) * self.conv_channels + 3 * self.ssm_heads + self.inner

    def accessories(self) -> dict[str, str]:
        return {
            "short convolution": f"width {self.conv_width} with bias on x, B, C",
            "q/k norm": "none",
            "head norm": "rms over a group, after the gate",
            "output gate": "silu",
            "positions": "none",
            "gates": "softplus step, which scales decay and input",
            "skip": "D x",
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Mamba2Native(self)


class Mamba2Native(Mixer):
    """Projections, convolution, gate and norm around the cell of `ops/ssd.py`."""

    def __init__(self, config: Mamba2NativeConfig):
        super().__init__()
        self.config = config
        shared = config.n_groups * config.d_state
        self.maps = FusedLinear(config.d_model, (config.inner, config.inner, shared, shared), bias=False)
        self.step = nn.Linear(config.d_model, config.ssm_heads, bias=False)
        self.conv = ShortConv(config.conv_channels, config.conv_width, bias=True)
        self.a_log_H = nn.Parameter(torch.empty(config.ssm_heads))
        self.step_bias_H = nn.Parameter(torch.empty(config.ssm_heads))
        self.skip_H = nn.Parameter(torch.empty(config.ssm_heads))
        self.norm_gain_D = nn.Parameter(torch.empty(config.inner))
        self.out = ResidualLinear(config.inner, config.d_model, bias=False)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        c, segments = self.config, (context or NO_CONTEXT).segment_ids
        z_BTD, through = self.maps(x_BTD).split((c.inner, c.conv_channels), dim=-1)
        through, tail = self.conv(through, None if state is None else state["conv"], segments)
        shared = c.n_groups * c.d_state
        v, b, c_read = through.split((c.inner, shared, shared), dim=-1)
        v_BTHV = v.unflatten(-1, (c.ssm_heads, c.ssm_head_dim))
        step_BTH = wide_linear(self.step, x_BTD)
        step_BTH = F.softplus(step_BTH + self.step_bias_H.to(step_BTH.dtype))
        rate_H = -self.a_log_H.to(step_BTH.dtype).exp()
        self.observe("log_decay", step_BTH * rate_H)
        form = recurrent_ssd if x_BTD.shape[1] == 1 else chosen(ssd, x_BTD)
        b_BTGK, c_BTGK = (m.unflatten(-1, (c.n_groups, c.d_state)) for m in (b, c_read))
        initial = None if state is None else state["matrix"]
        y_BTHV, matrix = form(v_BTHV, step_BTH, rate_H, b_BTGK, c_BTGK, initial_state=initial, segment_ids=segments)
        y_BTD = (y_BTHV + self.skip_H[:, None] * v_BTHV).flatten(2) * F.silu(z_BTD)
        normed = F.rms_norm(y_BTD.unflatten(-1, (c.n_groups, -1)), (c.inner // c.n_groups,), eps=1e-5).flatten(2)
        y_BTD = self.out(normed * self.norm_gain_D)
        return y_BTD, None if state is None or tail is None else {"matrix": matrix, "conv": tail}

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        return {
            "matrix": torch.zeros(batch_size, c.ssm_heads, c.d_state, c.ssm_head_dim, device=device, dtype=wide),
            "conv": torch.zeros(batch_size, c.conv_width - 1, c.conv_channels, device=device, dtype=dtype),
        }

    def cell_flops_per_token(self, seq_len: int) -> float:
        c = self.config
        """As linear attention, but Q K^T once per group."""
        cell = linear_attention_flops(c.ssm_heads, c.d_state, c.ssm_head_dim, seq_len)
        cell -= 2 * min(64, seq_len) * c.d_state * (c.ssm_heads - c.n_groups)
        return cell + 2 * c.conv_width * c.conv_channels

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Constant in seq_len."""
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        return c.inner * c.d_state * wide.itemsize + (c.conv_width - 1) * c.conv_channels * dtype.itemsize

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """A ~ U(1, 16); the step log-uniform in [0.001, 0.1], not below 1e-4; D = 1."""
        self.conv.init_parameters(generator)
        self.a_log_H.uniform_(1, 16, generator=generator).log_()
        step = torch.empty_like(self.step_bias_H).uniform_(math.log(1e-3), math.log(0.1), generator=generator)
        step = step.exp().clamp(min=1e-4)
        self.step_bias_H.copy_(step + (-torch.expm1(-step)).log())
        self.skip_H.fill_(1.0)
        self.norm_gain_D.fill_(1.0)

    def no_decay(self) -> set[str]:
        return {"a_log_H", "step_bias_H", "skip_H", "norm_gain_D", "conv.bias_D"}
