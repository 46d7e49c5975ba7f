"""Linear attention without decay (arXiv 2006.16236): S <- S + k v^T;  o = S^T q / sqrt(K) (baselines 3.3).

In the matched frame k and q are of unit length and the read-out is normed per head; the original's feature map
(elu + 1) and normaliser (o / sum of the weights) are switches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers import register
from mixers.base import Mixer, State
from mixers.kernels import chosen
from mixers.linear_frame import LinearFrame, LinearFrameConfig
from mixers.ops.linear import chunk_linear_attention, recurrent_linear_attention

CHUNK = 64
FEATURE_MAPS = ("identity", "elu1")


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State | None, segment_ids: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The form of linear attention that suits the length."""
    initial = None if state is None else state["matrix"]
    if q.shape[1] == 1:
        return recurrent_linear_attention(q, k, v, g, scale=scale, initial_state=initial, segment_ids=segment_ids)
    return chosen(chunk_linear_attention, q)(
        q, k, v, g, scale=scale, initial_state=initial, segment_ids=segment_ids, chunk_size=CHUNK
    )


def linear_attention_flops(n_heads: int, key_dim: int, value_dim: int, seq_len: int) -> float:
    """4 K V + 2 C (K + V) per head: Q K^T, P V, Q S, K^T V."""
    return n_heads * (4 * key_dim * value_dim + 2 * min(CHUNK, seq_len) * (key_dim + value_dim))


@register
@dataclass
class LinearConfig(LinearFrameConfig):
    """No gates at all: the state only grows."""

    kind: str = "linear"
    feature_map: str = "identity"
    normaliser: bool = False

    def check(self, path: str) -> None:
        super().check(path)
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"{path}.feature_map={self.feature_map}: must be one of {', '.join(FEATURE_MAPS)}")
        if self.normaliser and self.feature_map != "elu1":
            raise ValueError(
                f"{path}.normaliser=true: with feature_map={self.feature_map} weights may be negative and their sum zero; "
                f"use {path}.feature_map=elu1"
            )

    def accessories(self) -> dict[str, str]:
        normaliser = ", normalised" if self.normaliser else ""
        return {**super().accessories(), "gates": "none", "feature map": f"{self.feature_map}{normaliser}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return LinearAttention(self)


class LinearAttention(LinearFrame):
    """The linear frame around plain linear attention."""

    config: LinearConfig

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """With a normaliser one more value, which is always one: its read-out is the sum of the weights."""
        c = self.config
        return {"matrix": (c.n_heads, c.key_dim, c.value_dim + c.normaliser)}

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        c = self.config
        if c.feature_map == "elu1":
            q_BTHK, k_BTHK = F.elu(q_BTHK) + 1, F.elu(k_BTHK) + 1
        if c.normaliser:
            v_BTHV = torch.cat((v_BTHV, torch.ones_like(v_BTHV[..., :1])), dim=-1)
        scale = 1.0 if c.normaliser else c.key_dim**-0.5
        o_BTHV, matrix = linear_attention(q_BTHK, k_BTHK, v_BTHV, None, state, segment_ids, scale)
        if c.normaliser:
            o_BTHV = o_BTHV[..., :-1] / o_BTHV[..., -1:]
        return o_BTHV, {"matrix": matrix}

    def cell_flops_per_token(self, seq_len: int) -> float:
        c = self.config
        cell = linear_attention_flops(c.n_heads, c.key_dim, c.value_dim + c.normaliser, seq_len)
        return cell + self.conv_flops_per_token()
