"""Hyena, order 2 (arXiv 2302.10866): a long convolution between two gates, its filter a function of the lag (baselines 3.10).

    x_0, x_1, v = conv(W_in u + b);   z = x_1 v;   y_t = x_0 (sum_{k <= t} h_k z_{t-k} + D z_t);   W_out y + b
    h_k = MLP(features(k)) exp(-|delta| k / (L - 1))

Features and window are stretched to ``length``: another length is another filter. E features, F units, M bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor, nn

from mixers import register
from mixers.base import NO_CONTEXT, Context, Knob, Mixer, MixerConfig, State
from mixers.ops._documents import positions_in_documents
from mixers.ops.long_conv import BACKENDS, causal_conv, conv_flops_per_token
from mixers.ops.online_conv import init_conv_state, online_conv
from mixers.parts import FusedLinear, ResidualLinear, ShortConv

TARGET = 0.01  # what the window has left after decay_fast or decay_slow lengths
LOWEST = 1e-4  # frequency of the first band


@register
@dataclass
class HyenaConfig(MixerConfig):
    """Filter fields as in the authors' code; its language models have filter_features=33, filter_frequency=14."""

    kind: str = "hyena"
    length: int = MISSING
    filter_width: int = 64
    filter_features: int = 3
    filter_frequency: float = 1.0
    decay_fast: float = 0.3
    decay_slow: float = 1.5
    short_width: int = 3
    backend: str = "auto"

    state_knob: ClassVar[Knob | str] = "it keeps all tokens, as wide as the layer, up to its length"
    test_overrides: ClassVar[dict] = {"length": 2048}

    def check(self, path: str) -> None:
        if self.length < 2:
            raise ValueError(f"{path}.length={self.length}: must be at least 2 (usual is data.seq_len)")
        if self.filter_features < 3 or self.filter_features % 2 == 0:
            raise ValueError(
                f"{path}.filter_features={self.filter_features}: must be odd and at least 3, the lag and pairs of waves"
            )
        for name in ("filter_width", "short_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be at least 1")
        for name in ("filter_frequency", "decay_fast", "decay_slow"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be above 0")
        if self.backend not in BACKENDS:
            raise ValueError(f"{path}.backend={self.backend}: must be one of {', '.join(BACKENDS)}")

    def n_parameters(self) -> int:
        """Two projections, short convolution, filter MLP, its frequencies, and D."""
        d, features, units = self.d_model, self.filter_features, self.filter_width
        mlp = (features * units + units) + 2 * (units**2 + units) + units * d
        return 4 * d**2 + 4 * d + 3 * d * (self.short_width + 1) + mlp + units + d

    def max_len(self) -> int | None:
        return self.length

    def accessories(self) -> dict[str, str]:
        return {
            "projections": "in and out, with biases",
            "short convolution": f"width {self.short_width} with bias on all, no activation",
            "filter": f"MLP of width {self.filter_width} on {self.filter_features} features of the lag",
            "gates": "two, products without activation",
            "positions": "none",
        }

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Hyena(self)


class Sine(nn.Module):
    """sin(frequency x), one learned frequency per unit; one module for all layers of a filter."""

    def __init__(self, width: int):
        super().__init__()
        self.frequency_F = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency_F * x)


class Hyena(Mixer):
    """y = x_0 (h * (x_1 v) + D x_1 v), with one implicit filter h per channel."""

    def __init__(self, config: HyenaConfig):
        super().__init__()
        self.config = config
        width, units = config.d_model, config.filter_width
        self.project = FusedLinear(width, (width,) * 3)
        self.conv = ShortConv(3 * width, config.short_width, bias=True, activation=False)
        sine = Sine(units)
        self.filter_mlp = nn.Sequential(
            nn.Linear(config.filter_features, units),
            sine,
            nn.Linear(units, units),
            sine,
            nn.Linear(units, units),
            sine,
            nn.Linear(units, width, bias=False),
        )
        self.skip_D = nn.Parameter(torch.empty(width))
        self.out = ResidualLinear(width, width)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        context, steps = context or NO_CONTEXT, x_BTD.shape[1]
        self._check_length(steps, state, context.segment_ids)
        tail = None if state is None else state["conv"]
        through, tail = self.conv(self.project(x_BTD), tail, context.segment_ids)
        gate_BTD, other_BTD, v_BTD = through.chunk(3, dim=-1)
        z_BTD = v_BTD * other_BTD
        options: dict[str, Any] = {"segment_ids": context.segment_ids, "backend": self.config.backend}
        if state is None:
            y_BTD = causal_conv(z_BTD, F.pad(self.taps(steps), (0, max(0, steps - self.config.length))), **options)
            return self.out(y_BTD * gate_BTD), None
        own = {key: state[key] for key in ("buffer", "length", "start", "base")}
        y_BTD, own = online_conv(z_BTD, self.taps, own, donate_state=context.donate_state, **options)
        assert tail is not None
        return self.out(y_BTD * gate_BTD), {**own, "conv": tail}

    def _check_length(self, steps: int, state: State | None, segment_ids: Tensor | None) -> None:
        """Raise ValueError where a document reaches lags that the filter has not."""
        if state is None and steps <= self.config.length:
            return
        before_B = torch.zeros(1, dtype=torch.int64) if state is None else state["length"] - state["start"]
        reached = steps if state is None else int(before_B.max()) + steps
        if reached > self.config.length and segment_ids is not None:  # documents may be shorter; looking costs a sync
            reached = int(positions_in_documents(segment_ids, before_B).max()) + 1
        if reached > self.config.length:
            raise ValueError(
                f"mixer.length={self.config.length}: a document has {reached} tokens, and the filter is made for no more "
                "than mixer.length; it must be at least the longest sequence"
            )

    def taps(self, count: int) -> Tensor:
        """(D, count), or all there are: the filter in float32 or wider, with D in the tap at lag 0."""
        count = min(count, self.config.length)
        with torch.autocast(self.skip_D.device.type, enabled=False):
            mlp = self.filter_mlp(self._features(count))
            taps_TD = mlp * self._window(count)
            return torch.cat((taps_TD[:1] + self.skip_D, taps_TD[1:])).T

    def _lags(self, count: int) -> Tensor:
        """(count, 1): 0 to 1 over the whole length."""
        lag_T1 = torch.arange(count, device=self.skip_D.device, dtype=self.skip_D.dtype)[:, None]
        return lag_T1 / (self.config.length - 1)

    def _features(self, count: int) -> Tensor:
        """(count, E): the lag, then real and imaginary parts of e^{-i omega 2 pi k / L}, omega evenly spaced."""
        bands = (self.config.filter_features - 1) // 2
        lag_T1 = self._lags(count)
        omega_M = torch.linspace(LOWEST, bands - 1, bands, device=lag_T1.device, dtype=lag_T1.dtype)
        angle_TM = omega_M * lag_T1 * (2 * math.pi * (self.config.length - 1) / self.config.length)
        return torch.cat((lag_T1, angle_TM.cos(), -angle_TM.sin()), dim=1)

    def _window(self, count: int) -> Tensor:
        """(count, D): exponential decay, slowest in the first channel."""
        c, lag_T1 = self.config, self._lags(count)
        slow, fast = -math.log(TARGET) / c.decay_slow, -math.log(TARGET) / c.decay_fast
        return torch.exp(-torch.linspace(slow, fast, c.d_model, device=lag_T1.device, dtype=lag_T1.dtype) * lag_T1)

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        width = self.config.d_model
        tail = torch.zeros(batch_size, self.config.short_width - 1, 3 * width, device=device, dtype=dtype)
        return {**init_conv_state(batch_size, max_len, (width,), device=device, dtype=dtype), "conv": tail}

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Short and long convolution and gates. The filter's MLP counts as linear maps: once per sequence of a batch,
        which is too much for batches, as one pass serves them all."""
        c = self.config
        long = conv_flops_per_token(seq_len, c.d_model, 1, c.backend)
        return long + 2 * c.short_width * 3 * c.d_model + 2 * c.d_model

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Inputs of the long convolution in float32 (or wider), and the short one's tail."""
        c = self.config
        wide = torch.promote_types(dtype, torch.float32)
        return seq_len * c.d_model * wide.itemsize + (c.short_width - 1) * 3 * c.d_model * dtype.itemsize

    def init_parameters(self, generator: torch.Generator) -> None:
        """Filter MLP uniform in +-1/sqrt(fan in), biases too, which is a linear map's start in the authors' code."""
        self.conv.init_parameters(generator)
        with torch.no_grad():
            for layer in self.filter_mlp:
                if isinstance(layer, nn.Linear):
                    bound = layer.in_features**-0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    if layer.bias is not None:
                        layer.bias.uniform_(-bound, bound, generator=generator)
                elif isinstance(layer, Sine):
                    layer.frequency_F.fill_(self.config.filter_frequency)
            self.skip_D.normal_(generator=generator)

    def no_decay(self) -> set[str]:
        return {"skip_D"} | {f"filter_mlp.{name}" for name, _ in self.filter_mlp.named_parameters()}
