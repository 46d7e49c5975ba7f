"""The frame of the linear family: everything around a state rule, so that a mixer's file holds its rule alone.

    q, k, v = W x;  short convolution + SiLU;  L2 norm of q and k;  gates;  RULE;  norm per head;  output gate;  W_o

The defaults are the matched layer of the MesaNet comparison (arXiv 2506.05233, Appendix E; baselines 1.1): equal
projections for all mixers, convolution of width 4 on q and k only, one scalar of each gate per head, RMS norm per head,
no output gate. A ``*_native`` config switches to a reference implementation's full layer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers.base import NO_CONTEXT, Context, Knob, Mixer, MixerConfig, State
from mixers.parts import CONV_ON, FusedLinear, ResidualLinear, RMSNorm, ShortConv, l2_normalise, rotary, wide_linear

QK_NORMS = ("none", "l2")
HEAD_NORMS = ("none", "rms", "layer")
OUTPUT_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
POSITIONS = ("none", "rotary")


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
    positions: str = "none"

    state_knob: ClassVar[Knob | str] = Knob("mixer.expand_v", low=0.25, high=4, per_head_dim=True)
    gates: ClassVar[int] = 0  # scalars per head and token that the rule needs; may be a property

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
            ("output_gate", ("none", *OUTPUT_GATES)),
            ("positions", POSITIONS),
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
        if self.positions == "rotary" and self.key_dim % 2:
            raise ValueError(
                f"{path}.positions=rotary: turns pairs, so the key width, head_dim={self.head_dim} times "
                f"expand_k={self.expand_k}, must be even"
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
            + {"none": 0, "rms": self.value_dim, "layer": values}[self.head_norm]
            + (self.d_model * values if self.output_gate != "none" else 0)
            + self.gate_parameters()
        )

    def accessories(self) -> dict[str, str]:
        conv = "none" if self.conv_on == "none" else f"width {self.conv_width} on {', '.join(self.conv_on)}"
        return {
            "short convolution": conv,
            "q/k norm": self.qk_norm,
            "head norm": self.head_norm,
            "output gate": self.output_gate,
            "positions": self.positions,
        }


class HeadLayerNorm(nn.Module):
    """Layer norm of each head with gains of its own, no bias (xLSTM)."""

    def __init__(self, n_heads: int, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n_heads, width))

    def forward(self, o_BTHV: Tensor) -> Tensor:
        return F.layer_norm(o_BTHV, o_BTHV.shape[-1:], eps=self.eps) * self.weight


class LinearFrame(Mixer):
    """Projections, convolution, norms and output around a state rule S_BHKV."""

    def __init__(self, config: LinearFrameConfig):
        super().__init__()
        self.config = config
        c = config
        keys, values = c.n_heads * c.key_dim, c.n_heads * c.value_dim
        self.qkv = FusedLinear(c.d_model, (keys, keys, values), bias=False)
        self.conv = ShortConv(c.conv_channels(), c.conv_width) if c.conv_on != "none" else None
        if c.gates:
            self.gate = nn.Linear(c.d_model, c.gates * c.n_heads, bias=c.gate_bias)
        self.norm: nn.Module | None = None
        if c.head_norm == "rms":
            self.norm = RMSNorm(c.value_dim, eps=1e-5)
        elif c.head_norm == "layer":
            self.norm = HeadLayerNorm(c.n_heads, c.value_dim)
        self.out_gate = nn.Linear(c.d_model, values, bias=False) if c.output_gate != "none" else None
        self.out = ResidualLinear(values, c.d_model, bias=False)

    @abstractmethod
    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates_BTGH: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        """The state rule: o_BTHV and the final state, with the keys of ``state_shapes``.

        ``gates`` are pre-activations in float32 or wider; ``state`` is None where the sequence begins.
        """

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes, without the batch, of what the rule keeps in float32 or wider."""
        c = self.config
        return {"matrix": (c.n_heads, c.key_dim, c.value_dim)}

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        c, context = self.config, context or NO_CONTEXT
        segments = context.segment_ids
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
        if c.positions == "rotary":
            q, k = self._turned(q, k, state, context.positions)
        gates = self.gates(x_BTD)
        v = v.unflatten(-1, (c.n_heads, c.value_dim))
        o_BTHV, after = self.rule(q, k, v, gates, state, segments)
        if self.norm is not None:
            o_BTHV = self.norm(o_BTHV.to(self.qkv.weight.dtype))  # float32 under autocast
        o = o_BTHV.flatten(2)
        if self.out_gate is not None:
            o = o * OUTPUT_GATES[c.output_gate](self.out_gate(x_BTD).to(o.dtype))
        y_BTD = self.out(o)
        if state is None:
            return y_BTD, None
        if tail is not None:
            after["conv"] = tail
        if c.positions == "rotary":
            after["length"] = state["length"] + x_BTD.shape[1]
        return y_BTD, after

    def _turned(self, q: Tensor, k: Tensor, state: State | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            # Only distances matter and documents never see each other: counting on over a border is harmless.
            first = 0 if state is None else int(state["length"][0])
            positions = torch.arange(first, first + q.shape[1], device=q.device)
        return rotary(q, positions), rotary(k, positions)

    def gates(self, x_BTD: Tensor) -> Tensor | None:
        """(B,T,G,H) pre-activations of the gates, if the rule has any."""
        if not self.config.gates:
            return None
        return wide_linear(self.gate, x_BTD).unflatten(-1, (self.config.gates, self.config.n_heads))

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        wide = torch.promote_types(dtype, torch.float32)
        state = {
            key: torch.zeros(batch_size, *shape, device=device, dtype=wide)
            for key, shape in self.state_shapes().items()
        }
        if self.conv is not None:
            state["conv"] = torch.zeros(batch_size, c.conv_width - 1, c.conv_channels(), device=device, dtype=dtype)
        if c.positions == "rotary":
            state["length"] = torch.zeros(batch_size, dtype=torch.int64)
        return state

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """The rule's state in float32 (or wider) and the convolution's tail: constant in seq_len."""
        c = self.config
        wide = torch.promote_types(dtype, torch.float32)
        tail = (c.conv_width - 1) * c.conv_channels() * dtype.itemsize
        return sum(math.prod(shape) for shape in self.state_shapes().values()) * wide.itemsize + tail

    def conv_flops_per_token(self) -> int:
        """Of the short convolution."""
        return 2 * self.config.conv_width * self.config.conv_channels()

    def init_parameters(self, generator: torch.Generator) -> None:
        if self.conv is not None:
            self.conv.init_parameters(generator)
        if isinstance(self.norm, HeadLayerNorm):
            nn.init.ones_(self.norm.weight)

    @torch.no_grad()
    def set_gate_biases(self, *biases: float) -> None:
        """Start values of the gates' biases, one for each gate."""
        for bias_H, value in zip(self.gate.bias.view(self.config.gates, -1), biases, strict=True):
            bias_H.fill_(value)

    def no_decay(self) -> set[str]:
        return {"norm.weight"} if self.config.head_norm == "layer" else set()
