"""xLSTM with scalar memory, the sLSTM (arXiv 2405.04517, section 2.2 and appendix; baselines 3.9).

    i, f = W conv(x) + R y_{t-1} + b;   z, o = W x + R y_{t-1} + b      W, R: one block per head
    c <- f c + i tanh(z);   n <- f n + i;   y = sigmoid(o) c / n        i = exp, f = sigmoid, stabilised
    out = W_o norm(y)

The authors' block has no W_o, and a narrow MLP of its own. Here W_o is added, so that the layer writes to the residual stream
of the shared backbone as every mixer does, whose MLP follows. The recurrence cannot be computed in parallel over time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixers import register
from mixers.base import NO_CONTEXT, Context, Mixer, MixerConfig, State
from mixers.kernels import chosen
from mixers.linear_frame import HeadLayerNorm
from mixers.ops.slstm import init_slstm_state, recurrent_slstm, slstm
from mixers.parts import ResidualLinear, ShortConv

FORGET_INITS = ("powerlaw", "linspace")


@register
@dataclass
class SlstmConfig(MixerConfig):
    """The layer is as wide as the model; ``n_heads`` blocks of the gates' matrices.

    ``forget_init``: ``powerlaw`` biases fall from +5 to -7 within a head, the later the layer the later they fall;
    ``linspace`` from 3 to 6.
    """

    kind: str = "slstm"
    conv_width: int = 4
    forget_init: str = "powerlaw"

    @property
    def width(self) -> int:
        """V: cells of one head."""
        return self.d_model // self.n_heads

    def check(self, path: str) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"{path}.n_heads={self.n_heads}: must divide d_model={self.d_model}")
        if self.conv_width < 1:
            raise ValueError(f"{path}.conv_width={self.conv_width}: must be at least 1 (4 is usual)")
        if self.forget_init not in FORGET_INITS:
            raise ValueError(f"{path}.forget_init={self.forget_init}: must be one of {', '.join(FORGET_INITS)}")

    def n_parameters(self) -> int:
        d = self.d_model
        return d * d + 8 * d * self.width + 4 * d + (self.conv_width + 1) * d + d

    def accessories(self) -> dict[str, str]:
        return {
            "short convolution": f"width {self.conv_width} with bias on i and f",
            "head norm": "layer",
            "gates": f"exp input, sigmoid forget, recurrent; forget biases {self.forget_init}",
            "positions": "none",
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Slstm(self, layer_index / max(1, n_layers - 1))


class Slstm(Mixer):
    """Block-diagonal maps to the four gates, the cell, norm per head, output map."""

    def __init__(self, config: SlstmConfig, depth: float):
        super().__init__()
        self.config, self.depth = config, depth  # depth: 0 in the first layer, 1 in the last
        heads, width = config.n_heads, config.width
        self.conv = ShortConv(config.d_model, config.conv_width, bias=True)
        self.through_conv_HVG = nn.Parameter(torch.empty(heads, width, 2 * width))  # i, f
        self.beside_conv_HVG = nn.Parameter(torch.empty(heads, width, 2 * width))  # z, o
        self.recurrent_HVGV = nn.Parameter(torch.empty(heads, width, 4, width))
        self.bias_D = nn.Parameter(torch.empty(4 * config.d_model))  # in the order (H,4,V)
        self.norm = HeadLayerNorm(heads, width, eps=1e-5)
        self.out = ResidualLinear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        segments = (context or NO_CONTEXT).segment_ids
        through, tail = self.conv(x_BTD, None if state is None else state["conv"], segments)
        raw_BTHGV = self._raw(through, x_BTD)
        initial = None if state is None else (state["y"], state["c"], state["n"], state["m"])
        cell = recurrent_slstm if x_BTD.shape[1] == 1 else chosen(slstm, x_BTD)
        y_BTHV, after = cell(
            raw_BTHGV, self.recurrent_HVGV.to(raw_BTHGV.dtype), initial_state=initial, segment_ids=segments
        )
        out_BTD = self.out(self.norm(y_BTHV.to(self.norm.weight.dtype)).flatten(2))
        if tail is None:
            return out_BTD, None
        return out_BTD, {**dict(zip("ycnm", after, strict=True)), "conv": tail}

    def _raw(self, through_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """What the input puts into the gates i, f, z, o: (B,T,H,4,V) in float32 or wider."""
        (batch, steps, _), heads = x_BTD.shape, self.config.n_heads
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        with torch.autocast(x_BTD.device.type, enabled=False):
            halves = []
            for part, weight in ((through_BTD, self.through_conv_HVG), (x_BTD, self.beside_conv_HVG)):
                part_HMV = part.to(wide).unflatten(-1, (heads, -1)).flatten(0, 1).transpose(0, 1)
                product_HMG = torch.bmm(part_HMV, weight.to(wide))
                halves.append(product_HMG.transpose(0, 1).reshape(batch, steps, heads, 2, -1))
            return torch.cat(halves, dim=3) + self.bias_D.to(wide).view(heads, 4, -1)

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        cells = init_slstm_state(batch_size, c.n_heads, c.width, device=device, dtype=wide)
        tail = torch.zeros(batch_size, c.conv_width - 1, c.d_model, device=device, dtype=dtype)
        return {**dict(zip("ycnm", cells, strict=True)), "conv": tail}

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Input and recurrent maps of the gates, each 8 d V; the convolution; about 15 operations per cell."""
        d = self.config.d_model
        return 16.0 * d * self.config.width + 2 * self.config.conv_width * d + 15 * d

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Four numbers per cell in float32 (or wider) and the convolution's tail: constant in seq_len."""
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        return c.d_model * (4 * wide.itemsize + (c.conv_width - 1) * dtype.itemsize)

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """The reference's: W N(0, 2 / (5 d)), R zero, biases zero but for the forget gate's."""
        c = self.config
        self.conv.init_parameters(generator)
        for weight in (self.through_conv_HVG, self.beside_conv_HVG):
            weight.normal_(0, math.sqrt(2 / (5 * c.d_model)), generator=generator)
        self.recurrent_HVGV.zero_()
        self.bias_D.zero_()
        place_V = torch.linspace(0, 1, c.width, device=self.bias_D.device)
        powerlaw = c.forget_init == "powerlaw"
        forget_V = 5 - 12 * place_V ** (0.3 + 1.3 * self.depth) if powerlaw else 3 + 3 * place_V
        self.bias_D.view(c.n_heads, 4, c.width)[:, 1].copy_(forget_V)
        nn.init.ones_(self.norm.weight)

    def no_decay(self) -> set[str]:
        return {"norm.weight"}
