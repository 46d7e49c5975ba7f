"""Hawk: Griffin's recurrent block without its attention (arXiv 2402.19427, sections 2.3 and 2.4; baselines 3.11).

    y = W_out (gelu(W_y x + b) * RG-LRU(conv(W_x x + b))) + b

    r = sigmoid(W_a x + b_a),  i = sigmoid(W_i x + b_i)       both block-diagonal, one block per head
    log a = -c r softplus(Lambda),  c = 8
    h_t = a h_{t-1} + sqrt(1 - a^2) (i x)                     the first token of a document: a = 0, factor 1

The recurrence has one number per channel as its state, so it is a scan and no chunked product of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixers import register
from mixers.base import NO_CONTEXT, Context, Mixer, MixerConfig, State
from mixers.kernels import chosen
from mixers.ops.scan import linear_scan, recurrent_scan
from mixers.parts import FusedLinear, ResidualLinear, ShortConv

DECAY_INITS = ("code", "paper")
STEEPEST = 1000.0  # bound on the derivative of the square root in sqrt(1 - a^2), which has none where a = 1


@register
@dataclass
class HawkConfig(MixerConfig):
    """``expand`` is the width of both branches over the model's; ``decay_range`` is where the decays start.

    ``decay_init``: the paper puts a^c into the range, its reference code a itself, which forgets c times as fast.
    """

    kind: str = "hawk"
    expand: float = 1.25
    conv_width: int = 4
    decay_scale: float = 8.0
    decay_init: str = "code"
    decay_low: float = 0.9
    decay_high: float = 0.999

    @property
    def width(self) -> int:
        """D_R: channels of each branch."""
        return int(self.d_model * self.expand)

    def check(self, path: str) -> None:
        width = self.d_model * self.expand
        if width < 1 or width != int(width) or int(width) % self.n_heads:
            raise ValueError(
                f"{path}.expand={self.expand}: times d_model={self.d_model} it must be a whole multiple of "
                f"n_heads={self.n_heads}, which are the blocks of the gates"
            )
        if self.conv_width < 1:
            raise ValueError(f"{path}.conv_width={self.conv_width}: must be at least 1 (4 is usual)")
        if self.decay_scale <= 0:
            raise ValueError(f"{path}.decay_scale={self.decay_scale}: must be above 0 (8 is usual)")
        if self.decay_init not in DECAY_INITS:
            raise ValueError(f"{path}.decay_init={self.decay_init}: must be one of {', '.join(DECAY_INITS)}")
        if not 0 < self.decay_low <= self.decay_high < 1:
            raise ValueError(
                f"{path}.decay_low={self.decay_low}, {path}.decay_high={self.decay_high}: must be 0 < low <= high < 1"
            )

    def n_parameters(self) -> int:
        width = self.width
        maps = 3 * self.d_model * width + 2 * width + self.d_model
        gates = 2 * (width * (width // self.n_heads) + width)
        return maps + (self.conv_width + 1) * width + gates + width

    def accessories(self) -> dict[str, str]:
        return {
            "short convolution": f"width {self.conv_width} with bias, no activation",
            "output gate": "gelu",
            "positions": "none",
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Hawk(self)


class Hawk(Mixer):
    """The gated branch times the recurrent branch."""

    def __init__(self, config: HawkConfig):
        super().__init__()
        self.config = config
        c, block = config, config.width // config.n_heads
        self.branches = FusedLinear(c.d_model, (c.width,) * 2)  # the gate's, then the recurrence's
        self.conv = ShortConv(c.width, c.conv_width, bias=True, activation=False)
        self.gates_HKG = nn.Parameter(torch.empty(c.n_heads, block, 2 * block))  # recurrence gate, then input gate
        self.recurrence_bias_D = nn.Parameter(torch.empty(c.width))
        self.input_bias_D = nn.Parameter(torch.empty(c.width))
        self.lambda_D = nn.Parameter(torch.empty(c.width))
        self.out = ResidualLinear(c.width, c.d_model)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        segments = (context or NO_CONTEXT).segment_ids
        gate_BTD, u_BTD = self.branches(x_BTD).chunk(2, dim=-1)
        u_BTD, tail = self.conv(u_BTD, None if state is None else state["conv"], segments)
        with torch.autocast(x_BTD.device.type, enabled=False):
            log_a_BTD, u_BTD = self._gated(u_BTD, _first_tokens(u_BTD, state, segments))
            scan = recurrent_scan if x_BTD.shape[1] == 1 else chosen(linear_scan, x_BTD)
            initial = None if state is None else state["h"]
            self.observe("log_decay", log_a_BTD.unflatten(-1, (self.config.n_heads, -1)))
            h_BTD, h_BD = scan(log_a_BTD, u_BTD, initial_state=initial, segment_ids=segments)
        y_BTD = self.out(h_BTD.to(gate_BTD.dtype) * F.gelu(gate_BTD, approximate="tanh"))
        if state is None or tail is None:
            return y_BTD, None
        return y_BTD, {"h": h_BD, "conv": tail, "length": state["length"] + x_BTD.shape[1]}

    def _gated(self, u_BTD: Tensor, first_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Log decays and scaled inputs of the recurrence, in float32 or wider."""
        wide = torch.promote_types(u_BTD.dtype, torch.float32)
        u_BTD = u_BTD.to(wide)
        heads = self.config.n_heads
        blocks_HMK = u_BTD.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(0, 1)
        gates_BTHG = torch.bmm(blocks_HMK, self.gates_HKG.to(wide)).transpose(0, 1).unflatten(0, u_BTD.shape[:2])
        recurrence, into = (g_BTHK.flatten(2) for g_BTHK in gates_BTHG.chunk(2, dim=-1))
        r_BTD = (recurrence + self.recurrence_bias_D.to(wide)).sigmoid()
        i_BTD = (into + self.input_bias_D.to(wide)).sigmoid()
        log_a_BTD = -self.config.decay_scale * r_BTD * F.softplus(self.lambda_D.to(wide))
        # 1 - a^2 as -expm1(2 log a): the direct form has no digits left for a near 1
        factor_BTD = _BoundedSqrt.apply(-torch.expm1(2 * log_a_BTD))
        factor_BTD = torch.where(first_BT[..., None], 1.0, factor_BTD)
        return log_a_BTD, factor_BTD * i_BTD * u_BTD

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        return {
            "h": torch.zeros(batch_size, c.width, device=device, dtype=wide),
            "conv": torch.zeros(batch_size, c.conv_width - 1, c.width, device=device, dtype=dtype),
            "length": torch.zeros(batch_size, dtype=torch.int64),
        }

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Two block-diagonal gates, the convolution, and about 17 operations per channel for gates and recurrence."""
        c = self.config
        return 4.0 * c.width * (c.width // c.n_heads) + 2 * c.conv_width * c.width + 17 * c.width

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """One number per channel in float32 (or wider) and the convolution's tail: constant in seq_len."""
        c, wide = self.config, torch.promote_types(dtype, torch.float32)
        return c.width * (wide.itemsize + (c.conv_width - 1) * dtype.itemsize)

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """The reference's: gates N(0, 1 / block), convolution N(0, 0.01 / width), biases 0, |decay|^2 uniform."""
        c = self.config
        self.gates_HKG.normal_(0, self.gates_HKG.shape[1] ** -0.5, generator=generator)
        self.conv.taps_JD.normal_(0, (0.01 / c.conv_width) ** 0.5, generator=generator)
        for bias_D in (self.conv.bias_D, self.recurrence_bias_D, self.input_bias_D):
            assert bias_D is not None
            bias_D.zero_()
        square_D = torch.empty_like(self.lambda_D).uniform_(c.decay_low**2, c.decay_high**2, generator=generator)
        log_a_D = square_D.log() / (2 if c.decay_init == "code" else 2 * c.decay_scale)
        self.lambda_D.copy_(torch.expm1(-log_a_D).log())  # the inverse of log a = -softplus(Lambda)

    def no_decay(self) -> set[str]:
        return {"lambda_D"}


def _first_tokens(u_BTD: Tensor, state: State | None, segments: Tensor | None) -> Tensor:
    """(B,T) bool: where a document begins. The call's first column is one if nothing has come before it."""
    first_BT = torch.zeros(u_BTD.shape[:2], dtype=torch.bool, device=u_BTD.device)
    first_BT[:, 0] = True if state is None else (state["length"] == 0).to(u_BTD.device)
    if segments is not None:
        first_BT[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return first_BT


class _BoundedSqrt(torch.autograd.Function):
    """sqrt(x) whose derivative 1 / (2 sqrt(x)) is at most ``STEEPEST``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, droot: Tensor) -> Tensor:  # type: ignore[override]
        (root,) = ctx.saved_tensors
        return droot / (2 * root).clamp(min=1 / STEEPEST)
