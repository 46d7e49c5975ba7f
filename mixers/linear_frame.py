"""The frame of the linear family: everything around a state rule, so that a mixer's file holds its rule alone.

    q, k, v = W x;  short convolution + SiLU;  L2 norm of q and k;  gates;  RULE;  norm per head;  output gate;  W_o

The defaults are the matched layer of the MesaNet comparison (arXiv 2506.05233, Appendix E; baselines 1.1): equal
projections for all mixers, convolution of width 4 on q and k only, one scalar of each gate per head, RMS norm per head,
no output gate. A ``*_native`` config switches to a reference implementation's full layer.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers.base import NO_CONTEXT, Context, Mixer, MixerConfig, State
from mixers.parts import ResidualLinear, ShortConv, l2_normalise

CONV_ON = ("none", "qk", "qkv")
QK_NORMS = ("none", "l2")
HEAD_NORMS = ("none", "rms")
OUTPUT_GATES = ("none", "silu")


@dataclass
class LinearFrameConfig(MixerConfig):
    """Accessories of a linear-family layer; every one can be switched for ablations."""

    expand_k: float = 1.0
    expand_v: float = 1.0
    conv_on: str = "qk"
    conv_width: int = 4
    qk_norm: str = "l2"
    head_norm: str = "rms"
    output_gate: str = "none"

    gates: ClassVar[int] = 0  # scalars per head and token that the rule needs

    @property
    def key_dim(self) -> int:
        """K: key width of one head."""
        return int(self.head_dim * self.expand_k)

    @property
    def value_dim(self) -> int:
        """V: value width of one head."""
        return int(self.head_dim * self.expand_v)

    @property
    def gate_bias(self) -> bool:
        """Does the linear map to the gates have a bias?"""
        return True

    def check(self, path: str) -> None:
        for name, choices in (
            ("conv_on", CONV_ON),
            ("qk_norm", QK_NORMS),
            ("head_norm", HEAD_NORMS),
            ("output_gate", OUTPUT_GATES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{path}.{name}={value}: must be one of {', '.join(choices)}")
        if self.conv_width < 1:
            raise ValueError(
                f"{path}.conv_width={self.conv_width}: must be at least 1 (4 is usual; conv_on=none is off)"
            )
        for name in ("expand_k", "expand_v"):
            width = self.head_dim * getattr(self, name)
            if width < 1 or width != int(width):
                raise ValueError(
                    f"{path}.{name}={getattr(self, name)}: times head_dim={self.head_dim} it must be a whole width >= 1"
                )

    def conv_channels(self) -> int:
        """Channels that pass the short convolution."""
        keys, values = self.n_heads * self.key_dim, self.n_heads * self.value_dim
        return {"none": 0, "qk": 2 * keys, "qkv": 2 * keys + values}[self.conv_on]

    def gate_parameters(self) -> int:
        """Parameters of the gates; one linear map with bias to the scalars by default."""
        return self.gates * self.n_heads * (self.d_model + 1)

    def n_parameters(self) -> int:
        keys, values = self.n_heads * self.key_dim, self.n_heads * self.value_dim
        return (
            self.d_model * (2 * keys + 2 * values)
            + self.conv_width * self.conv_channels()
            + (self.value_dim if self.head_norm == "rms" else 0)
            + (self.d_model * values if self.output_gate == "silu" else 0)
            + self.gate_parameters()
        )

    def accessories(self) -> dict[str, str]:
        conv = "none" if self.conv_on == "none" else f"width {self.conv_width} on {', '.join(self.conv_on)}"
        return {
            "short convolution": conv,
            "q/k norm": self.qk_norm,
            "head norm": self.head_norm,
            "output gate": self.output_gate,
            "positions": "none",
        }


class LinearFrame(Mixer):
    """Projections, convolution, norms and output around a state rule S_BHKV."""

    def __init__(self, config: LinearFrameConfig):
        super().__init__()
        self.config = config
        c = config
        keys, values = c.n_heads * c.key_dim, c.n_heads * c.value_dim
        self.qkv = nn.Linear(c.d_model, 2 * keys + values, bias=False)
        self.conv = ShortConv(c.conv_channels(), c.conv_width) if c.conv_on != "none" else None
        if c.gates:
            self.gate = nn.Linear(c.d_model, c.gates * c.n_heads, bias=c.gate_bias)
        self.norm_V = nn.RMSNorm(c.value_dim, eps=1e-5) if c.head_norm == "rms" else None
        self.out_gate = nn.Linear(c.d_model, values, bias=False) if c.output_gate == "silu" else None
        self.out = ResidualLinear(values, c.d_model, bias=False)

    @abstractmethod
    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates_BTGH: Tensor | None,
        initial_state: Tensor | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The state rule: o_BTHV and the final matrix state. ``gates`` are pre-activations in float32 or wider."""

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        c, segments = self.config, (context or NO_CONTEXT).segment_ids
        keys, values = c.n_heads * c.key_dim, c.n_heads * c.value_dim
        qkv, tail = self.qkv(x_BTD), None
        if self.conv is None:
            q, k, v = qkv.split((keys, keys, values), dim=-1)
        else:
            through, beside = qkv.split((c.conv_channels(), qkv.shape[-1] - c.conv_channels()), dim=-1)
            through, tail = self.conv(through, None if state is None else state["conv"], segments)
            q, k, *v_through = through.split((keys, keys, *((values,) if c.conv_on == "qkv" else ())), dim=-1)
            v = v_through[0] if v_through else beside
        q, k = q.unflatten(-1, (c.n_heads, c.key_dim)), k.unflatten(-1, (c.n_heads, c.key_dim))
        if c.qk_norm == "l2":
            q, k = l2_normalise(q), l2_normalise(k)
        gates = self.gates(x_BTD).unflatten(-1, (c.gates, c.n_heads)) if c.gates else None
        v = v.unflatten(-1, (c.n_heads, c.value_dim))
        o_BTHV, matrix = self.rule(q, k, v, gates, None if state is None else state["matrix"], segments)
        if self.norm_V is not None:
            o_BTHV = self.norm_V(o_BTHV.to(self.norm_V.weight.dtype))  # float32 under autocast
        o = o_BTHV.flatten(2)
        if self.out_gate is not None:
            o = o * F.silu(self.out_gate(x_BTD))
        if state is not None:
            state = {"matrix": matrix} if tail is None else {"matrix": matrix, "conv": tail}
        return self.out(o), state

    def gates(self, x_BTD: Tensor) -> Tensor:
        """Pre-activations of the gates, in float32 also under autocast: a decay of 0.999 does not survive bf16."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            wide = torch.promote_types(self.gate.weight.dtype, torch.float32)
            bias = None if self.gate.bias is None else self.gate.bias.to(wide)
            return F.linear(x_BTD.to(wide), self.gate.weight.to(wide), bias)

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        wide = torch.promote_types(dtype, torch.float32)
        state = {"matrix": torch.zeros(batch_size, c.n_heads, c.key_dim, c.value_dim, device=device, dtype=wide)}
        if self.conv is not None:
            state["conv"] = torch.zeros(batch_size, c.conv_width - 1, c.conv_channels(), device=device, dtype=dtype)
        return state

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """The matrix state in float32 (or wider) and the convolution's tail: constant in seq_len."""
        c = self.config
        wide = torch.promote_types(dtype, torch.float32)
        tail = (c.conv_width - 1) * c.conv_channels() * dtype.itemsize
        return c.n_heads * c.key_dim * c.value_dim * wide.itemsize + tail

    def init_parameters(self, generator: torch.Generator) -> None:
        if self.conv is not None:
            self.conv.init_parameters(generator)
