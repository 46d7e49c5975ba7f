"""Toeplitz MLP mixer (arXiv 2605.06683): one learned causal filter per head, as long as the sequence (toeplitz 1).

    y_t = sum_{k <= t} f_k x_{t-k} + c_t

All channels of a head pass the same filter, which knows nothing of the input. The authors also tried to divide the sum by
that of the taps so far, f_0 + ... + f_t (``normaliser``). J: neighbours, channels v - J + 1 to v of
a head that its channel v reads, each through a filter of its own (``kernel``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import Context, Mixer, State
from mixers.fixed_mix import FixedMix, FixedMixConfig
from mixers.ops.fredholm import fredholm_index
from mixers.ops.long_conv import BACKENDS, causal_conv, conv_flops_per_token
from mixers.ops.online_conv import init_conv_state, online_conv

INITS = ("paper", "shift", "zeros")
FREEZE = ("none", "toeplitz", "all_but_projections")
EXTEND = ("error", "zero")
NORMALISERS = ("none", "sum", "positive")
NOISE = 0.1  # of the paper's standard deviation, beside the one tap of init=shift


@register
@dataclass
class ToeplitzConfig(FixedMixConfig):
    """``extend=zero``: beyond ``length`` taps are zero and the position bias stays at its last value."""

    kind: str = "toeplitz"
    kernel: int = 1
    normaliser: str = "none"
    init: str = "paper"
    freeze: str = "none"
    extend: str = "error"
    backend: str = "auto"

    def check(self, path: str) -> None:
        super().check(path)
        choices_of = {"init": INITS, "freeze": FREEZE, "extend": EXTEND, "normaliser": NORMALISERS, "backend": BACKENDS}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be one of {', '.join(choices)}")
        if not 1 <= self.kernel <= self.width:
            raise ValueError(
                f"{path}.kernel={self.kernel}: must be from 1 (no mixing of channels) to {self.width}, the channels "
                "that share an operator"
            )
        if self.init == "shift" and self.length < 2:
            raise ValueError(f"{path}.length={self.length}: init=shift puts its tap at lag 1, so it must be at least 2")
        if self.init == "zeros" and self.expanded:
            raise ValueError(
                f"{path}.init=zeros: two zero operators behind one another get no gradient; with expanded=true it "
                "must be paper or shift"
            )
        if self.normaliser != "none" and self.kernel > 1:
            raise ValueError(
                f"{path}.normaliser={self.normaliser}: is for one filter for each head; with kernel={self.kernel} it must "
                "be none"
            )
        if self.normaliser == "sum" and self.init == "zeros":
            raise ValueError(f"{path}.init=zeros: normaliser=sum would divide by zero; it must be paper or shift")
        if self.freeze == "all_but_projections" and not self.headed:
            raise ValueError(f"{path}.freeze={self.freeze}: headed=false has no projections; must be none or toeplitz")

    def weights_per_operator(self) -> int:
        return self.kernel * self.length

    def max_len(self) -> int | None:
        return None if self.extend == "zero" else self.length

    def accessories(self) -> dict[str, str]:
        return {
            **super().accessories(),
            "kernel over channels": str(self.kernel),
            "frozen": self.freeze,
            "normaliser": self.normaliser,
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Toeplitz(self)


class Toeplitz(FixedMix):
    """y_t = sum_k f_k x_{t-k} + c_t for each head."""

    config: ToeplitzConfig

    def __init__(self, config: ToeplitzConfig):
        super().__init__(config)
        c = config
        self.filter_OHJL = nn.Parameter(torch.empty(c.operators, c.groups, c.kernel, c.length))
        self.filter_OHJL.requires_grad_(c.freeze == "none")
        if self.bias_OHL is not None:
            self.bias_OHL.requires_grad_(c.freeze != "all_but_projections")

    def mix(self, operator: int, x_BTHV: Tensor, state: State | None, context: Context) -> tuple[Tensor, Tensor | None]:
        filter, steps = self.taps(operator), x_BTHV.shape[1]
        if self.config.kernel == 1:
            filter = filter[:, 0]
        options: dict[str, Any] = {"segment_ids": context.segment_ids, "backend": self.config.backend}
        if state is None:
            if steps > self.config.length:
                filter = F.pad(filter, (0, steps - self.config.length))
            return causal_conv(x_BTHV, filter, **options), None
        own = {"buffer": state["memory"], **{key: state[key] for key in ("length", "start", "base")}}
        y_BTHV, own = online_conv(x_BTHV, filter, own, donate_state=context.donate_state, **options)
        return y_BTHV, own["buffer"]

    def taps(self, operator: int) -> Tensor:
        """(H,J,L) what the tokens are weighted with, by lag."""
        filter_HJL = self.filter_OHJL[operator]
        return F.softplus(filter_HJL) if self.config.normaliser == "positive" else filter_HJL

    def normalise(self, operator: int, y_BTHV: Tensor, position_T: Tensor) -> Tensor:
        if self.config.normaliser == "none":
            return y_BTHV
        sum_LH = self.taps(operator)[:, 0].cumsum(-1).T
        return y_BTHV / sum_LH[position_T.clamp(max=self.config.length - 1)][..., None].to(y_BTHV.dtype)

    def memory(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (self.config.groups, self.config.width)
        state = init_conv_state(batch_size, max_len, shape, device=device, dtype=dtype)
        state["memory"] = state.pop("buffer")
        return state

    def counters(self, state: State, steps: int, segment_ids: Tensor | None) -> State:
        base = state["base"].clone() if steps == 1 else state["length"] + steps
        return {**super().counters(state, steps, segment_ids), "base": base}

    def check_length(self, reached: int) -> None:
        if self.config.extend == "error":
            super().check_length(reached)

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Of the convolutions in the form that a CPU runs at this length, the biases and divisions."""
        c = self.config
        convolution = conv_flops_per_token(seq_len, c.groups * c.kernel, c.width, c.backend)
        for_each_channel = c.position_bias + (c.normaliser != "none")
        return c.operators * (convolution + for_each_channel * c.groups * c.width)

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """One number of float32 (or wider) per channel, token and operator."""
        c = self.config
        return c.operators * seq_len * c.groups * c.width * torch.promote_types(dtype, torch.float32).itemsize

    def init_parameters(self, generator: torch.Generator) -> None:
        """paper: N(0, 2/L). shift: 1 at lag 1 of the own channel, so that each token sees the one before it, and a
        tenth of the paper's noise. zeros."""
        super().init_parameters(generator)
        c = self.config
        std = math.sqrt(2 / c.length)
        with torch.no_grad():
            if c.init == "zeros":
                self.filter_OHJL.zero_()
                return
            self.filter_OHJL.normal_(0, std if c.init == "paper" else NOISE * std, generator=generator)
            if c.init == "shift":
                self.filter_OHJL[:, :, -1, 1] += 1

    def no_decay(self) -> set[str]:
        return {"filter_OHJL"} | super().no_decay()

    def fredholm_indices(self) -> dict[tuple[int, int, int], tuple[int | None, float]]:
        """(index, margin) of each filter, by (operator, head, neighbour); the last neighbour is the channel itself."""
        shape = self.filter_OHJL.shape[:3]
        return {
            (o, h, j): fredholm_index(self.taps(o)[h, j])
            for o in range(shape[0])
            for h in range(shape[1])
            for j in range(shape[2])
        }
